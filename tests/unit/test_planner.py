"""``fsdp2.planner.plan``: the units it finds, what it observes, what it compares, and what it says about bad input,
which is in ``golden/planner.txt``."""

from __future__ import annotations

import functools
import re
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp2
from fsdp2.core.schedule.schedule import AfterForward, UnitRules
from fsdp2.extras.sizes import nbytes_of, text_of
from fsdp2.planner import scenario
from fsdp2.planner.blocks import Stack, Units, find_units
from fsdp2.planner.candidates import ABOUT_AS_FAST
from fsdp2.planner.groups import Wire, shard_dim
from fsdp2.planner.machine import Contention, Link, ranks_of
from fsdp2.planner.machines import H100, MACHINES, fields_of, machine_by_name, machine_from
from fsdp2.planner.observe import ModelWork
from fsdp2.planner.plans import Candidate, Plan, table
from fsdp2.planner.scenario import Scenario
from fsdp2.planner.simulate import Held, StepTime
from fsdp2.planner.work import Checkpointing, UnitWork
from fsdp2.planner.workload import Workload, observed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.unit import planner_models
from tests.unit.planner_models import (
    MODELS,
    Block,
    Cache,
    Caching,
    LanguageModel,
    Repeated,
    Translator,
    inputs_of,
    square,
    tokens,
    with_large_parts,
)

TEXTS = texts_beside(__file__)
WORKLOAD = Workload(batch=2, sequence=128)

LARGE = functools.partial(LanguageModel, width=4096, num_blocks=8, vocabulary=32768)


def _model(builder: Callable[[], nn.Module] = LanguageModel) -> nn.Module:
    with torch.device("meta"):
        return builder()


def _observed(model: nn.Module, workload: Workload = WORKLOAD) -> ModelWork:
    return observed(model, find_units(model), workload)


@functools.cache
def _plan(budget: str | int | None = None, num_gpus: int = 16, **options: Any) -> Plan:
    return fsdp2.planner.plan(LanguageModel, "H100", replace(WORKLOAD, **options), num_gpus=num_gpus, budget=budget)


def _named(found: Plan, name: str) -> Candidate:
    return next(each for each in found.choices if each.choice.name == name)


def _dict(**modules: nn.Module) -> nn.Module:
    return nn.ModuleDict(modules)


def _blocks() -> nn.ModuleList:
    return nn.ModuleList([Block(32), Block(32)])


MAPPING = Stack("layers", ("a", "b"), is_mapping=True)
LAYERS = Stack("layers", ("0", "1", "2", "3"))
STACKS = Stack("encoder", ("0", "1")), Stack("decoder", ("0", "1"))
ENCODER, DECODER = Stack("encoder.layers", ("0", "1")), Stack("decoder.layers", ("0", "1", "2"))


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (LanguageModel, Units((LAYERS,), ("embedding", "head"))),
        (functools.partial(LanguageModel, is_tied=True), Units((LAYERS,), (), ("embedding", "head"))),
        (functools.partial(LanguageModel, vocabulary=8), Units((LAYERS,), ())),  # small ones stay with the model
        (lambda: _dict(layers=_dict(a=Block(32), b=Block(32))), Units((MAPPING,), ())),
        (lambda: nn.Sequential(Block(32), Block(32)), Units((Stack("", ("0", "1")),), ())),  # the model itself
        (lambda: _dict(encoder=_blocks(), decoder=_blocks()), Units(STACKS, ())),
        (Repeated, Units((Stack("layers", ("0",), is_whole=False),), ("embedding", "head"))),  # one unit
        (Translator, Units((ENCODER, DECODER), ("shared", "head"))),  # a module at several paths is a unit at one
        (with_large_parts, Units((Stack("layers", ("0", "1", "2")),), ("embedding", "head"))),  # with what is inside
        (  # what lies inside of blocks is no stack of its own
            lambda: _dict(layers=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))),
            Units((LAYERS,), ()),
        ),
    ],
)
def test_units_are_repeated_blocks_and_large_modules(build: Callable[[], nn.Module], units: Units) -> None:
    assert find_units(_model(build)) == units


def _in_compiled(part: str) -> nn.Module:
    """``part`` of a model, or the model itself, is compiled."""
    model, compiled = LanguageModel(), functools.partial(torch.compile, backend="eager")
    if part == "blocks":
        model.layers = nn.ModuleList(map(compiled, model.layers))
        return model
    return nn.Sequential(OrderedDict({part: compiled(model)})) if part else compiled(model)


@pytest.mark.long
@pytest.mark.parametrize("part", ["", "blocks", "inner"])
def test_a_plan_names_what_is_in_compiled_modules_without_these(part: str) -> None:
    found = fsdp2.planner.plan(functools.partial(_in_compiled, part), "H100", WORKLOAD, num_gpus=16)
    if part == "inner":
        assert found.units == Units((replace(LAYERS, path="inner.layers"),), ("inner.embedding", "inner.head"))
    else:
        assert (str(found), found.code) == (str(_plan()), _plan().code)


class Square(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return torch.sigmoid(super().forward(x)) * mask


class Chain(nn.ModuleList):
    """Activations that can be counted by hand: the sigmoid saves its output, the product its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, mask)
        return x


def _chain() -> nn.Module:
    return Chain(Square(32, 32, bias=False) for _ in range(3))


CHAIN = Workload(
    8, 1, precision="fp32", inputs=lambda: (torch.empty(8, 32, requires_grad=True), torch.empty(8, 32)), loss=torch.sum
)


def test_activations_are_what_autograd_saves_and_operations_are_counted_with_those_that_run_again() -> None:
    """Each storage once, without what all blocks share."""
    block = _observed(_model(_chain), CHAIN).kinds[0]
    size, product = 8 * 32 * 4, 2.0 * 8 * 32 * 32
    found = {kind: (work.saved_nbytes, work.forward.linear, work.backward.linear) for kind, work in block.items()}
    assert found == {
        Checkpointing.NONE: (2 * size, product, 2 * product),  # input and output of the sigmoid; not the mask
        Checkpointing.FULL: (size, product, 3 * product),  # the input
        Checkpointing.SELECTIVE: (2 * size, product, 2 * product),  # input and product, the only one, which is kept
    }
    forward = block[Checkpointing.NONE].forward
    assert forward.moved_nbytes == (1 + 1) * size + (2 + 1) * size  # the sigmoid, and its product with the mask
    assert forward.fused_nbytes == 2 * size  # one kernel reads the product and the mask


@pytest.mark.parametrize("by_name", [True, False])
def test_half_of_causal_attention_counts_and_dropout_keeps_none(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, attend = _observed(_model()).kinds, F.scaled_dot_product_attention
    block, pairs = plain[0][Checkpointing.NONE], 2 * 4 * 128 * 128  # sequences, heads, tokens
    assert block.forward.other == pairs * 2 * (16 + 16) / 2
    assert block.backward.other == 2.5 * block.forward.other

    def with_dropout(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        if by_name:
            return attend(q, k, v, dropout_p=0.1, is_causal=is_causal)
        return attend(q, k, v, None, 0.1, is_causal)

    fused = types.SimpleNamespace(scaled_dot_product_attention=with_dropout, silu=F.silu)
    monkeypatch.setattr(planner_models, "F", fused)
    assert _observed(_model()).kinds == plain


def test_the_order_is_that_of_forward_and_the_rest_counts_with_the_head() -> None:
    model = LanguageModel()
    before = {name: id(param) for name, param in model.named_parameters()}
    work = _observed(model)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert all(param.grad is None for param in model.parameters())
    units = work.units(Checkpointing.NONE)
    assert [unit.name for unit in units] == ["embedding", *(f"layers.{index}" for index in range(4)), "head"]
    assert units[-1].forward.linear == 2.0 * 2 * 128 * 64 * 1024
    assert [param.name for param in work.root] == ["norm.weight"]
    logits = 2 * 128 * 1024
    assert units[-1].saved_nbytes >= 4 * logits  # log-probabilities in fp32
    numels = [param.numel for params in (work.root, *(unit.params for unit in units)) for param in params]
    assert sum(numels) == sum(param.numel() for param in model.parameters())


def _saved_nbytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What autograd keeps of a forward on this device."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = square(model(*inputs))
    assert loss.requires_grad
    return sum(nbytes for place, nbytes in saved.items() if place not in params)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_of_all_calls_and_the_model_stays_as_it_is(name: str) -> None:
    model, inputs = MODELS[name](), inputs_of(name)
    before = {key: id(value) for key, value in model.named_parameters(remove_duplicate=False)}
    work = _observed(model, Workload(2, 32, precision="fp32", inputs=inputs, loss=square))
    assert {key: id(value) for key, value in model.named_parameters(remove_duplicate=False)} == before
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    planned = sum(unit.saved_nbytes for unit in work.units(Checkpointing.NONE))
    assert planned == _saved_nbytes(MODELS[name]().float(), inputs())
    assert not any(unit.left_nbytes for unit in work.units(Checkpointing.NONE))


# Caches


def _result(plan: Plan, name: str = "FSDP, reshard") -> tuple[Any, ...]:
    found = _named(plan, name).result
    return found.reserved_nbytes, found.time, plan.left_nbytes


@pytest.mark.parametrize("inputs", [None, lambda: (tokens(128),), lambda: {"tokens": tokens(128), "use_cache": False}])
def test_a_training_step_keeps_no_cache(inputs: Any) -> None:
    """Though the config asks for one; and the model's config stays as it is."""
    model = Caching()
    found = fsdp2.planner.plan(model, "H100", replace(WORKLOAD, inputs=inputs), num_gpus=8)
    assert model.config.use_cache
    model.config.use_cache = False
    plain = fsdp2.planner.plan(model, "H100", WORKLOAD, num_gpus=8)
    assert _result(found) == _result(plain)
    assert found.left_nbytes == 0
    assert not found.warnings
    assert "    model.config.use_cache = False  # training needs no cache of keys and values\n" in found.code


@pytest.mark.parametrize(
    "inputs", [lambda: {"tokens": tokens(128), "use_cache": True}, lambda: (tokens(128), True, Cache())]
)
def test_a_cache_that_inputs_ask_for_is_empty_first_kept_until_the_step_ends_and_named(inputs: Any) -> None:
    asked = fsdp2.planner.plan(Caching, "H100", replace(WORKLOAD, inputs=inputs), num_gpus=8)
    plain = fsdp2.planner.plan(Caching, "H100", WORKLOAD, num_gpus=8)
    cache = 4 * 2 * (2 * 128 * 64) * 2  # blocks; keys and values; of each token; bf16
    assert asked.left_nbytes == cache
    attention = [
        _observed(_model(Caching), replace(WORKLOAD, inputs=each)).kinds[0][Checkpointing.NONE].forward.other
        for each in (inputs, None)
    ]
    assert attention[0] == attention[1] > 0
    for name in ("FSDP, reshard, full checkpointing", "FSDP, reshard, selective checkpointing"):
        held, without = (_named(each, name).result.memory[Held.ACTIVATIONS] for each in (asked, plain))
        assert held >= without + cache
    (warning,) = asked.warnings
    assert warning.startswith(f"the forward leaves {text_of(cache)} on each GPU until the step ends")


def test_every_config_inside_is_told_to_keep_no_cache() -> None:
    model = nn.Sequential(Caching(), nn.Identity())
    code = fsdp2.planner.plan(
        model, "H100", replace(WORKLOAD, loss=lambda output: output.logits.sum()), num_gpus=8
    ).code
    assert '    model.get_submodule("0").config.use_cache = False  # ' in code


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_code_passes_the_dtypes_of_the_plan(precision: str) -> None:
    param_dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    policy = f"policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.{param_dtype}, reduce_dtype=torch.float32)"
    assert policy in _plan(precision=precision).code


# Choices


def test_choices_cover_what_can_be_set() -> None:
    choices = [each.choice for each in _plan().choices]
    assert {choice.shard_size for choice in choices} == {None, 8}
    assert {choice.after_forward for choice in choices} == set(AfterForward)
    assert {choice.checkpointing for choice in choices} == set(Checkpointing)
    assert {choice.wire for choice in choices} == set(Wire)
    # Rows whose time is not known are behind those whose time is.
    fitting = [each.choice.offloads for each in _plan().choices if each.fits]
    assert fitting == sorted(fitting)
    assert set(fitting) == {True, False}


def test_shards_of_no_whole_nodes_are_not_resharded_to_a_node() -> None:
    found = fsdp2.planner.plan(LanguageModel, replace(H100, node_size=6), WORKLOAD, num_gpus=192)
    sizes = [(each.choice.after_forward, each.choice.shard_size) for each in found.choices]
    assert {size for _, size in sizes} == {None, 6, 64}
    assert {size for after, size in sizes if after is AfterForward.RESHARD_TO_SMALLER_MESH} == {None}  # 6 divides no 64


def test_what_fits_comes_first_and_a_smaller_budget_asks_for_more_checkpointing() -> None:
    found, roomy = _plan(budget="6 MiB"), _plan().recommended
    fits = [each.fits for each in found.choices]
    assert fits == sorted(fits, reverse=True)
    assert {True, False} == set(fits)
    assert found.recommended is not None
    assert roomy is not None
    assert found.recommended.fits
    assert roomy.choice.checkpointing is Checkpointing.NONE
    assert found.recommended.choice.checkpointing is not Checkpointing.NONE


@pytest.mark.ci
def test_where_room_is_left_the_last_blocks_may_stay_unsharded_and_such_rows_fit() -> None:
    largest = 2 * sum(param.numel() for param in LanguageModel().layers[0].parameters())
    for num_blocks, room in ((4, 2.5), (16, 12.1)):
        plan = functools.partial(
            fsdp2.planner.plan, functools.partial(LanguageModel, num_blocks=num_blocks), "H100", WORKLOAD
        )
        resharded = _named(plan(num_gpus=16), "FSDP, reshard").result
        found = plan(num_gpus=16, budget=int(resharded.reserved_nbytes + room * largest))
        kept = [each for each in found.choices if each.choice.num_kept]
        assert kept
        assert all(each.fits for each in kept)
        assert num_blocks > 4 or _named(found, "FSDP, keep last 3").fits  # the last one is there at the peak anyway


@pytest.mark.ci
@pytest.mark.parametrize("num_tokens", [1024, 4096])  # communication takes longer than compute, and less long
def test_prefetch_lists_of_two_units_would_gain_little(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = scenario._rules

    def two_ahead(given: Scenario) -> list[UnitRules]:
        rules = usual(given)
        after, before = range(1, len(rules)), range(len(rules) - 1, 0, -1)
        for unit in after:
            lists = tuple(after[unit : unit + 2]), tuple(before[len(rules) - unit :][:2])
            rules[unit] = replace(rules[unit], forward_prefetch=lists[0], backward_prefetch=lists[1])
        return rules

    large = _model(functools.partial(LanguageModel, width=4096, num_blocks=16, vocabulary=32768))
    steps = []
    for rules in (usual, two_ahead):
        monkeypatch.setattr(scenario, "_rules", rules)
        found = fsdp2.planner.plan(large, "H100", Workload(batch=1, sequence=num_tokens), num_gpus=64)
        steps.append(_named(found, "FSDP, reshard").result)
    assert steps[0].time.step < steps[1].time.step * ABOUT_AS_FAST
    assert steps[0].reserved_nbytes < steps[1].reserved_nbytes


@pytest.mark.parametrize("num_gpus", [8, 512])
def test_two_blocks_per_unit_would_not_be_faster(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ModelWork.units

    def both(one: UnitWork, other: UnitWork) -> UnitWork:
        names = ("params", "forward", "backward", "saved_nbytes")
        return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})

    def in_pairs(self: ModelWork, checkpointing: Checkpointing) -> tuple[UnitWork, ...]:
        units = usual(self, checkpointing)
        blocks = [unit for unit in units if unit.is_block]
        first = units.index(blocks[0])
        return (*units[:first], *map(both, blocks[::2], blocks[1::2]), *units[first + len(blocks) :])

    found = []
    monkeypatch.setattr(ModelWork, "members", ())  # units are those of the calls
    for units in (usual, in_pairs):
        monkeypatch.setattr(ModelWork, "units", units)
        compared = fsdp2.planner.plan(LARGE, "H100", Workload(batch=1, sequence=2048), num_gpus=num_gpus)
        found.append(compared.choices[0].result)  # the fastest
    assert found[0].time.compute == pytest.approx(found[1].time.compute, rel=0.01)
    assert found[0].time.step < found[1].time.step


@pytest.mark.ci
def test_a_model_that_cannot_fit_says_by_how_much_and_what_would() -> None:
    found = _plan(budget="1MiB")
    assert found.recommended is None
    too_much = found.smallest.result.reserved_nbytes / 2**20 - 1
    assert too_much > 0
    with pytest.raises(ValueError, match=rf"nothing fits into 1\.0 MiB: .* {too_much:.1f} MiB too much\. .* Use "):
        _ = found.code
    assert found.smallest.choice.offloads
    said = "of the host's memory of a node, of which 1769.5 GiB may be used. Use "
    assert said in found.why_nothing_fits()
    assert found.why_nothing_fits().endswith(
        " Tensor, pipeline and context parallelism cut more than FSDP does, and are not planned: see "
        "https://github.com/fsdp2/fsdp2/blob/main/docs/guide/meshes.md#tensor-parallelism."
    )


def test_what_only_fp8_would_fit_does_not_fit() -> None:
    fp8 = _named(_plan(num_gpus=2, batch=1, sequence=8), "FSDP, reshard, full checkpointing, fp8 gathers").result
    machine, workload = replace(H100, host_bandwidth=None), Workload(batch=1, sequence=8)
    found = fsdp2.planner.plan(LanguageModel, machine, workload, num_gpus=2, budget=int(fp8.reserved_nbytes) + 1)
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
    why = fsdp2.planner.plan(LanguageModel, machine, workload, num_gpus=2, budget=budget).why_nothing_fits()
    said = re.search(pattern, why)
    assert said is not None, why
    changes = {name: int(value) for name, value in said.groupdict().items()}
    num_gpus = changes.pop("num_gpus", 2)
    better = fsdp2.planner.plan(LanguageModel, machine, replace(workload, **changes), num_gpus=num_gpus, budget=budget)
    assert better.recommended is not None


def test_optimizer_precision_and_what_is_frozen_change_what_is_held() -> None:
    """Master weights are of what is trained; a frozen base stays as it is, without optimizer."""

    def frozen(dtype: torch.dtype) -> nn.Module:
        model = LanguageModel().to(dtype)
        model.layers.requires_grad_(False)
        return model

    def held(build: Callable[[], nn.Module], **options: Any) -> Any:
        plan = fsdp2.planner.plan(build, "H100", replace(WORKLOAD, **options), num_gpus=8)
        return _named(plan, "FSDP, reshard").result

    adamw, sgd, fp32 = (held(LanguageModel, **each) for each in ({}, {"optimizer": "sgd"}, {"precision": "fp32"}))
    assert (adamw.optimizer_nbytes, sgd.optimizer_nbytes) == (2 * adamw.params_nbytes, 0)
    part = held(lambda: frozen(torch.float32))
    assert fp32.params_nbytes == part.params_nbytes == adamw.params_nbytes  # shards are in fp32 in any case
    assert part.optimizer_nbytes < adamw.optimizer_nbytes / 1.5
    in_bf16 = held(LanguageModel, master_dtype="bf16")
    in_fp32 = held(lambda: LanguageModel().bfloat16(), master_dtype="fp32")
    mixed = held(lambda: frozen(torch.bfloat16), master_dtype="fp32")
    assert in_fp32.params_nbytes == 2 * in_bf16.params_nbytes
    assert in_bf16.params_nbytes < mixed.params_nbytes < in_fp32.params_nbytes


def test_the_code_keeps_large_modules_where_all_are_and_names_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _plan()
    for name, argument in (("keep", "reshard_after_forward=False, "), ("reshard", "")):
        code = replace(found, recommended=_named(found, f"FSDP, {name}")).code
        assert f"fsdp2.fully_shard(block, {argument}**options)" in code
        assert f"fsdp2.fully_shard(model.head, {argument}**options)" in code
    names: dict[str, Any] = {}
    exec(replace(found, recommended=_named(found, "HSDP 8, reshard")).code, names)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="expected a multiple of 8 ranks: each replica is on 8"):
        names["shard"](LanguageModel())


def test_the_table_marks_the_recommended_choice_and_its_units_are_those_of_the_model() -> None:
    found = _plan(budget="6 MiB")
    first, *lines = str(found).splitlines()
    (marked,) = (line for line in lines if line.startswith("*"))
    assert found.recommended is not None
    assert f"{1000 * found.recommended.result.time.step:.3f}" in marked
    assert lines[-1] == f"recommended: {found.recommended.choice.name}"
    units = "units: 4 blocks in layers, embedding, head; all else with the model"
    assert first == f"LanguageModel: 328000 parameters; {units}"
    small, large = str(_plan(num_gpus=8)), str(fsdp2.planner.plan(LARGE, "H100", WORKLOAD, num_gpus=8))
    assert "below: MiB of one GPU" in small
    assert "step ms  exposed ms" in small
    assert "0.000" not in small
    assert "LanguageModel: 1.88B parameters" in large
    assert "below: GiB of one GPU" in large
    slow = replace(_named(_plan(), "FSDP, keep").result, time=StepTime(2.0, 1.5))
    assert "step s  exposed s" in table([replace(_plan().choices[0], result=slow)], None, "bf16")[0]


@pytest.mark.parametrize("name", MACHINES)
def test_machines_have_sources_and_are_found_by_name(name: str) -> None:
    machine = machine_by_name(name.lower())
    assert machine is MACHINES[name]
    assert all(source.startswith("https://") for source in machine.sources)
    assert machine.sources[0].split("/")[2] in ("www.nvidia.com", "nvdam.widen.net", "www.amd.com")  # the vendor's
    assert machine_from(fields_of(machine)) == machine


def test_numbers_are_read_shown_and_divided() -> None:
    assert H100.peak_fp8() > H100.bf16_flops
    # stacked experts are cut where they are long enough, and a node that is filled in part is a node
    assert [shard_dim(shape, 64) for shape in [(8, 4096, 128), (4096, 8), (8, 8), (8,), ()]] == [1, 0, 0, 0, 0]
    assert [ranks_of(size, 1, 8).num_nodes for size in (1, 8, 12, 16)] == [1, 1, 2, 2]
    for size, expected in (("70GiB", 70 * 2**30), ("80 gb", 80 * 10**9), (5, 5), ("1.5KiB", 1536)):
        assert nbytes_of(size, "budget", "70GiB") == expected
    for nbytes, shown in ((70.8 * 2**30, "70.8 GiB"), (2**20, "1.0 MiB"), (1024, "1.0 KiB")):
        assert text_of(nbytes) == shown


def _wrong(model: Any = LanguageModel, machine: Any = "H100", workload: Any = WORKLOAD, num_gpus: Any = 8) -> Any:
    return lambda: fsdp2.planner.plan(model, machine, workload, num_gpus=num_gpus)


def _loss(loss: Callable[[Any], Any]) -> Any:
    return lambda: _observed(_model(), replace(WORKLOAD, loss=loss))


class _Idle(LanguageModel):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


WRONG: dict[str, Callable[[], object]] = {
    "batch that is text": lambda: Workload("2", 64),  # type: ignore[arg-type]
    "batch of a half": lambda: Workload(1.5, 64),  # type: ignore[arg-type]
    "GPUs that are text": _wrong(num_gpus="8"),
    "model that is text": _wrong("x"),
    "model that does not call its blocks": lambda: _observed(_model(_Idle)),
    "model without repeated blocks": lambda: find_units(nn.Linear(2, 2)),
    "no machine": _wrong(machine=None),
    "workload that is a tuple": _wrong(workload=(1, 64)),
    "link without bandwidth": lambda: Link(0, 0),
    "latency below zero": lambda: Link(1, -1),
    "contention of all": lambda: Contention(1),
    "figure that is not known": lambda: MACHINES["A100-80"].peak_fp8(),
    "master weights in fp8": lambda: Workload(1, 1, master_dtype="fp8"),
    "inputs that are no function": lambda: replace(WORKLOAD, inputs=torch.ones(2)),  # type: ignore[arg-type]
    "loss that is no function": lambda: replace(WORKLOAD, loss=torch.ones(2)),  # type: ignore[arg-type]
    "loss of what there is not": _loss(lambda output: output.logits),
    "loss that is no scalar": _loss(lambda output: output),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)


def test_what_offloading_puts_into_the_hosts_memory_is_counted_and_limited() -> None:
    """16 bytes for each parameter in the shards of the node's GPUs, with AdamW in fp32."""
    offload = _named(_plan(), "FSDP, reshard, offload")
    num_params = sum(param.numel() for param in LanguageModel().parameters())
    assert offload.result.host_nbytes == pytest.approx(16 * num_params * 8 / 16, rel=0.01)  # 8 of 16 GPUs per node
    assert _named(_plan(), "FSDP, reshard").result.host_nbytes == 0
    said = f"; it takes {text_of(offload.result.host_nbytes)} of the host's memory of a node, "
    shown = str(replace(_plan(), recommended=offload)).splitlines()[-1]
    assert shown == f"recommended: FSDP, reshard, offload{said}of which 1769.5 GiB may be used"
    small = replace(H100, host_memory_nbytes=offload.result.host_nbytes)  # of which 95% may be used
    full = fsdp2.planner.plan(LanguageModel, small, WORKLOAD, num_gpus=16)
    assert not _named(full, "FSDP, reshard, offload").fits
    tight = int(_named(full, "FSDP, reshard, full checkpointing, offload").result.reserved_nbytes) + 1
    nothing = fsdp2.planner.plan(LanguageModel, small, WORKLOAD, num_gpus=16, budget=tight)
    assert not nothing.smallest.choice.offloads
    said = r"full checkpointing, offload takes .*, but .* of the host's memory of a node, .* too much\."
    assert re.search(said, nothing.why_nothing_fits())
    unknown = fsdp2.planner.plan(
        LanguageModel, replace(H100, host_memory_nbytes=None), WORKLOAD, num_gpus=16, budget=tight
    )
    assert unknown.recommended is not None
    assert str(unknown).endswith("whose size is not known: pass --host-memory, or Machine(host_memory_nbytes=...)")
