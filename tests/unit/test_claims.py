"""How ranks that claim different things are told apart."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from expecttest import assert_expected_inline

from fsdp2.extras.claims import Claim, difference

UNITS = "units of (root), with gradients"


def _text(claims: Mapping[int, Mapping[str, Claim]]) -> str:
    found = difference(claims)
    return "" if found is None else "\n".join([found.why, *found.lines])


def test_units_that_ran_on_some_ranks_are_named() -> None:
    assert_expected_inline(
        _text({0: {UNITS: ["(root)", "a", "b"]}, 1: {UNITS: ["(root)", "b"]}, 2: {UNITS: ["(root)", "b", "c"]}}),
        """\
they use other units
ranks use other units in the same forward:
  unit 'a' ran on rank 0, not on ranks 1, 2
  unit 'c' ran on rank 2, not on ranks 0, 1
Let all ranks use the same units and parameters, or call set_ranks_may_differ(True) on the root.
See docs/advanced/ranks.md.""",
    )


def test_the_same_units_in_another_order() -> None:
    assert_expected_inline(
        _text({0: {UNITS: ["(root)", "a", "b", "a"]}, 1: {UNITS: ["(root)", "b", "a"]}}),
        """\
they use other units
ranks use other units in the same forward:
  the order differs: at the same place ran 'a' on rank 0, 'b' on rank 1
Let all ranks use the same units and parameters, or call set_ranks_may_differ(True) on the root.
See docs/advanced/ranks.md.""",
    )


def test_a_forward_that_goes_on_is_compared_as_far_as_it_has_come() -> None:
    so_far: list[str] = ["(root)", "a", "..."]
    assert difference({0: {UNITS: ["(root)", "a", "b"]}, 1: {UNITS: so_far}}) is None
    found = difference({0: {UNITS: ["(root)", "b"]}, 1: {UNITS: so_far}})
    assert found is not None
    assert found.lines[1:3] == ["  unit 'b' ran on rank 0, not on rank 1", "  unit 'a' ran on rank 1, not on rank 0"]


def test_parameters_with_a_gradient_on_some_ranks_are_named_and_only_the_first() -> None:
    mine = {f"w{index}": True for index in range(6)}
    assert_expected_inline(
        _text({0: {"gradients": mine}, 1: {"gradients": dict.fromkeys(mine, False)}}),
        """\
other parameters have gradients
parameters have a gradient on some ranks only:
  parameter 'w0' had a gradient on rank 0, not on rank 1
  parameter 'w1' had a gradient on rank 0, not on rank 1
  parameter 'w2' had a gradient on rank 0, not on rank 1
  parameter 'w3' had a gradient on rank 0, not on rank 1
  and 2 more
Let all ranks use the same units and parameters, or call set_ranks_may_differ(True) on the root.
See docs/advanced/ranks.md.""",
    )


def test_flags_are_told_before_what_follows_from_them() -> None:
    claims = {rank: {UNITS: [str(rank)], "requires_grad": {"w": rank == 0}} for rank in range(2)}
    found = difference(claims)
    assert found is not None
    assert found.why == "requires_grad differs"


@pytest.mark.parametrize(
    "claims",
    [
        {0: {UNITS: ["a"]}, 1: {UNITS: ["a"]}},
        {0: {UNITS: ["a"]}, 1: {}},
        {0: {"units of a, with gradients": ["a"]}, 1: {"units of b, with gradients": ["b"]}},
        {0: {"requires_grad": {"a": True, "b": False}}, 1: {"requires_grad": {"a": True}}},
    ],
    ids=["alike", "nothing claimed", "another forward", "not used yet"],
)
def test_ranks_that_are_alike_as_far_as_known(claims: Mapping[int, Mapping[str, Claim]]) -> None:
    assert difference(claims) is None
