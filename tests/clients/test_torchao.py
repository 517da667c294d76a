"""torchao's ways to train with few bits: weights whose all-gather sends few bits, frozen weights, optimizer states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.clients.compare import client, layout_of, shard_each, whole

WIDTH = 64
PRELOADED = (
    *("torchao.float8", "torchao.float8.fsdp_utils", "torchao.optim", "torchao.quantization.qat"),
    *("torchao.prototype.quantized_training", "torch.distributed.checkpoint.state_dict"),
)
on_two_ranks = client("torchao", preload=PRELOADED)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return result


class FrozenNF4WithLoRA(nn.Module):
    """QLoRA: a frozen 4-bit weight, and two small trained ones."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        nf4 = to_nf4(linear.weight.detach(), block_size=32, scaler_block_size=32)
        self.weight = nn.Parameter(nf4, requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / 8)
        self.lora_b = nn.Parameter(torch.randn(linear.out_features, rank) / 8)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        result: Tensor = linear_nf4(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return result


def model_of_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def is_of_block(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "." in name


def bits_of(tensor: Tensor) -> Any:
    """The plain tensors of which this rank's part of ``tensor`` is made."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if type(tensor) in (Tensor, nn.Parameter):
        bits = tensor.detach().clone()
        return bits.view(torch.uint8) if bits.dtype == torch.float8_e4m3fn else bits  # pickle knows no float8
    names, _ = tensor.__tensor_flatten__()
    return {name: bits_of(getattr(tensor, name)) for name in names}


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    shard_each(*model[:2], model, **options)
    return model


def train(
    model: nn.Module, rank: int, *, make: Any = torch.optim.AdamW, after_step: Any = None, num_steps: int = 3
) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    optimizer = make([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs, target = torch.randn(2, 32, WIDTH, generator=generator)
        torch.manual_seed(step)  # of stochastic rounding
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        seen["losses"].append(loss.detach())
        seen["norms"].append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    return {
        **seen,
        "layout": layout_of(model),
        "parameters": {name: bits_of(param) for name, param in model.named_parameters()},
        "states": {
            name: {key: bits_of(value) for key, value in state.items() if isinstance(value, Tensor)}
            for name, state in states.items()
        },
    }


@pytest.mark.parametrize("precomputes", [False, True], ids=["cast", "precomputed"])
@pytest.mark.parametrize("sends_float8", [False, True], ids=["sends-fp32", "sends-float8"])
@on_two_ranks
def test_float8_trains_the_same(rank: int, folder: Path, sends_float8: bool, precomputes: bool) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=sends_float8, emulate=True)
    model = convert_to_float8_training(model_of_blocks(), config=config, module_filter_fn=is_of_block)
    after_step = precompute_float8_dynamic_scale_for_fsdp if precomputes else None
    return train(sharded(model), rank, after_step=after_step)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@on_two_ranks
def test_qlora_on_nf4_trains_the_same(rank: int, folder: Path, reshard: bool) -> Any:
    model = model_of_blocks()
    for block in model[:2]:
        block.up, block.down = FrozenNF4WithLoRA(block.up), FrozenNF4WithLoRA(block.down)
    return train(sharded(model, reshard_after_forward=reshard), rank)


@pytest.mark.parametrize("recipe", ["int8_mixed_precision", "int8_weight_only", "bitnet", "aware"])
@on_two_ranks
def test_quantized_and_quantization_aware_training_train_the_same(rank: int, folder: Path, recipe: str) -> Any:
    import torchao.optim
    from torchao.prototype import quantized_training as recipes
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
    from torchao.quantization.qat import QATConfig

    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    config = {
        "int8_mixed_precision": recipes.int8_mixed_precision_training,
        "int8_weight_only": recipes.int8_weight_only_quantized_training,
        "bitnet": recipes.bitnet_training,
        "aware": lambda: QATConfig(base, step="prepare"),
    }[recipe]()
    model = model_of_blocks()
    quantize_(model, config, filter_fn=is_of_block)
    after_step = recipes.precompute_bitnet_scale_for_fsdp if recipe == "bitnet" else None
    make = torch.optim.AdamW
    if recipe == "int8_weight_only":  # whose weights cannot be multiplied in place, as torch's AdamW does
        torch.compiler.set_stance("force_eager")
        make = torchao.optim._AdamW
    return train(sharded(model), rank, make=make, after_step=after_step)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_two_ranks
def test_optimizers_of_few_bits_train_the_same(rank: int, folder: Path, name: str) -> Any:
    import torchao.optim

    torch.compiler.set_stance("force_eager")  # each compiles a step for each shape
    return train(sharded(model_of_blocks()), rank, make=getattr(torchao.optim, name))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile finds no C++ compiler")
@on_two_ranks
def test_the_compiled_optimizer_of_8_bits_trains_the_same(rank: int, folder: Path) -> Any:
    """The others, compiled, fail on the CPU with torch's runtime, too."""
    import torchao.optim

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))  # compiling takes seconds for each shape
    return train(sharded(model), rank, make=torchao.optim.AdamW8bit)
