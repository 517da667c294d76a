"""What the short suite keeps of a product of parameters."""

from __future__ import annotations

import itertools

from tests.harness.selection import covering


def _product(**values: str) -> list[dict[str, str]]:
    return [dict(zip(values, case, strict=True)) for case in itertools.product(*values.values())]


def test_three_parameters_keep_every_pair() -> None:
    cases = _product(model="ab", mesh="xyz", dtype="12", ranks="4")
    kept = [cases[index] for index in covering(cases)]
    assert len(kept) <= 7
    assert len(kept) < len(cases)
    for names in itertools.combinations(("model", "mesh", "dtype"), 2):
        pairs = [{tuple(case[name] for name in names) for case in some} for some in (kept, cases)]
        assert pairs[0] == pairs[1]


def test_two_parameters_keep_every_value() -> None:
    cases = _product(model="abc", mesh="xy", ranks="4")
    kept = [cases[index] for index in covering(cases)]
    assert len(kept) == 3
    for name in ("model", "mesh"):
        assert {case[name] for case in kept} == {case[name] for case in cases}


def test_one_parameter_and_none_keep_every_case() -> None:
    assert covering(_product(model="abc", ranks="4")) == [0, 1, 2]
    assert covering(_product(ranks="4")) == [0]
