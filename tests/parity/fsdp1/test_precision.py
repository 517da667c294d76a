"""``MixedPrecision`` of the class: the dtypes of torch's, and its losses."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, wrapped_mlp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Layer(nn.Linear):
    """Notes the dtype that it computes in."""

    seen: list[torch.dtype]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.weight.dtype]
        return super().forward(x)


class Norm(nn.Module):
    """Stands for a batch normalisation, which the CPU has no mixed dtypes of."""

    seen: list[torch.dtype]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.weight.dtype, self.mean.dtype]
        return (x - self.mean.to(x.dtype)) * self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.exit = Layer(8, 8), Norm(), Layer(8, 4)
        self.register_buffer("scale", torch.full((8,), 1.1))
        self.entry.seen = self.norm.seen = self.exit.seen = self.seen = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        self.seen += [x.dtype, self.scale.dtype]
        return self.exit(self.norm(x * self.scale.to(x.dtype)))


mixed = functools.partial(MixedPrecision, _module_classes_to_ignore=(Norm,))
PRECISIONS = {
    "bf16": mixed(BF16),
    "bf16, reduced in fp32": mixed(BF16, FP32),
    "bf16, buffers too": mixed(BF16, BF16, BF16),
    "reduced in bf16": mixed(reduce_dtype=BF16),
    "low gradients": mixed(BF16, BF16, keep_low_precision_grads=True),
    "all inputs cast": mixed(BF16, cast_forward_inputs=True),
    "no inputs cast": mixed(BF16, cast_root_forward_inputs=False),
    "no classes in fp32": MixedPrecision(BF16, _module_classes_to_ignore=()),
    "fp16": mixed(FP16, FP16, FP16),
}


BY_POLICY = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


def used(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.grad is not None and param.numel()]


@pytest.mark.parametrize("has_policy", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("name", PRECISIONS)
@as_torchs(2)
def test_dtypes_and_losses_are_torchs(front: Front, name: str, use_orig_params: bool, has_policy: bool) -> Any:
    precision, inner = PRECISIONS[name], Model()
    options = BY_POLICY if has_policy else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = front.wrap(inner, mixed_precision=precision, use_orig_params=use_orig_params, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        x = front.batch(4, 8, seed=step).to(FP32 if precision.cast_root_forward_inputs else BF16)
        loss = model(x).float().square().mean()
        loss.backward()
        seen += [loss.detach(), sorted({str(param.grad.dtype) for param in used(model)})]
        if not precision.keep_low_precision_grads:
            optimizer.step()
        optimizer.zero_grad()
    saved = {name: str(value.dtype) for name, value in model.state_dict().items()}
    if has_policy:  # of a wrapper without parameters, torch's class saves buffers as they were cast
        saved = {name: dtype for name, dtype in saved.items() if front.is_ours and dtype != str(FP32)}
    return [*seen, [str(dtype) for dtype in inner.seen], saved]


@pytest.mark.parametrize("reduce_dtype", [BF16, None, FP32])
@pytest.mark.parametrize("param_dtype", [BF16, None])
@as_torchs(2, both_modes=True)
def test_low_gradients_can_be_cast_up(front: Front, param_dtype, reduce_dtype) -> Any:
    precision = MixedPrecision(param_dtype, reduce_dtype, keep_low_precision_grads=True)
    model = wrapped_mlp(front, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, dtypes = [], []
    for step in range(6):
        loss = model(front.batch(4, 8, seed=step)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        if step % 2:  # the other gradients add up
            dtypes.append({str(param.grad.dtype) for param in used(model)})
            for param in used(model):
                param.grad = param.grad.float()
            optimizer.step()
            optimizer.zero_grad()
    if reduce_dtype is FP32:  # torch's class rounds the reduced gradients; ours are as they were reduced
        return [loss.bfloat16() for loss in losses]
    return [losses, dtypes]


@as_torchs(2)
def test_inputs_of_a_root_with_parameters_are_cast_if_those_of_all_wrappers_are(front: Front) -> Any:
    precision = MixedPrecision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False)
    seen: list[torch.dtype] = []
    for options in ({}, BY_POLICY):
        inner = nn.Sequential(nn.Linear(8, 4))
        inner.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        front.wrap(inner, mixed_precision=precision, **options)(front.batch(4, 8)).sum().backward()
    return seen


@as_torchs(2)
def test_classes_in_full_precision_are_named_once(front: Front) -> Any:
    with pytest.warns(UserWarning, match="Norm") as found:
        front.wrap(Model(), mixed_precision=mixed(BF16), **BY_POLICY)
    return len([each for each in found if "precision" in str(each.message)])
