"""Fused and split tensors in and out of shards: values beside torch's own operations, bytes by count, and refusals."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp2
from fsdp2 import fully_shard
from fsdp2.checkpoint import load_weights, save_weights
from fsdp2.checkpoint.mapping import Concat, Stack, Transpose, WeightRule
from fsdp2.tensors import NF4Tensor
from tests.distributed.support import NewMemory, seeded, shard_each
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of, wrapped
from tests.harness.selection import long
from tests.harness.weight_files import INDEX, assert_same, locals_of, read, write

NUM_EXPERTS, WIDTH = 3, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, WIDTH))
        self.gate_up = nn.Parameter(torch.randn(NUM_EXPERTS, 10, WIDTH))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 5))
        self.left = nn.Parameter(torch.randn(5, WIDTH))
        self.right = nn.Parameter(torch.randn(3, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)
        self.register_buffer("scales", torch.randn(2, 3))


_EXPERT = "layers.{b}.experts.{e}"
RULES = [
    WeightRule("blocks.{b}.qkv", Concat([f"layers.{{b}}.{part}" for part in "qkv"], sizes=(4, 1, 1))),
    WeightRule("blocks.{b}.gate_up", Concat([Stack(f"{_EXPERT}.{part}", over="e") for part in ("gate", "up")], dim=1)),
    WeightRule("blocks.{b}.down", Stack(Transpose(f"{_EXPERT}.down"), over="e")),
    WeightRule(Concat(["blocks.{b}.left", "blocks.{b}.right"]), "layers.{b}.both"),
    WeightRule("head.weight", Transpose("head.turned")),
    WeightRule("scales", Stack("scale_of.{i}", over="i", dim=1)),
]


def _files() -> dict[str, Tensor]:
    """What ``RULES`` say of the seeded model, by torch."""
    state = {name: value.clone() for name, value in _plain().state_dict().items()}
    found = {"head.turned": state["head.weight"].t(), "head.bias": state["head.bias"]}
    found |= {f"scale_of.{i}": state["scales"][:, i] for i in range(3)}
    for b in range(2):
        of = {name.removeprefix(f"blocks.{b}."): value for name, value in state.items()}
        found |= {f"layers.{b}.{part}": each for part, each in zip("qkv", of["qkv"].split([8, 2, 2]), strict=True)}
        found |= {f"layers.{b}.both": torch.cat([of["left"], of["right"]]), f"blocks.{b}.bias": of["bias"]}
        for e in range(NUM_EXPERTS):
            gate, up = of["gate_up"][e].chunk(2)
            tensors = {"gate": gate, "up": up, "down": of["down"][e].t()}
            found |= {f"layers.{b}.experts.{e}.{name}": value for name, value in tensors.items()}
    return found


def _plain() -> Fused:
    with torch.device("cpu"):
        return seeded(Fused)


def _on_dim(dim: int) -> Callable[[Any, RankContext], Any]:
    options: Any = {"shard_placement_fn": lambda param: Shard(min(dim, param.ndim - 1))}
    return lambda model, ctx: shard_each(*model.blocks, model, mesh=ctx.mesh_1d(), **options)


def _cut_twice(model: Any, ctx: RankContext) -> Any:
    """By a model axis and then by ours, on one dim: a rank has rows with gaps."""
    mesh = ctx.mesh(fsdp=2, tp=2)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(param.detach(), mesh["tp"], [Shard(0)])
            module.register_parameter(name, nn.Parameter(cut))
    return shard_each(*model.blocks, model, mesh=mesh["fsdp"])


ON_2 = {"dim 0": _on_dim(0), "dim 1": _on_dim(1), "dim 2": _on_dim(2), "unsharded": lambda model, ctx: model}
ON_4 = {
    "cut twice": _cut_twice,
    "hsdp": lambda model, ctx: shard_each(*model.blocks, model, mesh=ctx.mesh_2d(2, 2)),
    "more ranks than experts": _on_dim(0),
}


def _make(ctx: RankContext, way: str, seed: int = 0) -> Any:
    return {**ON_2, **ON_4}[way](seeded(Fused, seed), ctx)


def _goes_in_and_out(ctx: RankContext, way: str, tmp_path: Path) -> None:
    """A rank reads its own bytes only."""
    files, asked, slice_of = _files(), Counter[str](), load_weights._slice_of

    def counted(opened: Any, key: str, part: Any) -> Tensor:
        values = slice_of(opened, key, part)
        asked[key] += values.nbytes
        return values

    write(tmp_path, ctx.rank, files)
    model, expected = _make(ctx, way, seed=1), _make(ctx, way)
    with mock.patch.object(load_weights, "_slice_of", counted):
        assert fsdp2.checkpoint.load_safetensors(model, tmp_path, mapping=RULES) == ([], [])
    assert sum(asked.values()) == sum(each.nbytes for each in locals_of(model).values())
    if (way, ctx.world_size) == ("dim 0", 2):  # rank 0 has experts 0 and 1, rank 1 has expert 2; q is rows 0 to 7 of 12
        numbers = {int(key.split(".")[3]) for key in asked if ".experts." in key}
        assert numbers == ({0, 1} if ctx.rank == 0 else {2})
        rows = [6, 0, 0] if ctx.rank == 0 else [2, 2, 2]
        assert [asked[f"layers.0.{part}"] for part in "qkv"] == [each * WIDTH * 4 for each in rows]
    compare_values("loaded", locals_of(model), locals_of(expected))
    for size in ("5GB", 300):
        folder = tmp_path / str(size)
        fsdp2.checkpoint.save_safetensors(model, folder, mapping=RULES, max_shard_size=size)
        assert (folder / INDEX).exists() is (size == 300)
        assert_same(read(folder), files)
        other = _make(ctx, way, seed=2)
        fsdp2.checkpoint.load_safetensors(other, folder, mapping=RULES)
        compare_values("loaded again", locals_of(other), locals_of(expected))


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["dim 0", "dim 1", *long("dim 2", "unsharded")])
@distributed(2)
def test_fused_and_split_tensors_go_in_and_out_on_2_ranks(ctx: RankContext, way: str, tmp_path: Path) -> None:
    _goes_in_and_out(ctx, way, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("way", ["cut twice", *long("hsdp", "more ranks than experts")])
@distributed(4)
def test_fused_and_split_tensors_go_in_and_out_on_4_ranks(ctx: RankContext, way: str, tmp_path: Path) -> None:
    _goes_in_and_out(ctx, way, tmp_path)


@distributed(2)
def test_loading_allocates_nothing_however_tensors_are_put_together(ctx: RankContext, tmp_path: Path) -> None:
    """A shard takes slices of mapped files. Ranks talk to each other, with a mapping or without."""
    write(tmp_path, ctx.rank, _files())
    model, allocated = _make(ctx, "dim 1", seed=1), {}
    for name, mapping in {"fused": RULES, "none": []}.items():
        with NewMemory() as mode:
            fsdp2.checkpoint.load_safetensors(model, tmp_path, mapping=mapping, strict=False)
        allocated[name] = mode.total
    assert allocated["fused"] == allocated["none"], allocated


@distributed(2)
def test_a_save_gathers_each_tensor_once_per_file(ctx: RankContext, tmp_path: Path) -> None:
    model = _make(ctx, "dim 0")
    with mock.patch.object(save_weights, "_gathered", wraps=save_weights._gathered) as gathered:
        fsdp2.checkpoint.save_safetensors(model, tmp_path, mapping=RULES)
    assert sorted(call.args[0].names[0] for call in gathered.call_args_list) == sorted(model.state_dict())


# Casts and subclasses


@distributed(2)
def test_a_rule_may_save_in_a_dtype_of_its_own(ctx: RankContext, tmp_path: Path) -> None:
    rules = [WeightRule(RULES[0].model, RULES[0].files, dtype=torch.float64), *RULES[1:]]
    fsdp2.checkpoint.save_safetensors(_make(ctx, "dim 0"), tmp_path, mapping=rules, dtype=torch.bfloat16)
    dtypes = [torch.float64 if key.rpartition(".")[2] in "qkv" else torch.bfloat16 for key in _files()]
    expected = {key: value.to(dtype) for (key, value), dtype in zip(_files().items(), dtypes, strict=True)}
    assert_same(read(tmp_path), expected)
    model = _make(ctx, "dim 0", seed=1)
    fsdp2.checkpoint.load_safetensors(model, tmp_path, mapping=rules)
    exact = locals_of(_make(ctx, "dim 0"))
    cast = {name: value if name.endswith("qkv") else value.bfloat16().float() for name, value in exact.items()}
    compare_values("after the cast", locals_of(model), cast)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(NF4Tensor.quantise(torch.randn(64, 64)), requires_grad=False)


@distributed(2)
def test_a_subclass_takes_its_parts_at_once(ctx: RankContext, tmp_path: Path) -> None:
    """Quantised from all values of the shard, as if they came from one tensor."""
    whole = seeded(Quantised).codes.dequantise()
    left, right = whole.chunk(2, dim=1)
    rule = [WeightRule("codes", Concat(["left", "right"], dim=1))]
    plain, parts = tmp_path / "plain", tmp_path / "parts"
    write(plain, ctx.rank, {"codes": whole})
    write(parts, ctx.rank, {"left": left, "right": right})
    models = [fully_shard(seeded(Quantised, seed), mesh=ctx.mesh_1d()) for seed in (1, 2)]
    fsdp2.checkpoint.load_safetensors(models[0], plain)
    fsdp2.checkpoint.load_safetensors(models[1], parts, mapping=rule)
    values = [model.codes.to_local().dequantise() for model in models]
    assert torch.equal(*values)
    assert type(models[1].codes.to_local()) is NF4Tensor
    fsdp2.checkpoint.save_safetensors(models[1], tmp_path / "saved", mapping=rule)
    assert_same(read(tmp_path / "saved"), {"left": left, "right": right})


# What is refused


@distributed(2)
def test_all_ranks_raise_one_error_with_all_problems_and_nothing_is_loaded(ctx: RankContext, tmp_path: Path) -> None:
    files = _files()
    del files["layers.0.experts.1.up"], files["layers.1.both"]
    files["layers.1.v"] = files["layers.1.v"].t().contiguous()
    files["head.weight"] = torch.zeros(11, WIDTH)
    for part in "qkv":
        files[f"spare.{part}"] = files.pop(f"layers.0.{part}")
    write(tmp_path, ctx.rank, files)
    model = _make(ctx, "dim 0", seed=1)
    before = locals_of(model)
    for case, is_strict in (("all problems", True), ("problems if not strict", False)):
        with pytest.raises(ValueError, match="does not fit this Fused") as raised:
            fsdp2.checkpoint.load_safetensors(model, tmp_path, mapping=RULES, strict=is_strict)
        texts_beside(__file__).check(case, wrapped("\n".join(sorted(str(raised.value).splitlines()[1:]))))
    compare_values("unchanged", locals_of(model), before)


@distributed(2)
def test_what_no_file_has_is_left_out_only_where_that_is_asked_for(ctx: RankContext, tmp_path: Path) -> None:
    files = {key: value for key, value in _files().items() if not key.startswith("layers.0.")}
    write(tmp_path, ctx.rank, files)
    model, before, expected = (_make(ctx, "dim 0", seed=seed) for seed in (1, 1, 0))
    missing, unexpected = fsdp2.checkpoint.load_safetensors(model, tmp_path, mapping=RULES, strict=False)
    left_out = [name for name in model.state_dict() if name.startswith("blocks.0.") and "bias" not in name]
    assert (missing, unexpected) == (left_out, [])
    values = {name: (before if name in left_out else expected) for name in model.state_dict()}
    compare_values("partly", locals_of(model), {name: locals_of(of)[name] for name, of in values.items()})


@distributed(2)
def test_a_mapping_of_one_rank_is_an_error_on_all(ctx: RankContext, tmp_path: Path) -> None:
    write(tmp_path, ctx.rank, _files())
    model, new = _make(ctx, "dim 0", seed=1), tmp_path / "new"
    before = locals_of(model)
    other = [*RULES[:-1], WeightRule("nothing", "k")] if ctx.rank else RULES
    load = functools.partial(fsdp2.checkpoint.load_safetensors, model, tmp_path)
    save = functools.partial(fsdp2.checkpoint.save_safetensors, model, new)
    calls: dict[str, Callable[[], object]] = {
        "ValueError: On rank 1: load_safetensors: mapping: the rule for 'nothing'": lambda: load(mapping=other),
        "ValueError: On rank 1: save_safetensors: mapping: the rule for 'nothing'": lambda: save(mapping=other),
        "ValueError: save_safetensors: rank 1 would write other tensors": lambda: save(mapping=RULES[ctx.rank :]),
        "TypeError: save_safetensors: mapping is 3, expected a list of WeightRule": lambda: save(mapping=3),  # type: ignore[arg-type]
    }
    for start, call in calls.items():
        assert error_of(call).replace("\n", " ").startswith(start)
    compare_values("unchanged", locals_of(model), before)
    assert not new.exists() or not list(new.iterdir())


@distributed(2)
def test_what_cannot_be_saved_is_refused(ctx: RankContext, tmp_path: Path) -> None:
    model = _make(ctx, "dim 0")
    model.blocks[0].left = nn.Parameter(model.blocks[0].left.bfloat16())
    both = "blocks.0.left", "blocks.0.right"
    cases = {
        "'blocks.0.left' and 'blocks.0.right' are both renamed to 'k'": [WeightRule(name, "k") for name in both],
        "dtype is torch.int32, expected a floating-point": [WeightRule(both[0], "k", dtype=torch.int32)],
        "12 entries along dim 0 cannot be split as (1, 1, 1, 1, 1)": [WeightRule("blocks.0.qkv", Concat([*"abcde"]))],
        "'layers.0.both' would be made of 'blocks.0.left', 'blocks.0.right', whose dtypes differ": RULES,
    }
    for said, mapping in cases.items():
        text = error_of(functools.partial(fsdp2.checkpoint.save_safetensors, model, tmp_path, mapping=mapping))
        assert said in text.replace("\n", " ")
    assert not list(tmp_path.iterdir())
