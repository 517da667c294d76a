"""How ranks that claim different things are told apart, in the words of ``golden/claims.txt``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fsdp2.extras.claims import Claim, difference
from tests.harness.golden import texts_beside

UNITS = "units of (root), with gradients"
CLAIMS: dict[str, Mapping[int, Mapping[str, Claim]]] = {
    "units that ran on some ranks": {
        0: {UNITS: ["(root)", "a", "b"]},
        1: {UNITS: ["(root)", "b"]},
        2: {UNITS: ["(root)", "b", "c"]},
    },
    "another order": {0: {UNITS: ["(root)", "a", "b", "a"]}, 1: {UNITS: ["(root)", "b", "a"]}},
    "as far as a forward has come": {0: {UNITS: ["(root)", "b"]}, 1: {UNITS: ["(root)", "a", "..."]}},
    "gradients, of which only the first are named": {
        rank: {"gradients": {f"w{index}": rank == 0 for index in range(6)}} for rank in range(2)
    },
    "flags, before what follows from them": {
        rank: {UNITS: [str(rank)], "requires_grad": {"w": rank == 0}} for rank in range(2)
    },
    "alike": {0: {UNITS: ["a"]}, 1: {UNITS: ["a"]}},
    "so far alike": {0: {UNITS: ["a", "b"]}, 1: {UNITS: ["a", "..."]}},
    "nothing claimed": {0: {UNITS: ["a"]}, 1: {}},
    "another forward": {0: {"units of a, with gradients": ["a"]}, 1: {"units of b, with gradients": ["b"]}},
    "not used yet": {0: {"requires_grad": {"a": True, "b": False}}, 1: {"requires_grad": {"a": True}}},
}


@pytest.mark.parametrize("case", CLAIMS)
def test_what_differs_is_named(case: str) -> None:
    said = "\n".join(difference(CLAIMS[case])) or "no difference"
    texts_beside(__file__).check(case, said, among=CLAIMS)
