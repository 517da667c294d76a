"""``fsdp2.plan``: the units it finds, what it observes, what it compares, and what it says about bad input."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp2
from fsdp2.schedule.schedule import AfterForward, UnitRules
from fsdp2.tools.planner import scenario
from fsdp2.tools.planner.blocks import Stack, Units, find_units
from fsdp2.tools.planner.groups import Wire
from fsdp2.tools.planner.machine import Contention, Link, ranks_of
from fsdp2.tools.planner.machines import H100, MACHINES, fields_of, machine_by_name, machine_from
from fsdp2.tools.planner.observe import ModelWork
from fsdp2.tools.planner.placement import shard_dim
from fsdp2.tools.planner.plan import ABOUT_AS_FAST, Candidate, Plan, Workload, observed, table
from fsdp2.tools.planner.scenario import Scenario
from fsdp2.tools.planner.simulate import StepTime
from fsdp2.tools.planner.work import Checkpointing, UnitWork
from fsdp2.tools.sizes import nbytes_of, text_of
from tests.unit import planner_models
from tests.unit.planner_models import Block, LanguageModel

WORKLOAD = Workload(batch=2, sequence=128)

LARGE = functools.partial(LanguageModel, width=4096, num_blocks=8, vocabulary=32768)


def _model(builder: Callable[[], nn.Module] = LanguageModel) -> nn.Module:
    with torch.device("meta"):
        return builder()


def _observed(model: nn.Module, workload: Workload = WORKLOAD) -> ModelWork:
    return observed(model, find_units(model), workload)


@functools.cache
def _plan(budget: str | int | None = None, num_gpus: int = 16, **options: Any) -> Plan:
    return fsdp2.plan(LanguageModel, "H100", replace(WORKLOAD, **options), num_gpus=num_gpus, budget=budget)


def _named(found: Plan, name: str) -> Candidate:
    return next(each for each in found.choices if each.choice.name == name)


# Units


def test_units_are_the_repeated_blocks_and_large_modules_beside_them() -> None:
    assert find_units(_model()) == Units((Stack("layers", ("0", "1", "2", "3")),), ("embedding", "head"))


def test_tied_modules_and_small_ones_stay_with_the_model() -> None:
    assert find_units(_model(lambda: LanguageModel(is_tied=True))).large == ()
    assert find_units(_model(lambda: LanguageModel(is_tied=True))).tied == ("embedding", "head")
    assert find_units(_model(lambda: LanguageModel(vocabulary=8))).large == ()


def test_blocks_are_found_in_a_mapping_in_the_model_itself_and_in_two_stacks() -> None:
    mapping = nn.ModuleDict({"layers": nn.ModuleDict({"a": Block(32), "b": Block(32)})})
    assert find_units(mapping).stacks == (Stack("layers", ("a", "b"), is_mapping=True),)
    assert find_units(nn.Sequential(Block(32), Block(32))).block_paths == ("0", "1")
    pair = nn.ModuleDict({name: nn.ModuleList(Block(32) for _ in range(2)) for name in ("encoder", "decoder")})
    assert find_units(pair).block_paths == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")


def test_what_lies_inside_of_blocks_is_no_stack_of_its_own() -> None:
    nested = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
    assert find_units(nn.ModuleDict({"layers": nested})).block_paths == ("layers.0", "layers.1", "layers.2")


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found no repeated blocks in this Linear, expected an nn\.ModuleList"):
        find_units(nn.Linear(2, 2))


# What is observed


class Chain(nn.Module):
    """Activations that can be counted by hand: the sigmoid saves its output, the product its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Square() for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.sigmoid(self.product(x)) * mask


CHAIN = Workload(
    8,
    1,
    precision="fp32",
    inputs=lambda: (torch.empty(8, 32, requires_grad=True), torch.empty(8, 32)),
    loss=lambda output: output.sum(),
)


def test_activations_are_what_autograd_saves_each_storage_once_without_what_all_blocks_share() -> None:
    block = _observed(_model(Chain), CHAIN).kinds[0]
    size = 8 * 32 * 4
    assert block[Checkpointing.NONE].saved_nbytes == 2 * size  # input and output of the sigmoid; not the mask
    assert block[Checkpointing.FULL].saved_nbytes == size  # the input
    assert block[Checkpointing.SELECTIVE].saved_nbytes == 2 * size  # input and product


def test_operations_are_counted_and_those_that_run_again() -> None:
    block = _observed(_model(Chain), CHAIN).kinds[0]
    product = 2.0 * 8 * 32 * 32
    assert {kind: (work.forward.linear, work.backward.linear) for kind, work in block.items()} == {
        Checkpointing.NONE: (product, 2 * product),
        Checkpointing.SELECTIVE: (product, 2 * product),  # the only product is kept
        Checkpointing.FULL: (product, 3 * product),
    }


def test_kernels_beside_products_move_less_when_they_are_fused() -> None:
    forward = _observed(_model(Chain), CHAIN).kinds[0][Checkpointing.NONE].forward
    size = 8 * 32 * 4
    assert forward.moved_nbytes == (1 + 1) * size + (2 + 1) * size  # the sigmoid, and its product with the mask
    assert forward.fused_nbytes == 2 * size  # one kernel reads the product and the mask


def test_half_of_causal_attention_is_counted() -> None:
    block = _observed(_model()).kinds[0][Checkpointing.NONE]
    pairs = 2 * 4 * 128 * 128  # sequences, heads, tokens
    assert block.forward.other == pairs * 2 * (16 + 16) / 2
    assert block.backward.other == 2.5 * block.forward.other


@pytest.mark.parametrize("by_name", [True, False])
def test_dropout_of_attention_keeps_no_scores(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, attend = _observed(_model()).kinds, F.scaled_dot_product_attention

    def with_dropout(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        if by_name:
            return attend(q, k, v, dropout_p=0.1, is_causal=is_causal)
        return attend(q, k, v, None, 0.1, is_causal)

    fused = types.SimpleNamespace(scaled_dot_product_attention=with_dropout, silu=F.silu)
    monkeypatch.setattr(planner_models, "F", fused)
    assert _observed(_model()).kinds == plain


def test_the_order_is_that_of_forward_and_the_rest_counts_with_the_head() -> None:
    work = _observed(_model())
    units = work.units(Checkpointing.NONE)
    assert [unit.name for unit in units] == ["embedding", *["layers.0"] * 4, "head"]
    assert units[-1].forward.linear == 2.0 * 2 * 128 * 64 * 1024
    assert [param.name for param in work.root] == ["norm.weight"]
    logits = 2 * 128 * 1024
    assert units[-1].saved_nbytes >= 4 * logits  # log-probabilities in fp32


def test_parameters_of_all_units_and_the_root_are_those_of_the_model() -> None:
    work, model = _observed(_model()), _model()
    units = sum(param.numel for unit in work.units(Checkpointing.NONE) for param in unit.params)
    assert units + sum(param.numel for param in work.root) == sum(param.numel() for param in model.parameters())


def test_observing_leaves_the_model_as_it_was() -> None:
    model = LanguageModel()
    before = {name: id(param) for name, param in model.named_parameters()}
    _observed(model)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert all(param.grad is None for param in model.parameters())


def test_frozen_parameters_get_no_gradients_and_no_optimizer() -> None:
    def frozen() -> nn.Module:
        model = LanguageModel()
        model.layers.requires_grad_(False)
        return model

    plans = (fsdp2.plan(each, "H100", WORKLOAD, num_gpus=8) for each in (LanguageModel, frozen))
    trained, part = (_named(found, "FSDP, reshard") for found in plans)
    assert part.result.params_nbytes == trained.result.params_nbytes
    assert part.result.optimizer_nbytes < trained.result.optimizer_nbytes / 1.5


# Choices


def test_choices_cover_what_can_be_set() -> None:
    choices = [each.choice for each in _plan().choices]
    assert {choice.shard_size for choice in choices} == {None, 8}
    assert {choice.after_forward for choice in choices} == set(AfterForward)
    assert {choice.checkpointing for choice in choices} == set(Checkpointing)
    assert {choice.wire for choice in choices} == set(Wire)
    assert {choice.offloads for choice in choices} == {True, False}


def test_shards_of_no_whole_nodes_are_not_resharded_to_a_node() -> None:
    found = fsdp2.plan(LanguageModel, replace(H100, node_size=6), WORKLOAD, num_gpus=192)
    smaller = {
        each.choice.shard_size
        for each in found.choices
        if each.choice.after_forward is AfterForward.RESHARD_TO_SMALLER_MESH
    }
    assert {each.choice.shard_size for each in found.choices} == {None, 6, 64}
    assert smaller == {None}  # 6 ranks do not divide 64


def test_what_fits_comes_first_and_the_recommended_one_fits() -> None:
    found = _plan(budget="6 MiB")
    fits = [each.fits for each in found.choices]
    assert fits == sorted(fits, reverse=True)
    assert {True, False} == set(fits)
    assert found.recommended is not None
    assert found.recommended.fits


def test_a_smaller_budget_asks_for_more_checkpointing() -> None:
    roomy, tight = _plan().recommended, _plan(budget="6 MiB").recommended
    assert roomy is not None
    assert tight is not None
    assert roomy.choice.checkpointing is Checkpointing.NONE
    assert tight.choice.checkpointing is not Checkpointing.NONE


def test_where_room_is_left_the_last_blocks_may_stay_unsharded() -> None:
    largest = 2 * sum(param.numel() for param in LanguageModel().layers[0].parameters())
    budget = int(_named(_plan(), "FSDP, reshard").result.reserved_nbytes + 2.5 * largest)
    assert _named(_plan(budget=budget), "FSDP, keep last 3").fits  # the last one is there at the peak anyway


def test_rows_that_keep_as_many_blocks_as_there_is_room_for_fit() -> None:
    builder = functools.partial(LanguageModel, num_blocks=16)
    largest = 2 * sum(param.numel() for param in LanguageModel().layers[0].parameters())
    resharded = _named(fsdp2.plan(builder, "H100", WORKLOAD, num_gpus=16), "FSDP, reshard").result
    budget = int(resharded.reserved_nbytes + 12.1 * largest)
    found = fsdp2.plan(builder, "H100", WORKLOAD, num_gpus=16, budget=budget)
    kept = [each for each in found.choices if each.choice.num_kept]
    assert kept
    assert all(each.fits for each in kept)


@pytest.mark.ci
@pytest.mark.parametrize("num_tokens", [1024, 4096])  # communication takes longer than compute, and less long
def test_prefetch_lists_of_two_units_would_gain_next_to_nothing(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = scenario._rules

    def two_ahead(given: Scenario) -> list[UnitRules]:
        rules = usual(given)
        after, before = range(1, len(rules)), range(len(rules) - 1, 0, -1)
        lists = {unit: (tuple(after[unit : unit + 2]), tuple(before[len(rules) - unit :][:2])) for unit in after}
        return rules[:1] + [
            replace(rules[unit], forward_prefetch=forward, backward_prefetch=backward)
            for unit, (forward, backward) in lists.items()
        ]

    large = _model(functools.partial(LanguageModel, width=4096, num_blocks=16, vocabulary=32768))
    steps = []
    for rules in (usual, two_ahead):
        monkeypatch.setattr(scenario, "_rules", rules)
        found = fsdp2.plan(large, "H100", Workload(batch=1, sequence=num_tokens), num_gpus=64)
        steps.append(_named(found, "FSDP, reshard").result)
    assert steps[0].time.step < steps[1].time.step * ABOUT_AS_FAST
    assert steps[0].reserved_nbytes < steps[1].reserved_nbytes


@pytest.mark.parametrize("num_gpus", [8, 512])
def test_two_blocks_per_unit_would_not_be_faster(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ModelWork.units

    def in_pairs(self: ModelWork, checkpointing: Checkpointing) -> tuple[UnitWork, ...]:
        units = usual(self, checkpointing)
        blocks = [unit for unit in units if unit.is_block]
        pairs = [_both(*pair) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
        first = units.index(blocks[0])
        return (*units[:first], *pairs, *units[first + len(blocks) :])

    found = []
    for units in (usual, in_pairs):
        monkeypatch.setattr(ModelWork, "units", units)
        compared = fsdp2.plan(LARGE, "H100", Workload(batch=1, sequence=2048), num_gpus=num_gpus)
        found.append(compared.choices[0].result)  # the fastest
    assert found[0].time.compute == pytest.approx(found[1].time.compute, rel=0.01)
    assert found[0].time.step < found[1].time.step


def _both(first: UnitWork, second: UnitWork) -> UnitWork:
    return replace(
        first,
        params=first.params + second.params,
        forward=first.forward + second.forward,
        backward=first.backward + second.backward,
        saved_nbytes=first.saved_nbytes + second.saved_nbytes,
    )


@pytest.mark.ci
def test_a_model_that_cannot_fit_says_by_how_much_and_what_would() -> None:
    found = _plan(budget="1MiB")
    assert found.recommended is None
    too_much = found.smallest.result.reserved_nbytes / 2**20 - 1
    assert too_much > 0
    with pytest.raises(ValueError, match=rf"nothing fits into 1\.0 MiB: .* {too_much:.1f} MiB too much\. .* Use "):
        _ = found.code


def test_what_only_fp8_would_fit_does_not_fit() -> None:
    fp8 = _named(_plan(num_gpus=2, batch=1, sequence=8), "FSDP, reshard, full checkpointing, fp8 gathers").result
    machine = replace(H100, host_bandwidth=None)
    workload, budget = Workload(batch=1, sequence=8), int(fp8.reserved_nbytes) + 1
    found = fsdp2.plan(LanguageModel, machine, workload, num_gpus=2, budget=budget)
    assert found.recommended is None
    assert found.smallest.missing_nbytes > 0


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
    why = fsdp2.plan(LanguageModel, machine, workload, num_gpus=2, budget=budget).why_nothing_fits()
    said = re.search(pattern, why)
    assert said is not None, why
    changes = {name: int(value) for name, value in said.groupdict().items()}
    num_gpus = changes.pop("num_gpus", 2)
    better = fsdp2.plan(LanguageModel, machine, replace(workload, **changes), num_gpus=num_gpus, budget=budget)
    assert better.recommended is not None


def test_optimizer_and_precision_change_what_is_held() -> None:
    adamw, sgd, fp32 = (
        _plan(**options).choices[0].result for options in ({}, {"optimizer": "sgd"}, {"precision": "fp32"})
    )
    assert (adamw.optimizer_nbytes, sgd.optimizer_nbytes) == (2 * adamw.params_nbytes, 0)
    assert fp32.params_nbytes == adamw.params_nbytes  # shards are in fp32 either way


def test_stacked_experts_are_cut_where_they_are_long_enough() -> None:
    assert [shard_dim(shape, 64) for shape in [(8, 4096, 128), (4096, 8), (8, 8), (8,), ()]] == [1, 0, 0, 0, 0]


def test_the_code_keeps_large_modules_unsharded_where_the_choice_keeps_all() -> None:
    found = _plan()
    for name, argument in (("keep", "reshard_after_forward=False, "), ("reshard", "")):
        code = replace(found, recommended=_named(found, f"FSDP, {name}")).code
        assert f"fsdp2.fully_shard(block, {argument}**options)" in code
        assert f"fsdp2.fully_shard(model.head, {argument}**options)" in code


def test_the_table_marks_the_recommended_choice_and_shows_the_smallest() -> None:
    found = _plan(budget="6 MiB")
    lines = str(found).splitlines()
    marked = [line for line in lines if line.startswith("*")]
    assert len(marked) == 1
    assert found.recommended is not None
    assert f"{1000 * found.recommended.result.time.step:.3f}" in marked[0]
    assert lines[-1] == f"recommended: {found.recommended.choice.name}"
    assert (
        lines[0]
        == "LanguageModel: 328000 parameters; units: 4 blocks in layers, embedding, head; all else with the model"
    )


def test_units_of_the_table_are_those_of_the_model() -> None:
    small, large = str(_plan(num_gpus=8)), str(fsdp2.plan(LARGE, "H100", WORKLOAD, num_gpus=8))
    assert "below: MiB of one GPU" in small
    assert "step ms  exposed ms" in small
    assert "0.000" not in small
    assert "LanguageModel: 1.88B parameters" in large
    assert "below: GiB of one GPU" in large
    slow = replace(_named(_plan(), "FSDP, keep").result, time=StepTime(2.0, 1.5))
    assert "step s  exposed s" in table([replace(_plan().choices[0], result=slow)], None, "bf16")[0]


# Machines


@pytest.mark.parametrize("name", MACHINES)
def test_machines_have_sources_and_are_found_by_name(name: str) -> None:
    machine = machine_by_name(name.lower())
    assert machine is MACHINES[name]
    assert all(source.startswith("https://") for source in machine.sources)
    assert machine.sources[0].split("/")[2] in ("www.nvidia.com", "nvdam.widen.net", "www.amd.com")  # the vendor's
    assert machine_from(fields_of(machine)) == machine


def test_a_figure_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"machine '.*' has no figure for fp8_flops\. Pass dataclasses"):
        MACHINES["A100-80"].peak_fp8()
    assert H100.peak_fp8() > H100.bf16_flops


@pytest.mark.parametrize(("size", "expected"), [("70GiB", 70 * 2**30), ("80 gb", 80 * 10**9), (5, 5), ("1.5KiB", 1536)])
def test_sizes_are_read(size: str | int, expected: int) -> None:
    assert nbytes_of(size, "budget", "70GiB") == expected


@pytest.mark.parametrize(("nbytes", "shown"), [(70.8 * 2**30, "70.8 GiB"), (2**20, "1.0 MiB"), (1024, "1.0 KiB")])
def test_sizes_are_shown_in_units_that_fit(nbytes: float, shown: str) -> None:
    assert text_of(nbytes) == shown


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "batch is '2', expected an int": (lambda: Workload("2", 64), "TypeError"),  # type: ignore[arg-type]
    "batch is 1.5, expected an int": (lambda: Workload(1.5, 64), "TypeError"),  # type: ignore[arg-type]
    "num_gpus is '8', expected an int": (
        lambda: fsdp2.plan(LanguageModel, "H100", WORKLOAD, num_gpus="8"),  # type: ignore[arg-type]
        "TypeError",
    ),
    "model is 'x', expected an nn.Module": (
        lambda: fsdp2.plan("x", "H100", WORKLOAD, num_gpus=8),  # type: ignore[arg-type]
        "TypeError",
    ),
    "machine is None, expected a name": (
        lambda: fsdp2.plan(LanguageModel, None, WORKLOAD, num_gpus=8),  # type: ignore[arg-type]
        "TypeError",
    ),
    r"workload is \(1, 64\), expected such as": (
        lambda: fsdp2.plan(LanguageModel, "H100", (1, 64), num_gpus=8),  # type: ignore[arg-type]
        "TypeError",
    ),
    "Link: bandwidth is 0, expected a number above 0": (lambda: Link(0, 0), "ValueError"),
    "Link: latency is -1, expected seconds, at least 0": (lambda: Link(1, -1), "ValueError"),
    "Contention: compute is 1, expected a share": (lambda: Contention(1), "ValueError"),
    "inputs is a Tensor, expected a function that makes": (
        lambda: replace(WORKLOAD, inputs=torch.ones(2)),  # type: ignore[arg-type]
        "TypeError",
    ),
    "loss is a Tensor, expected a function of what the": (
        lambda: replace(WORKLOAD, loss=torch.ones(2)),  # type: ignore[arg-type]
        "TypeError",
    ),
    r"Workload\.loss failed for a FakeTensor, .* \(AttributeError": (
        lambda: _observed(_model(), replace(WORKLOAD, loss=lambda output: output.logits)),
        "ValueError",
    ),
    r"Workload\.loss returned shape \(2, 128, 1024\)": (
        lambda: _observed(_model(), replace(WORKLOAD, loss=lambda output: output)),
        "ValueError",
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(said: str) -> None:
    call, kind = WRONG[said]
    with pytest.raises((TypeError, ValueError), match=said) as error:
        call()
    assert type(error.value).__name__ == kind


def test_the_note_on_the_hosts_memory_is_under_rows_that_offload() -> None:
    offloaded = replace(_plan(), recommended=_named(_plan(), "FSDP, reshard, offload"))
    assert str(offloaded).endswith("offload; the host's memory is not counted: see the guide")
    assert "not counted" not in str(_plan())


@pytest.mark.ci
def test_the_note_on_the_hosts_memory_is_there_where_offloading_would_not_fit_either() -> None:
    found = _plan(budget="1MiB")
    assert found.smallest.choice.offloads
    assert "With offload, the host's memory is not counted: see the guide. Use " in found.why_nothing_fits()


def test_the_code_for_replicas_says_how_many_ranks_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    code = replace(_plan(), recommended=_named(_plan(), "HSDP 8, reshard")).code
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="expected a multiple of 8 ranks: each replica is on 8"):
        names["shard"](LanguageModel())


def test_a_node_that_is_filled_in_part_is_a_node() -> None:
    assert [ranks_of(size, 1, 8).num_nodes for size in (1, 8, 12, 16)] == [1, 1, 2, 2]


def test_a_file_that_describes_no_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text('{"name": "half"}')
    with pytest.raises(ValueError, match="describes no machine"):
        machine_by_name(str(tmp_path / "machine.json"))
