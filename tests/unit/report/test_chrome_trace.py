"""The trace that Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from fsdp2.report.chrome_trace import chrome_trace
from tests.unit.report.examples import data_of, example_data
from tests.unit.report.support import Tape

DEMANDED = {  # what each phase needs besides ph, pid and tid
    "X": {"name", "ts", "dur"},
    "M": {"name", "args"},
    "C": {"name", "ts", "args"},
    "s": {"name", "cat", "id", "ts"},
    "t": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}


def _overlapping() -> dict[str, Any]:
    """Two gathers in flight at once, the first of which is used first."""
    tape = Tape().event("pre_forward").do("unshard", takes=0.001).do("prefetch", "a", takes=0.001)
    tape.do("prefetch", "b", takes=0.001).do("wait", blocked=0.002)
    for unit in "ab":
        tape.event("pre_forward", unit).do("wait", unit, blocked=0.002).compute(0.010).event("post_forward", unit)
    return data_of(tape, "a", "b")


def _problems(trace: dict[str, Any]) -> list[str]:
    """What a viewer would refuse, misplace or leave out."""
    found = []
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phase = event["ph"]
        if set(event) - {"args"} != DEMANDED[phase] - {"args"} | {"ph", "pid", "tid"}:
            found.append(f"keys of {event}")
        if not all(type(event[key]) is int for key in {"pid", "tid", "ts", "dur"} & set(event)):
            found.append(f"numbers of {event}")
        if phase == "M" and set(event["args"]) != {event["name"].removeprefix("process_").removeprefix("thread_")}:
            found.append(f"arguments of {event}")
        if phase == "C" and not all(type(value) is int for value in event["args"].values()):
            found.append(f"counters of {event}")
        if phase == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if phase in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
    for thread, times in slices.items():
        ordered = sorted(times)
        found += [f"{one} and {other} overlap on {thread}" for one, other in pairwise(ordered) if other[0] < one[1]]
    for flow, ends in flows.items():
        if [end["ph"] for end in ends] != ["s", "t", "f"] or sorted(ends, key=lambda end: end["ts"]) != ends:
            found.append(f"order of {flow}")
        for end in ends:
            if not any(start <= end["ts"] <= stop for start, stop in slices[end["pid"], end["tid"]]):
                found.append(f"no slice around {end}")
    return found


@pytest.mark.parametrize("data", [example_data(), _overlapping()], ids=["two ranks", "overlapping"])
def test_events_are_as_the_format_demands(data: dict[str, Any]) -> None:
    assert _problems(chrome_trace(data)) == []


def test_the_check_finds_what_is_wrong() -> None:
    trace = chrome_trace(example_data())
    flow = next(event for event in trace["traceEvents"] if event["ph"] == "f")
    flow["ts"] += 10**9
    piece = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    piece["dur"] += 10
    assert len(_problems(trace)) == 2


def test_processes_memory_and_threads_have_names_and_gathers_in_flight_at_once_lie_on_two() -> None:
    data = example_data()
    events = chrome_trace(data)["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert {("process_name", "rank 0 of Model"), ("process_name", "rank 1 of Model")} <= names
    assert {("thread_name", each) for each in ("compute", "all-gather", "reduce-scatter")} <= names
    for memory in data["memory"]:
        counters = [event for event in events if event["ph"] == "C" and event["pid"] == memory["rank"]]
        assert [event["ts"] for event in counters] == memory["times_us"]
        assert max(sum(event["args"].values()) for event in counters) == memory["peak_nbytes"]
    events = chrome_trace(_overlapping())["traceEvents"]
    threads = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert threads == {"compute", "all-gather", "all-gather, also in flight"}


def _ends_of_arrows(data: dict[str, Any]) -> list[list[str]]:
    """The slices that each arrow joins."""
    events = chrome_trace(data)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]

    def around(end: dict[str, Any]) -> str:
        inside = [s for s in slices if s["tid"] == end["tid"] and s["ts"] <= end["ts"] < s["ts"] + s["dur"]]
        assert len(inside) == 1
        return str(inside[0]["name"])

    flows: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(around(event))
    assert len(flows) == len([s for s in slices if s["tid"] != 0])  # an arrow for each collective
    return list(flows.values())


def test_arrows_lead_from_the_launch_to_the_wait_or_the_landing() -> None:
    found = _ends_of_arrows(example_data(ranks=1))
    assert ["launch blocks.0", "all-gather blocks.0", "gather wait blocks.0"] in found
    assert ["launch blocks.1", "reduce-scatter blocks.1", "reduce wait blocks.1"] in found


def test_an_arrow_passes_by_what_the_unit_computes_before_its_collective_has_arrived() -> None:
    tape = Tape().event("pre_forward").compute(0.001).event("post_forward").event("pre_backward", "a").compute(0.010)
    tape.event("post_backward", "a").do("reduce_launch", "a", takes=0.001, inside="reduce")
    tape.event("pre_forward", "a").compute(0.005).event("post_forward", "a").event("end_backward")
    tape.do("reduce_finish", "a", blocked=0.002, inside="land").do("reduce_land", "a", inside="land")
    assert _ends_of_arrows(data_of(tape, "a")) == [["launch a", "reduce-scatter a", "reduce wait a"]]
