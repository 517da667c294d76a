"""Marks and records of steps that did not run: for tests of what the report makes of them. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.memory.plan import UnitBytes
from fsdp2.report.data import RankRecord, RankStep
from fsdp2.report.findings import UnitInfo
from fsdp2.report.memory import Memory, memory
from fsdp2.report.timeline import BLOCKED, ROOT, Edge, Mark, spans, transfers


class Tape:
    """Makes marks like a rank on the CPU, whose time only goes on by ``compute`` and by what work takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks: list[Mark] = []
        self.on_device = False

    @classmethod
    def of(cls, marks: list[Mark], now: float, *, on_device: bool = False) -> Tape:
        tape = cls()
        tape.marks, tape.now, tape.on_device = marks, now, on_device
        return tape

    def event(self, name: str, unit: str = ROOT) -> Tape:
        self.marks.append(Mark(Edge.EVENT, name, unit, self.now))
        return self

    def compute(self, seconds: float) -> Tape:
        self.now += seconds
        return self

    def module(self, event: str, name: str = "", unit: str = ROOT) -> Tape:
        self.marks.append(Mark(Edge.EVENT, event, unit, self.now, module=name))
        return self

    def holds(self, what: str, nbytes: int, unit: str = "") -> Tape:
        self.marks.append(Mark(Edge.HELD, what, unit, self.now, nbytes=nbytes))
        return self

    def do(self, action: str, unit: str = ROOT, *, takes: float = 0.0, blocked: float = 0.0, inside: str = "") -> Tape:
        """``action`` takes ``takes`` of the thread, and waits ``blocked`` first. ``inside``: the action that it is
        a part of."""
        names = [inside, action] if inside else [action]
        self.marks += [Mark(Edge.START, name, unit, self.now) for name in names]
        if blocked:
            self.marks.append(Mark(Edge.START, BLOCKED, "", self.now))
            self.now += blocked
            self.marks.append(Mark(Edge.STOP, BLOCKED, "", self.now))
        self.now += takes
        self.marks += [Mark(Edge.STOP, name, unit, self.now) for name in reversed(names)]
        if inside in ("", "reduce"):
            self.marks.append(Mark(Edge.ACTION, names[0], unit, self.now))
        return self


def simple_step(units: Sequence[str], *, late: float = 0.0, compute: float = 0.010) -> Tape:
    """A forward and a backward over ``units`` inside the root. The gather of each unit in forward is ``late``."""
    tape = Tape().event("pre_forward").do("unshard", takes=0.001).do("wait", blocked=0.002)
    for unit in units:
        tape.event("pre_forward", unit).do("prefetch", unit, takes=0.001).do("wait", unit, blocked=late)
        tape.compute(compute).event("post_forward", unit).do("reshard", unit)
    tape.event("post_forward").compute(0.001).event("pre_backward")
    for unit in reversed(units):
        tape.event("pre_backward", unit).do("prefetch", unit, takes=0.001).do("wait", unit)
        tape.compute(2 * compute).event("post_backward", unit).do("reshard", unit)
        tape.do("reduce_launch", unit, takes=0.001, inside="reduce")
    tape.event("end_backward")
    for unit in reversed(units):
        tape.do("reduce_finish", unit, blocked=0.001, inside="land").do("reduce_land", unit, inside="land")
    return tape.compute(0.005)


def sizes(units: Sequence[str], nbytes: int = 1000) -> dict[str, UnitBytes]:
    one = UnitBytes(unsharded=nbytes, arriving=10, gradients=nbytes, copies=nbytes // 2, sent=nbytes // 2)
    return dict.fromkeys([ROOT, *units], one)


def rank_step(tape: Tape, units: Sequence[str]) -> RankStep:
    found = memory(tape.marks, sizes(units), 0.0, tape.now)
    lanes = spans(tape.marks, 0.0, tape.now, on_device=False)
    return RankStep(0.0, tape.now, lanes, transfers(tape.marks, (), on_device=False), found)


def record(tape: Tape, units: Sequence[str], rank: int = 0) -> RankRecord:
    return RankRecord(rank, "host", 0.0, is_first_use=False, steps=[rank_step(tape, units)])


def info(name: str, nbytes: int = 1000) -> UnitInfo:
    return UnitInfo(
        name=name,
        shard_nbytes=nbytes // 2,
        unsharded_nbytes=nbytes,
        held_nbytes=2 * nbytes,
        gather_direct_nbytes=nbytes,
        gather_bucket_nbytes=0,
        reduce_direct_nbytes=nbytes,
        reduce_bucket_nbytes=0,
        largest_module_nbytes=nbytes // 10,
        is_small=False,
        bucket_nbytes=0,
        keeps_after_forward=name == ROOT,
        replicas=1,
    )


def empty_step(stop: float) -> RankStep:
    return RankStep(0.0, stop, [], [], Memory([], {}, []))
