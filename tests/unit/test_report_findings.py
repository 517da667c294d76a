"""What a report proposes to change, and by how much the step may become shorter: each rule on plain facts."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from fsdp2.tools.report.findings import (
    Finding,
    StepFacts,
    UnitFacts,
    alone,
    findings,
    join,
    keep,
    late_host,
    late_rank,
    prefetch,
    reduce,
    split,
    tail,
)

MIB = 2**20


def _unit(name: str, mib: float = 1, **facts: float) -> UnitFacts:
    nbytes = int(mib * MIB)
    return replace(UnitFacts(name, nbytes, nbytes // 16), **facts)  # type: ignore[arg-type]


def _step(*units: UnitFacts, **facts: object) -> StepFacts:
    return replace(StepFacts(100.0, units), **facts)  # type: ignore[arg-type]


def _said(found: list[Finding]) -> str:
    return "\n".join(textwrap.fill(f"{each.rule}, {each.gain_ms:.3f} ms: {each.text}", 110) for each in found)


def test_five_things_with_the_largest_gains() -> None:
    units = [
        _unit("embed", keeps=True, forward_late=0.2, per_use=0.9),
        _unit("layers.0", forward=4, backward=8, per_use=0.9),
        _unit("layers.1", forward=4, forward_late=3, forward_idle=2.5, backward_late=0.7, per_use=0.9),
        _unit("layers.2", forward=4, backward=8, reduce_late=4, per_use=0.9),
        _unit("layers.3", 6, gather=6, forward=24, backward=48, forward_late=1.2, backward_late=2, per_use=2),
        _unit("norm.0", 0.1, is_small=True, per_use=0.6),
        _unit("norm.1", 0.1, is_small=True, per_use=0.6),
        _unit("norm.2", 0.1, is_small=True, per_use=0.6),
        _unit("head", backward=5, tail_late=4, per_use=0.9),
    ]
    facts = _step(*units, reduce_idle=3.5, rank_compute=[(50, 58), (51, 60)], rank_waits=(9, 0.5))
    assert_expected_inline(
        _said(findings(facts)),
        """\
late rank, 8.000 ms: Rank 1 computes longer than all others in each of 2 steps, by 8.0 ms or more, and they
wait for it. Give it less work, or look at its host.
reduce, 3.500 ms: Backward waits 4.0 ms for the reductions of `layers.2`. Let two be in flight:
set_reduce_scatter_max_input_buffers(2); this holds one more unit's gradients.
keep, 2.700 ms: `layers.1`, `layers.3` are gathered again for backward, and are 2.7 ms late. Shard them with
reshard_after_forward=False; this takes 7.0 MiB more per rank.
prefetch, 2.500 ms: `layers.1` gathers 3.0 ms late in forward, and was not prefetched. Put it into
`layers.0`'s list: set_modules_to_forward_prefetch.
tail, 2.000 ms: The step ends with 4.0 ms of waiting for the reduction of `head`. Split it into two, so that
one half is reduced while the other computes.""",
    )


def test_a_step_that_lost_nothing_has_no_findings() -> None:
    units = [_unit("a", forward=5, backward=9, gather=4), _unit("b", 9, forward=5, backward=9, gather=4)]
    assert findings(_step(*units, rank_compute=[(10, 10)] * 2, rank_waits=(1, 1))) == []


def test_what_gains_less_than_a_200th_of_the_step_is_left_out() -> None:
    facts = _step(_unit("a"), rank_compute=[(50.4, 50)] * 2, rank_waits=(0, 9))
    assert late_rank(facts) != []
    assert findings(facts) == []


# split


def test_split_gains_what_parts_can_hide() -> None:
    """Of six parts, each takes 1 ms: the first has the 4.8 ms that the whole had, the others hide behind compute."""
    large = _unit("b", 6, gather=6, forward=24, forward_late=1.2)
    (found,) = split(_step(_unit("a"), large, _unit("c")))
    assert found.gain_ms == pytest.approx(1.2)
    slow = replace(large, forward=0)  # nothing to hide behind: each part is as late as before
    assert split(_step(_unit("a"), slow, _unit("c"))) == []


def test_split_needs_a_large_unit_whose_modules_are_smaller() -> None:
    late = {"gather": 6.0, "forward": 24.0, "forward_late": 1.2}
    assert split(_step(_unit("a"), _unit("b", 1.5, **late), _unit("c"))) == []
    one_module = replace(_unit("b", 6, **late), largest_module_nbytes=6 * MIB)
    assert split(_step(_unit("a"), one_module, _unit("c"))) == []
    assert split(_step(_unit("b", 6, **late))) == []


def test_a_unit_of_two_layers_of_which_one_has_a_bias_is_split() -> None:
    """One layer holds a little more than half."""
    nbytes, times = 6 * MIB + 2**14, {"gather": 6, "forward": 24, "forward_late": 1.2, "backward": 9, "tail_late": 4}
    two = UnitFacts("b", nbytes, 3 * MIB + 2**13 + 2**10, **times)  # type: ignore[arg-type]
    (found,) = split(_step(_unit("a"), two, _unit("c")))
    assert "Split it into 2:" in found.text
    assert tail(_step(_unit("a"), two, _unit("c"))) != []
    one_large = replace(two, largest_module_nbytes=nbytes * 3 // 4)
    assert split(_step(_unit("a"), one_large, _unit("c"))) == []


def test_several_units_to_split_are_one_finding() -> None:
    small = [_unit(str(i)) for i in range(3)]
    large = [_unit(name, 6, gather=6, forward=24, forward_late=late) for name, late in (("b", 1.0), ("c", 1.2))]
    (found,) = split(_step(*small, *large))
    assert (found.units, found.gain_ms) == (("c", "b"), pytest.approx(2.2))
    assert found.text.endswith("The same holds for `b`.")


# alone


def test_one_unit_with_all_parameters_gains_what_its_parts_can_hide() -> None:
    """Of 16 parts, one gather stays; the others hide behind forward."""
    one = _unit("(root)", 32, is_root=True, gather=32, forward=40, forward_late=32, backward=80, tail_late=16)
    (found,) = findings(_step(one, _unit("empty", 0)))
    assert (found.rule, found.units, found.gain_ms) == ("alone", ("(root)",), pytest.approx(30 + 15))
    assert found.text == (
        "`(root)` holds all parameters: compute waits 32.0 ms until they are gathered, and 16.0 ms until they are "
        "reduced. Call fully_shard on its blocks first, then on the whole."
    )
    (slow,) = alone(_step(replace(one, forward=16, tail_late=0)))
    assert slow.gain_ms == pytest.approx(32 - 2 - 15)
    assert alone(_step(replace(one, largest_module_nbytes=32 * MIB))) == []
    assert alone(_step(one, _unit("other"))) == []


# keep


def test_keep_costs_memory_and_takes_what_gains_most_per_byte() -> None:
    units = [_unit("a", 4, backward_late=2), _unit("b", 1, backward_late=3), _unit("c", 1, keeps=True, backward_late=9)]
    (found,) = keep(_step(*units))
    assert found.units == ("b", "a")
    assert found.gain_ms == 5
    assert "takes 5.0 MiB more per rank." in found.text
    (found,) = keep(_step(*units, free_nbytes=2 * MIB))
    assert found.units == ("b",)
    assert found.gain_ms == 3
    assert "1.0 MiB more per rank of 2.0 MiB that are free" in found.text
    assert keep(_step(*units, free_nbytes=0)) == []


# prefetch


def test_prefetch_gains_no_more_than_the_time_in_which_nothing_was_gathered() -> None:
    (forward,) = prefetch(_step(_unit("a"), _unit("b", forward_late=3, forward_idle=2)))
    assert (forward.units, forward.gain_ms) == (("b",), 2)
    assert "`a`'s list: set_modules_to_forward_prefetch" in forward.text
    (backward,) = prefetch(_step(_unit("a", backward_late=1, backward_idle=4), _unit("b")))
    assert (backward.units, backward.gain_ms) == (("a",), 1)
    assert "`b`'s list: set_modules_to_backward_prefetch" in backward.text
    assert prefetch(_step(_unit("a"), _unit("b", forward_late=3))) == []


def test_units_that_were_not_prefetched_are_one_finding_per_pass() -> None:
    units = [_unit(str(i), forward_late=i, forward_idle=9, backward_late=2, backward_idle=1) for i in range(6)]
    forward, backward = prefetch(_step(*units))
    assert (forward.units, forward.gain_ms) == (("5", "4", "3", "2", "1"), 15)
    assert forward.text == (
        "`5`, `4`, `3` and 2 more gather 15.0 ms late in forward, and were not prefetched. Remove empty lists of "
        "set_modules_to_forward_prefetch, or put each unit into the list of the one that computes before it."
    )
    assert (len(backward.units), backward.gain_ms) == (5, 5)
    assert "gather 10.0 ms late in backward" in backward.text


# join


def test_join_saves_what_the_cheapest_unit_costs_for_all_but_one() -> None:
    small = [_unit(name, 0.1, is_small=True, per_use=0.5) for name in "abc"]
    (found,) = join(_step(*small, _unit("d", per_use=0.4)))
    assert found.units == ("a", "b", "c")
    assert found.gain_ms == pytest.approx(2 * 0.4)


def test_join_takes_neighbours_only_and_not_the_root() -> None:
    a, b, large = _unit("a", 0.1, is_small=True, per_use=1), _unit("b", 0.1, is_small=True, per_use=1), _unit("l")
    assert join(_step(a, large, b)) == []
    assert join(_step(replace(a, is_root=True), b, large)) == []
    assert len(join(_step(a, b, large))) == 1


def test_joined_units_are_no_larger_than_the_largest() -> None:
    units = [_unit(str(i), 0.4, is_small=True, per_use=1) for i in range(6)]
    (found,) = join(_step(*units, _unit("l")))
    assert (found.units, found.gain_ms) == (("0", "1", "2", "3", "4", "5"), 3)
    assert "Join them: 3 calls fully_shard([...]), the first for `0` to `1`." in found.text


def test_equal_small_units_are_joined_as_long_as_they_travel_in_one_bucket() -> None:
    units = [_unit(str(i), 1 / 64, is_small=True, per_use=0.5, bucket_nbytes=2 * MIB) for i in range(60)]
    (found,) = join(_step(*units))
    assert (len(found.units), found.gain_ms) == (60, pytest.approx(59 * 0.5))
    assert "one call fully_shard([...]) for all 60" in found.text
    (halves,) = join(_step(*(replace(unit, bucket_nbytes=MIB // 2) for unit in units)))
    assert halves.gain_ms == pytest.approx(58 * 0.5)
    assert join(_step(*(replace(unit, bucket_nbytes=MIB // 64 + 1) for unit in units))) == []


# reduce, tail, late rank


def test_two_reductions_in_flight_gain_no_more_than_the_gaps_between_reductions() -> None:
    units = [_unit("a", reduce_late=4), _unit("b", reduce_late=2)]
    (found,) = reduce(_step(*units, reduce_idle=3.0))
    assert (found.units, found.gain_ms) == (("a", "b"), 3)
    assert reduce(_step(*units)) == []


def test_half_of_the_last_reduction_hides_behind_the_other_half_of_its_unit() -> None:
    (found,) = tail(_step(_unit("a", backward=3, tail_late=4), _unit("b")))
    assert found.gain_ms == 1.5
    one_module = replace(_unit("a", backward=3, tail_late=4), largest_module_nbytes=MIB)
    assert tail(_step(one_module, _unit("b"))) == []


def test_a_late_rank_costs_no_more_than_every_other_rank_waits() -> None:
    (found,) = late_rank(_step(rank_compute=[(50, 60, 52), (50, 61, 52)], rank_waits=(12, 0, 5)))
    assert found.gain_ms == 5
    assert found.text.startswith("Rank 1 computes longer than all others in each of 2 steps, by 8.0 ms or more")
    assert late_rank(_step(rank_compute=[(50, 60)] * 2, rank_waits=(0, 0))) == []
    assert late_rank(_step(rank_compute=[(50,)] * 2, rank_waits=(3,))) == []


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(50, 60)], id="one step"),
        pytest.param([(50, 60), (60, 50), (50, 60)], id="now this rank, now that one"),
        pytest.param([(50, 52), (50, 60), (50, 54)], id="the lead differs by more than it is"),
    ],
)
def test_a_rank_that_is_late_by_chance_is_not_named(steps: list[tuple[float, ...]]) -> None:
    assert late_rank(_step(rank_compute=steps, rank_waits=(9, 9))) == []


def test_what_no_operation_uses_of_compute_is_lost_to_a_late_host() -> None:
    (found,) = late_host(_step(host_late=7.0))
    assert found.gain_ms == 7
    assert found.text.startswith("In forward and backward, no operation runs for 7.0 ms: they are started too late.")
    assert late_host(_step()) == []
