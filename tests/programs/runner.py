"""Runs programs on a pool of ranks, and shrinks those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.accelerator import device as accelerator
from tests.harness.compare import oracle_records
from tests.harness.cpp import build
from tests.harness.distributed import RankContext
from tests.harness.pool import NO_ANSWER, WorkerError, WorkerPool
from tests.programs.check import OneSidedRefusalError, Outcome, Verdict, check
from tests.programs.program import Block, Micro, Program, Step

# Longer than that, ranks hang. A program takes a third of a second, and compiling some more.
SECONDS, SECONDS_TO_COMPILE = 8.0, 24.0
PATIENCE = 4.0  # times that, before fsdp2 is said to hang: the machine may be busy
MAX_RUNS = 150  # of one program that is being shrunk


def check_on_device(ctx: RankContext, **given: Any) -> list[Verdict]:
    """``check`` on the simulated accelerator, whose gathers and reductions come late."""
    from tests.accelerator.other_suites import arriving_late  # needs a compiler

    with arriving_late():
        return check(ctx, **given)


class Runner:
    """A pool of ranks, new after a program that leaves them at different places. They run ``body``, or ``check``."""

    def __init__(self, world_size: int, device: str = "cpu", body: Callable[..., Any] | None = None) -> None:
        self._body = body or (check if device == "cpu" else check_on_device)
        if device == accelerator.DEVICE:
            build(accelerator.NAME, accelerator.SOURCE)  # else the first program waits for the compiler
        self._pool = WorkerPool(world_size, device)

    def verdict(self, program: Program) -> Verdict:
        """The worst one of all ranks."""
        try:
            by_rank = self._call(program)
        except WorkerError as error:
            # What a rank that hangs in torch's runtime is doing, and what ranks raise if it refuses on one of them.
            in_torch = oracle_records.__name__ in str(error) or OneSidedRefusalError.__name__ in str(error)
            if not in_torch and NO_ANSWER not in str(error):
                return Verdict(Outcome.RAISES, str(error))
            try:
                by_rank = self._call(program, with_torch=not in_torch, patience=PATIENCE)
            except WorkerError as again:
                return Verdict(Outcome.RAISES, str(again))
        if len({verdict.outcome for verdict in by_rank}) > 1:
            self._pool.close(kill=True)  # one rank raised alone: others' messages may still be on their way
        return max(by_rank, key=lambda verdict: list(Outcome).index(verdict.outcome))

    def _call(self, program: Program, *, with_torch: bool = True, patience: float = 1.0) -> list[Verdict]:
        compiles = program.compiled or any(block.compiled for block in program.blocks)
        timeout_s = patience * (SECONDS_TO_COMPILE if compiles else SECONDS)
        answers = self._pool.run(self._body, timeout_s, programs=[program], with_torch=with_torch)
        return [verdict for (verdict,) in answers]

    def close(self) -> None:
        self._pool.close()


def shrunk(program: Program, runner: Runner) -> tuple[Program, Verdict]:
    """A simpler program that fails in the same way, such that none of its ``simpler`` ones does."""
    verdict = runner.verdict(program)
    num_runs = 0
    while num_runs < MAX_RUNS:
        for candidate in simpler(program):
            num_runs += 1
            found = runner.verdict(candidate)
            if found.outcome is verdict.outcome and _kind(found) == _kind(verdict):
                program, verdict = candidate, found
                break
            if num_runs >= MAX_RUNS:
                break
        else:
            break
    return program, verdict


def _kind(verdict: Verdict) -> str:
    """What differs and how, or what is raised: without names and numbers."""
    title, *lines = verdict.text.strip().splitlines() or [""]
    if verdict.outcome is not Outcome.DIFFERS:
        return [title, *lines][-1].partition(":")[0]
    of_values = any(" beyond " in line or "not bit-equal" in line for line in lines[:1])
    return f"{title}: {'values' if of_values else 'what is there'}"


def simpler(program: Program) -> Iterator[Program]:
    """Programs that have one thing less, those with much less first."""
    for index in reversed(range(len(program.steps))):
        if len(program.steps) > 1:
            yield replace(program, steps=_without(program.steps, index))
    for index in reversed(range(len(program.blocks))):
        if len(program.blocks) > 1:
            yield replace(program, blocks=_without(program.blocks, index), listed=False)
    yield from (replace(program, **{name: value}) for name, value in _to_defaults(program, Program()))
    for index, step in enumerate(program.steps):
        for other in _simpler_steps(step):
            yield replace(program, steps=(*program.steps[:index], other, *program.steps[index + 1 :]))
    for index, block in enumerate(program.blocks):
        for name, value in _to_defaults(block, Block()):
            changed = replace(block, **{name: value})
            yield replace(program, blocks=(*program.blocks[:index], changed, *program.blocks[index + 1 :]))


def _simpler_steps(step: Step) -> Iterator[Step]:
    for index in reversed(range(len(step.micros))):
        fewer_micros = _without(step.micros, index)
        if fewer_micros and fewer_micros[-1].sync == "all":  # the last backward of a step reduces
            yield replace(step, micros=fewer_micros)
    for index in range(len(step.before)):
        yield replace(step, before=_without(step.before, index))
    for index, micro in enumerate(step.micros):
        fewer = [("between", _without(micro.between, i)) for i in range(len(micro.between))]
        for name, value in (*fewer, *_to_defaults(micro, Micro())):
            changed = replace(micro, **{name: value})
            yield replace(step, micros=(*step.micros[:index], changed, *step.micros[index + 1 :]))


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def _to_defaults(value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """The fields that differ from ``default``, but for lists of parts."""
    for each in fields(value):
        if each.name not in ("blocks", "steps", "micros", "before", "between"):
            simplest = getattr(default, each.name)
            if getattr(value, each.name) != simplest:
                yield each.name, simplest
