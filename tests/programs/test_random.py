"""Random programs are equal under all runtimes; the fuzzer notices defects, and shrinks what shows them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests.programs.check as check_module
from fsdp2.core.group import gradients
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.plan import plan
from fsdp2.core.plan.dtypes import DivideFactors
from tests.accelerator import device
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import ParityModel
from tests.harness.selection import in_ci, long
from tests.harness.training import Case
from tests.programs.check import Outcome, Verdict, check
from tests.programs.drawn import CHANGES, draw
from tests.programs.features import PARTS, features
from tests.programs.known import known_difference
from tests.programs.program import Block, Micro, Program, Step
from tests.programs.regressions import REGRESSIONS
from tests.programs.runner import Runner, shrunk, simpler
from tests.programs.source import source


def _assert_no_failure(programs: list[Program], verdicts: list[Verdict]) -> None:
    failed = [
        f"{verdict.outcome.value}: {verdict.text}\n{source(program)}"
        for program, verdict in zip(programs, verdicts, strict=True)
        if verdict.outcome.is_failure
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("share", range(3))
@distributed(2)
def test_programs_that_once_failed(ctx: RankContext, share: int) -> None:
    programs = list(REGRESSIONS.values())[share::3]
    _assert_no_failure(programs, check(ctx, programs))


@distributed(2)
def test_programs_on_two_ranks(ctx: RankContext) -> None:
    programs = [draw(seed, 2) for seed in range(8)]
    _assert_no_failure(programs, check(ctx, programs))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 100, 10)], ids=str)
def test_100_programs(seeds: range, world_size: int) -> None:
    """On four ranks, a sum has more than two terms, and units rest on two of four ranks. Torch may hang on some: the
    runner then goes on without it."""
    with closing(Runner(world_size)) as runner:
        programs = [draw(seed, world_size) for seed in seeds]
        _assert_no_failure(programs, [runner.verdict(program) for program in programs])


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 60, 10)], ids=str)
def test_programs_that_change_between_passes(seeds: range) -> None:
    """Flags of parameters, adapters, other roots, evaluations and more, between forwards and their backwards."""
    with closing(Runner(2)) as runner:
        programs = [draw(seed, 2, CHANGES) for seed in seeds]
        _assert_no_failure(programs, [runner.verdict(program) for program in programs])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: the simulated accelerator cannot be built")
@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 40, 10)], ids=str)
def test_programs_on_the_simulated_accelerator(seeds: range) -> None:
    with closing(Runner(2, device.DEVICE)) as runner:
        for seed in seeds:
            program = draw(seed, 2)
            if not program.runs_on(device.DEVICE):
                continue
            found = runner.verdict(program)
            assert not found.outcome.is_failure, f"seed {seed}: {found.text}"


@pytest.mark.parametrize("world_size", [2, *in_ci(4)])
def test_programs_have_every_value_of_every_feature(world_size: int) -> None:
    programs = [draw(seed, world_size, often) for often in ((), CHANGES) for seed in range(800)]
    steps = [step for program in programs for step in program.steps]
    parts = {
        "program": programs,
        "block": [block for program in programs for block in program.blocks],
        "micro": [micro for step in steps for micro in step.micros],
        "step": steps,
    }
    for name, values in features(world_size).items():
        part, _, field = name.partition(".")
        if part in PARTS:
            assert {getattr(one, field) for one in parts[part]} >= set(values), name
    assert {program.mesh for program in programs} == set(features(world_size)["mesh"])


def test_few_programs_may_differ() -> None:
    excused = [seed for seed in range(300) if known_difference(draw(seed, 2))]
    assert len(excused) < 90


@pytest.mark.parametrize(
    ("known", "as_unsharded", "expected"),
    [
        (None, True, Outcome.DIFFERS),
        ("torch is wrong", True, Outcome.KNOWN),
        ("torch is wrong", False, Outcome.DIFFERS),
    ],
)
def test_what_differs_from_torch_for_a_known_reason_must_be_as_the_unsharded_model(
    monkeypatch: pytest.MonkeyPatch, known: str | None, as_unsharded: bool, expected: Outcome
) -> None:
    def differs(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(check_module, "_of_all_ranks", lambda value: [value])
    monkeypatch.setattr(check_module, "oracle_records", lambda case, mesh: [])
    monkeypatch.setattr(check_module, "subject_records", lambda case, mesh: [])
    monkeypatch.setattr(check_module, "compare_with_oracle", differs)
    monkeypatch.setattr(check_module, "compare_with_unsharded", (lambda *args: None) if as_unsharded else differs)
    mesh = SimpleNamespace(device_type="cpu")
    assert check_module.compared(Case(ParityModel), mesh, known).outcome is expected


def _no_division(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "divide_factors", lambda *args, **kwargs: DivideFactors(1.0, 1.0))


def _lost_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_add_earlier", lambda earlier, reduction: ())


def _lost_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_grad = ShardedParam.keep_grad

    def keep_only_the_last(param: ShardedParam) -> None:
        param.accumulated = None if param.unsharded_grad is not None else param.accumulated
        keep_grad(param)

    monkeypatch.setattr(ShardedParam, "keep_grad", keep_only_the_last)


REPLICATED_SUMS = ("mesh", "micros", "micro.sync")  # features in which the defects show
DEFECTS = [_no_division, _lost_partial_sums, _lost_micro_batches]


@pytest.mark.parametrize("defect", [DEFECTS[0], *long(*DEFECTS[1:])], ids=lambda defect: defect.__name__)
@distributed(2, timeout_s=240)
def test_a_defect_is_noticed_in_100_programs(ctx: RankContext, defect: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        defect(monkeypatch)
        assert any(check(ctx, [draw(seed, 2, REPLICATED_SUMS)])[0].outcome.is_failure for seed in range(100))


class _Pretending(Runner):
    """Without ranks: a program fails if ``fails`` says so."""

    def __init__(self, fails: Callable[[Program], bool]) -> None:
        self._fails = fails

    def verdict(self, program: Program) -> Verdict:
        return Verdict(Outcome.DIFFERS, "the values differ") if self._fails(program) else Verdict(Outcome.EQUAL)


def test_a_failing_program_is_shrunk_to_what_it_needs_to_fail() -> None:
    def fails(program: Program) -> bool:
        return program.offload and any(micro.keep for step in program.steps for micro in step.micros)

    often = ("program.offload", "micro.keep")
    drawn = next(each for seed in range(999) if fails(each := draw(seed, 2, often)) and len(each.blocks) > 1)
    found, _ = shrunk(drawn, _Pretending(fails))
    assert found == Program(offload=True, steps=(Step(micros=(Micro(keep=True),)),), blocks=found.blocks)
    assert found.blocks == (Block(),)


def test_simpler_programs_are_other_programs_with_less() -> None:
    for seed in range(20):
        program = draw(seed, 4)
        found = list(simpler(program))
        assert program not in found
    assert list(simpler(Program())) == []


def _check_with_lost_partial_sums(ctx: RankContext, **given: Any) -> list[Verdict]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _lost_partial_sums(monkeypatch)
        return check(ctx, **given)


@pytest.mark.long
@pytest.mark.in_turns
def test_program_shrunk_from_a_defect_is_small_and_fails_alone(tmp_path: Path) -> None:
    def shows_it(program: Program) -> bool:
        keeps_partial = any(micro.sync == "no all-reduce" for step in program.steps for micro in step.micros)
        return keeps_partial and program.mesh == "hsdp" and known_difference(program) is None

    drawn = (draw(seed, 2, REPLICATED_SUMS) for seed in range(1000))
    program = next(each for each in drawn if shows_it(each) and len(each.blocks) > 1)
    with closing(Runner(2, body=_check_with_lost_partial_sums)) as runner:
        found, verdict = shrunk(program, runner)
    assert verdict.outcome is Outcome.DIFFERS
    assert found == Program(mesh="hsdp", steps=(Step(micros=(Micro("no all-reduce"), Micro())),), blocks=(Block(),))
    defect = """import pytest
from tests.programs import test_random
test_random._lost_partial_sums(pytest.MonkeyPatch())
"""
    ended = _run_alone(defect + source(found), tmp_path)
    assert "rank 0: DIFFERS" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode != 0
    ended = _run_alone(source(found), tmp_path)
    assert ("rank 0: equal" in ended.stdout, ended.returncode) == (True, 0), ended.stdout + ended.stderr


def _run_alone(text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """As a person runs a printed program."""
    script = directory / "program.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
