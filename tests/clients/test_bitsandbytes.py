"""bitsandbytes: a frozen base in 4 bits, which is sharded, and adapters on it.

Its kernels for the CPU compute here, in the sharded and in the plain model.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.checkpoint import load_safetensors, save_safetensors
from fsdp2.core.runtime.unit import units_under
from tests.clients.compare import files_in, whole
from tests.clients.hugging_face import accelerator, adamw, hf_client, loop, tiny
from tests.clients.test_fsdp1 import fsdp1_client, on_the_cpu
from tests.clients.test_trl import options, texts, tokenizer
from tests.distributed.compile_support import start_compiling
from tests.distributed.support import shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="not installed: bitsandbytes; run `make clients`"
)

STORAGES = [torch.bfloat16, torch.float32, torch.uint8]
EVEN, UNEVEN, TINY = (64, 128), (12, 20), (4, 4)  # uneven: 4 blocks, the last one not full; tiny: less than one block


class Adapted(nn.Module):
    """A frozen layer in 4 bits, and an adapter that is trained."""

    def __init__(self, in_size: int, out_size: int, **options: Any) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        self.base = Linear4bit(in_size, out_size, **{"quant_type": "nf4", **options}).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, in_size) / 8)
        self.b = nn.Parameter(torch.randn(out_size, 3) / 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return found


class Block(nn.Module):
    def __init__(self, size: tuple[int, int], is_checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.up, self.down = Adapted(*size, **options), Adapted(*reversed(size), **options)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.up, x, use_reentrant=False) if self.is_checkpointed else self.up(x)
        return x + self.down(torch.tanh(hidden))


def model_of(
    size: tuple[int, int], seed: int = 0, num_blocks: int = 2, device: str | None = "cpu", **options: Any
) -> nn.Sequential:
    """The same on every rank, quantised unless ``device`` is None."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(size, **options) for _ in range(num_blocks)))
    return model if device is None else model.to(device)


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    return shard_each(*model, model, mesh=mesh, **options)


def batch(size: tuple[int, int], rank: int) -> Tensor:
    return torch.randn(5, size[0], generator=torch.Generator().manual_seed(rank))


def trained(model: nn.Module, of: Callable[[Tensor], Any] = lambda value: value) -> dict[str, Any]:
    return {name: of(each) for name, each in model.named_parameters() if each.requires_grad}


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and gradients of one step."""
    out = model(x)
    out.square().mean().backward()
    found = trained(model, lambda each: whole(each.grad))
    model.zero_grad()
    return out.detach(), found


def assert_trains_as_the_plain_one(ctx: RankContext, plain: nn.Module, model: nn.Module, size: tuple[int, int]) -> None:
    """Two steps: the second one fills memory again. Gradients are the mean over ranks; the sum of two is exact."""
    for _ in range(2):
        outs, found = zip(*(gradients(plain, batch(size, rank)) for rank in range(ctx.world_size)), strict=True)
        out, mine = gradients(model, batch(size, ctx.rank))
        assert torch.equal(out, outs[ctx.rank])
        for name, gradient in mine.items():
            expected = torch.stack([each[name] for each in found]).sum(0) / ctx.world_size
            if ctx.world_size == 2:
                assert torch.equal(gradient, expected), name
            else:
                torch.testing.assert_close(gradient, expected)


def base_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The 4-bit weights: what this rank has of each."""
    with torch.no_grad():
        named = [(name, each) for name, each in model.named_parameters() if name.endswith("base.weight")]
        return [(name, each.to_local() if isinstance(each, DTensor) else each) for name, each in named]


@pytest.mark.every_case
@pytest.mark.parametrize("is_nested", [False, True], ids=["scales", "scales of scales"])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@distributed(2)
def test_forward_and_gradients_are_those_of_the_plain_model_bit_for_bit(
    ctx: RankContext, storage: torch.dtype, is_nested: bool
) -> None:
    for size in (EVEN, UNEVEN, TINY):
        for quant_type in ("nf4", "fp4"):
            given = {"quant_storage": storage, "compress_statistics": is_nested, "quant_type": quant_type}
            plain, model = model_of(size, **given), sharded(model_of(size, **given), ctx.mesh_1d())
            assert_trains_as_the_plain_one(ctx, plain, model, size)


WAYS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "checkpointed": {},
    "compiled": {},
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_trains_in_other_ways_as_the_plain_model(ctx: RankContext, way: str) -> None:
    given = {"quant_storage": torch.float32, "is_checkpointed": way == "checkpointed"}
    model = sharded(model_of(EVEN, **given), ctx.mesh_1d(), **WAYS[way])
    if way == "compiled":
        start_compiling()
        for block in model:
            block.compile(backend="eager", fullgraph=True)
    assert_trains_as_the_plain_one(ctx, model_of(EVEN, **given), model, EVEN)


@distributed(2)
def test_mixed_precision_leaves_the_bytes_alone(ctx: RankContext) -> None:
    """Bytes that are stored as float32 are no numbers: a cast would destroy them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(model_of(EVEN, quant_storage=torch.float32), ctx.mesh_1d(), mp_policy=policy)
    plain = model_of(EVEN, quant_storage=torch.float32)
    for name, each in plain.named_parameters():
        if not name.endswith("base.weight"):
            each.data = each.data.bfloat16()
    x = batch(EVEN, ctx.rank).bfloat16()
    assert torch.equal(model(x), plain(x))


@distributed(4)
def test_replicas_compute_the_same(ctx: RankContext) -> None:
    for mesh in (ctx.mesh_2d(2, 2), ctx.mesh_of_one()):
        model = sharded(model_of(UNEVEN), mesh)
        assert torch.equal(model(batch(UNEVEN, ctx.rank)), model_of(UNEVEN)(batch(UNEVEN, ctx.rank)))
        gradients(model, batch(UNEVEN, ctx.rank))
        assert torch.equal(model(batch(UNEVEN, ctx.rank)), model_of(UNEVEN)(batch(UNEVEN, ctx.rank)))


@distributed(2)
def test_casts_moves_and_copies_keep_the_weights(ctx: RankContext) -> None:
    model = sharded(model_of(UNEVEN), ctx.mesh_1d())
    model.to(torch.float64).to(torch.float32).to("cpu")
    assert_trains_as_the_plain_one(ctx, model_of(UNEVEN), copy.deepcopy(model), UNEVEN)
    assert_trains_as_the_plain_one(ctx, model_of(UNEVEN), model, UNEVEN)


@distributed(2)
def test_evaluation_computes_as_training_does(ctx: RankContext) -> None:
    """On some CPUs, bitsandbytes repacks a plain weight in evaluation: memory that no gather fills."""
    model, x = sharded(model_of(EVEN), ctx.mesh_1d()), batch(EVEN, 0)
    expected = model_of(EVEN)(x)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), expected)
    assert_trains_as_the_plain_one(ctx, model_of(EVEN), model.train(), EVEN)


@distributed(2)
def test_a_rank_keeps_its_share_of_the_base_and_holds_two_units_of_it_at_most(ctx: RankContext) -> None:
    plain = model_of(EVEN, num_blocks=4, compress_statistics=False)
    states = [each.quant_state for _, each in base_of(plain)]
    nbytes = sum(each.nbytes for _, each in base_of(plain)) + sum(each.absmax.nbytes for each in states)
    whole_memory = [weakref.ref(each.absmax) for each in states] + [weakref.ref(each) for _, each in base_of(plain)]
    del states
    model = sharded(plain, ctx.mesh_1d())
    gc.collect()
    assert [each() for each in whole_memory] == [None] * len(whole_memory)

    def kept() -> int:
        return sum(each._packed.nbytes + each._absmax.nbytes for _, each in base_of(model))

    assert kept() * 2 == nbytes
    most = 0

    def note(*_: object) -> None:
        nonlocal most
        most = max(most, unsharded_nbytes(model))

    def note_and_again_in_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        note()
        output.register_hook(note)

    for layer in (each for each in model.modules() if isinstance(each, Adapted)):
        layer.register_forward_hook(note_and_again_in_backward)
    for _ in range(2):
        gradients(model, batch(EVEN, ctx.rank))
    assert nbytes / 4 <= most <= nbytes / 2  # of four units
    model.reshard()
    assert unsharded_nbytes(model) == 0
    assert kept() * 2 == nbytes


def unsharded_nbytes(model: nn.Module) -> int:
    """What gathered 4-bit weights and their scales take now."""
    params = [param for _, unit in units_under(model) for group in unit.groups for param in group.params]
    made: list[Any] = [param.unsharded for param in params if hasattr(param.unsharded, "quant_state")]
    storages = [each.untyped_storage() for weight in made for each in (weight._packed, weight._absmax)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.every_case
@pytest.mark.parametrize("is_nested", [False, True], ids=["scales", "scales of scales"])
@distributed(4)
def test_a_checkpoint_is_read_by_another_number_of_ranks(ctx: RankContext, tmp_path: Path, is_nested: bool) -> None:
    given = {"compress_statistics": is_nested}
    dcp.save(sharded(model_of(UNEVEN, **given), ctx.mesh_1d()).state_dict(), checkpoint_id=tmp_path)
    on_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(UNEVEN, seed=1, **given), on_two)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state)
    assert_trains_as_the_plain_one(ctx, model_of(UNEVEN, **given), model, UNEVEN)


@pytest.mark.every_case
@pytest.mark.parametrize("is_4bit", [False, True], ids=["quantised on the way", "in 4 bits"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["scales", "scales of scales"])
@distributed(2, 4, short=2)
def test_a_model_on_the_meta_device_loads_shard_by_shard_and_is_saved_as_the_plain_one(
    ctx: RankContext, is_nested: bool, is_4bit: bool, tmp_path: Path
) -> None:
    """In files of any dtype: the bytes of 4-bit weights and their scales are never cast."""
    for size in (EVEN, UNEVEN, TINY):
        given = {"compress_statistics": is_nested, "quant_storage": torch.bfloat16}
        plain = model_of(size, device=None, **given)
        file = tmp_path / f"{ctx.rank}.safetensors"
        if not is_4bit:
            save_file(plain.state_dict(), file)
        plain.to("cpu")
        if is_4bit:
            save_file(plain.state_dict(), file)
        with torch.device("meta"):
            model = sharded(model_of(size, device=None, **given), ctx.mesh_1d())
        model.to_empty(device="cpu")
        load_safetensors(model, file)
        assert_trains_as_the_plain_one(ctx, plain, model, size)
        expected = plain.state_dict()
        for dtype in (None, torch.bfloat16):
            save_safetensors(model, tmp_path / "saved", dtype=dtype)
            found = load_file(tmp_path / "saved" / "model.safetensors")
            assert found.keys() == expected.keys()
            kept = {name for name in found if dtype is None or "base.weight" in name}
            assert [name for name in kept if not _is_same(found[name], expected[name])] == []
            dist.barrier()  # before the files are replaced


@golden_on_ranks(2)
def test_files_that_do_not_fit_are_refused(ctx: RankContext, tmp_path: Path) -> str:
    file = tmp_path / str(ctx.rank) / "model.safetensors"
    file.parent.mkdir()
    other = model_of(UNEVEN, device=None).bfloat16().to("cpu").state_dict()
    other["0.down.base.weight"] = other["0.down.base.weight"][:4]
    del other["1.up.base.weight.absmax"]
    save_file({key: each.contiguous() for key, each in other.items()}, file)
    model = sharded(model_of(UNEVEN), ctx.mesh_1d())
    text = error_of(lambda: load_safetensors(model, file))
    assert_trains_as_the_plain_one(ctx, model_of(UNEVEN), model, UNEVEN)
    return text[text.index("- ") : text.index("On rank 1")].strip()  # between the paths of files


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@distributed(2)
def test_whole_weights_are_streamed_as_they_compute(ctx: RankContext) -> None:
    from bitsandbytes.functional import dequantize_4bit

    plain = dict(base_of(model_of(UNEVEN)))
    streamed = dict(fsdp2.checkpoint.stream_full_params(sharded(model_of(UNEVEN), ctx.mesh_1d())))
    for name, each in plain.items():
        assert torch.equal(streamed[name], dequantize_4bit(each.data, each.quant_state))


@distributed(2)
def test_whole_weights_are_lent(ctx: RankContext) -> None:
    x, expected = batch(UNEVEN, 0), model_of(UNEVEN)(batch(UNEVEN, 0))
    model = sharded(model_of(UNEVEN), ctx.mesh_1d())
    for rank0_only in (True, False):
        with torch.no_grad(), fsdp2.unsharded(model, rank0_only=rank0_only):
            if not rank0_only or ctx.rank == 0:
                assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.every_case
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_the_class_of_fsdp1_computes_the_same(ctx: RankContext, use_orig_params: bool) -> None:
    from bitsandbytes.nn import Linear4bit

    def wrapped(seed: int) -> Any:
        return fsdp2.FullyShardedDataParallel(
            model_of(UNEVEN, seed, quant_storage=torch.float32),
            auto_wrap_policy=ModuleWrapPolicy({Block, Linear4bit}),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )

    first, second = wrapped(0), wrapped(1)
    second.load_state_dict(first.state_dict())
    x, plain = batch(UNEVEN, ctx.rank), model_of(UNEVEN, quant_storage=torch.float32)
    for model in (first, second):
        for _ in range(2):
            out = model(x)
            assert torch.equal(out, plain(x))
            out.square().mean().backward()


BAD: dict[str, Callable[[Any], Any]] = {
    "trained": lambda layer: setattr(layer.weight, "requires_grad", True),
    "without its state": lambda layer: setattr(layer.weight, "quant_state", None),
    "repacked": lambda layer: setattr(layer.weight.quant_state, "packing_format_for_cpu", True),
    "cut before": lambda layer: setattr(layer.weight, "data", layer.weight.data[:4]),
    "cut along another dim": lambda layer: None,
    "of another class": lambda layer: setattr(layer, "weight", _in_8_bits()),
}


def _in_8_bits() -> Any:
    from bitsandbytes.nn import Int8Params

    return Int8Params(torch.randn(20, 12), requires_grad=False)


@pytest.mark.parametrize("case", list(BAD))
@golden_on_ranks(2)
def test_what_cannot_be_sharded_is_refused(ctx: RankContext, case: str) -> str:
    model = model_of(UNEVEN, quant_storage=torch.bfloat16)
    BAD[case](model[0].up.base)
    state, weight = model[0].up.base.quant_state, model[0].up.base.weight
    placement = {"shard_placement_fn": lambda param: Shard(1)} if "along" in case else {}
    text = error_of(lambda: fully_shard(model, mesh=ctx.mesh_1d(), **placement))
    assert model[0].up.base.quant_state is state
    assert model[0].up.base.weight is weight
    return text


# Through libraries


def in_4_bits(folder: Path, rank: int, storage: torch.dtype = torch.bfloat16) -> Any:
    """The tiny Llama as transformers loads it in 4 bits."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    tiny().save_pretrained(folder / f"base{rank}")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=torch.float32,
    )
    given = {"quantization_config": config, "device_map": {"": "cpu"}, "dtype": torch.float32}
    return LlamaForCausalLM.from_pretrained(folder / f"base{rank}", **given).train()


def saved_adapters(model: Any, folder: Path) -> dict[str, Any]:
    return {"adapters": trained(model, whole), "files": files_in(folder / "adapter", contents=["*.safetensors"])}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@hf_client("bitsandbytes")
def test_adapters_of_peft_train_the_same_through_accelerate(rank: int, folder: Path, storage: torch.dtype) -> Any:
    """accelerate leaves bytes that are stored as uint8 unsharded."""
    from peft import get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(in_4_bits(folder, rank, storage), lora())
    engine = accelerator(transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    model, optimizer = engine.prepare(model, adamw(trained(model).values()))
    seen = loop(engine, model, optimizer, rank, range(3))
    states = engine.get_state_dict(model)
    model.save_pretrained(folder / "adapter", state_dict=states, is_main_process=engine.is_main_process)
    return {**seen, **saved_adapters(model, folder)}


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@distributed(2)
def test_merged_adapters_are_streamed_on_the_dequantised_base(ctx: RankContext, storage: torch.dtype) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from peft import LoraConfig, get_peft_model

    model: Any = model_of(EVEN, num_blocks=1, quant_storage=storage)
    model.is_loaded_in_4bit = True  # as transformers says it
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["base"]))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, generator=torch.Generator().manual_seed(len(name)))
    expected = {
        f"{name.removeprefix('base_model.model.')}.weight": dequantize_4bit(weight, weight.quant_state)
        + layer.get_delta_weight("default")
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A") and (weight := layer.base_layer.weight) is not None
    }
    fully_shard(model, mesh=ctx.mesh_1d())
    merged = fsdp2.checkpoint.merge_lora(model)
    found = dict(fsdp2.checkpoint.stream_full_params(model, transform=merged.transform, rename=merged.rename))
    assert len(expected) == 2
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), msg=name)


@pytest.mark.parametrize("use_orig_params", [False, True])
@fsdp1_client("bitsandbytes")
def test_the_older_recipe_trains_the_same(rank: int, folder: Path, use_orig_params: bool) -> Any:
    """FSDP1 with peft's own policy. Its flat parameters want one dtype, so bytes are stored in that of the adapters."""
    from peft import get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    torch.manual_seed(1)
    model = get_peft_model(in_4_bits(folder, rank, torch.float32), lora())
    plugin = {"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD", "cpu_ram_efficient_loading": False}
    policy = fsdp_auto_wrap_policy(model)
    engine = on_the_cpu(accelerator(**plugin, auto_wrap_policy=policy, use_orig_params=use_orig_params))
    model = engine.prepare(model)
    optimizer = engine.prepare(adamw(each for each in model.parameters() if each.requires_grad))
    return loop(engine, model, optimizer, rank, range(3), max_norm=10.0)


@hf_client("bitsandbytes", "trl")
def test_supervised_fine_tuning_is_the_same(rank: int, folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(1)
    model = in_4_bits(folder, rank)  # arguments for FSDP change how models are loaded
    given = {"train_dataset": texts(prompt=3, completion=5), "processing_class": tokenizer(), "peft_config": lora()}
    engine = SFTTrainer(model, SFTConfig(**options(folder, gradient_checkpointing=True)), **given)
    engine.train()
    engine.save_model(str(folder / "adapter"))
    losses = [entry["loss"] for entry in engine.state.log_history if "loss" in entry]
    return {"losses": losses, **saved_adapters(engine.model, folder)}
