"""A plan as text: its table, and why nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import fsdp2
from fsdp2.planner.candidates import Workload
from fsdp2.planner.machines import H100
from fsdp2.planner.plans import Plan, table
from fsdp2.planner.simulate import StepTime
from tests.harness.golden import texts_beside
from tests.unit.planner.models import LanguageModel, square
from tests.unit.planner.plans import LARGE, WORKLOAD, choice_named, plan_of
from tests.unit.planner.shapes import WIDTH, Stack

TEXTS = texts_beside(__file__)
IMAGES = Workload(
    batch=1, sequence=1, inputs=lambda: torch.empty(4, 128, WIDTH), loss=square, micro_batches=2, master_dtype="fp32"
)
TEXT_OF: dict[str, Callable[[], Plan]] = {
    "tokens": lambda: fsdp2.planner.plan(LARGE, "H100", WORKLOAD, num_gpus=16),
    "samples, attention that makes its scores": lambda: fsdp2.planner.plan(
        lambda: Stack("eager attention"), "A100-80", IMAGES, num_gpus=2
    ),
    "nothing fits": lambda: plan_of(budget="1MiB"),
}


@pytest.mark.parametrize("name", TEXT_OF)
def test_a_plan_is_shown_as_text(name: str) -> None:
    TEXTS.check(name, str(TEXT_OF[name]()), among=TEXT_OF)


def test_rates_of_models_without_tokens_are_samples_of_one_gpu() -> None:
    found = TEXT_OF["samples, attention that makes its scores"]()
    first = found.choices[0].result
    assert first.tokens_per_second == pytest.approx(2 * 4 / first.time.step)
    assert found.data["choices"][0]["samples_per_second"] == first.tokens_per_second
    assert found.data["num_samples"] == 4


def test_memory_that_would_round_to_nothing_has_a_unit_of_its_own() -> None:
    """Only what is nothing is 0.0."""
    result = plan_of().choices[0].result
    shown = [replace(result, buffers_nbytes=nbytes) for nbytes in (0.0, 12, 5000, 2.0**20)]
    _, *rows = table([replace(plan_of().choices[0], result=each) for each in shown], None, "bf16")
    columns = [re.split(r"  +", row)[7] for row in rows]
    assert columns == ["0.0", "12 B", "4.9 KiB", "1.0"]


@pytest.mark.ci
def test_a_model_that_cannot_fit_says_by_how_much_and_what_would() -> None:
    found = plan_of(budget="1MiB")
    assert found.recommended is None
    too_much = found.smallest.result.peak_nbytes / 2**20 - 1
    assert too_much > 0
    with pytest.raises(ValueError, match=rf"nothing fits into 1\.0 MiB: .* {too_much:.1f} MiB too much\. .* Use "):
        _ = found.code
    assert found.smallest.choice.offloads
    said = "of the host's memory of a node, of which 1769.5 GiB may be used. Use "
    assert said in found.why_nothing_fits()
    assert found.why_nothing_fits().endswith(
        " Tensor and context parallelism cut more than FSDP does: see --tensor-parallel and --context-parallel, and "
        "https://github.com/fsdp2/fsdp2/blob/main/docs/guide/meshes.md#tensor-parallelism."
    )


REMEDIES: dict[str, tuple[Workload, str]] = {
    r"Use sequences of (?P<sequence>\d{4}) tokens": (Workload(batch=1, sequence=2**20), "100MiB"),
    r"Use a batch of (?P<batch>\d+) per GPU": (Workload(batch=64, sequence=128), "20MiB"),
    r"Use sequences of (?P<sequence>\d+) tokens": (Workload(batch=1, sequence=8192), "20MiB"),
    r"Use a batch of (?P<batch>1) per GPU and sequences of (?P<sequence>\d+) tokens": (Workload(4, 2048), "16MiB"),
    r"Use FSDP over (?P<num_gpus>\d+) GPUs\.": (Workload(batch=1, sequence=8), "2MiB"),
}


@pytest.mark.ci
@pytest.mark.parametrize("pattern", REMEDIES)
def test_what_is_said_to_fit_fits(pattern: str) -> None:
    workload, budget = REMEDIES[pattern]
    machine = replace(H100, host_bandwidth=None) if "GPUs" in pattern else H100  # else offloading fits
    why = fsdp2.planner.plan(LanguageModel, machine, workload, num_gpus=2, budget=budget).why_nothing_fits()
    said = re.search(pattern, why)
    assert said is not None, why
    changes = {name: int(value) for name, value in said.groupdict().items()}
    num_gpus = changes.pop("num_gpus", 2)
    better = fsdp2.planner.plan(LanguageModel, machine, replace(workload, **changes), num_gpus=num_gpus, budget=budget)
    assert better.recommended is not None


def test_the_table_marks_the_recommended_choice_and_its_units_are_those_of_the_model() -> None:
    found = plan_of(budget="6 MiB")
    first, *lines = str(found).splitlines()
    (marked,) = (line for line in lines if line.startswith("*"))
    assert found.recommended is not None
    assert f"{1000 * found.recommended.result.time.step:.3f}" in marked
    assert lines[-1] == f"recommended: {found.recommended.choice.name}"
    units = "units: 4 blocks in layers, embedding, head; all else with the model"
    assert first == f"LanguageModel: 328000 parameters; {units}"
    small, large = str(plan_of(num_gpus=8)), str(fsdp2.planner.plan(LARGE, "H100", WORKLOAD, num_gpus=8))
    assert "below: MiB of one GPU" in small
    assert "step ms  exposed ms" in small
    assert "0.000" not in small
    assert "LanguageModel: 1.88B parameters" in large
    assert "below: GiB of one GPU" in large
    slow = replace(choice_named(plan_of(), "FSDP, keep").result, time=StepTime(2.0, 1.5))
    assert "step s  exposed s" in table([replace(plan_of().choices[0], result=slow)], None, "bf16")[0]
