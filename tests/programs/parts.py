"""Parts that printed programs import: what calls a model in another way, files that all ranks see, and optimizers."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2


class LacksError(Exception):
    """A runtime does not have what a program does."""


class Watching(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called:
    """``model``, as ``Step.loss`` takes it, but called by ``call(*inputs, **options)``."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self.batch, self.loss, self._call = model.batch, model.loss, call

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._call(*inputs, **options)


def functionally(model: nn.Module) -> Called:
    """``model``, called with its own parameters by ``functional_call``."""
    return Called(
        model,
        lambda *inputs, **options: torch.func.functional_call(model, dict(model.named_parameters()), inputs, options),
    )


class Around(nn.Module):
    """A module around a model, with no parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.inner(*inputs, **options)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see, removed when all of them have left the block."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    yield Path(str(folders[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folders[0]))


@contextmanager
def in_joined(model: nn.Module) -> Iterator[None]:
    """An iteration of ``fsdp2.joined`` in which all ranks have a batch."""
    loop = iter(fsdp2.joined(iter([0]), model))
    assert next(loop) == (0, True)
    yield
    assert next(loop, None) is None


@torch.no_grad()
def initialise(model: nn.Module, *, runtimes: list[Any]) -> None:
    """Draw all parameters anew, as the unsharded model would."""
    is_ours = bool(runtimes) and runtimes[0].name == "fsdp2"
    with fsdp2.whole_init(model, seed=3) if is_ours else torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for param in model.parameters():
            if is_ours or not isinstance(param, DTensor):
                param.normal_(std=0.2)
                continue
            whole = torch.empty(param.shape, dtype=param.dtype).normal_(std=0.2)
            param.copy_(distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None))
    if is_ours and not list(model.buffers()):  # each rank has statistics of its own batches
        fsdp2.broadcast_from(model)
        fsdp2.check_replicas(model)


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([param for group in groups for param in group["params"]], {})
        self.optimizers, self.param_groups = optimizers, groups
        for each in optimizers:  # each has states of its own parameters only
            each.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):  # torch's Muon rounds what fsdp2's need not
            for each in self.optimizers:
                each.step()


ADAMW = {"lr": 1e-2, "eps": 1e-3}  # eps is well above the rounding noise of a gradient


def split(params: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and other parameters."""
    listed = list(params)
    return [each for each in listed if each.ndim == 2], [each for each in listed if each.ndim != 2]


@functools.cache
def first_rank(device_type: str) -> DeviceMesh:
    """A mesh of rank 0, whose process group is created once."""
    return DeviceMesh(device_type, [0])


def flat_adamw(params: Any, *, flat: bool) -> torch.optim.Optimizer:
    given = list(params)
    plain = [each for each in given if not isinstance(each, DTensor)]
    shards = [each for each in given if isinstance(each, DTensor)]
    groups = [{"params": each} for each in (shards, plain) if each]  # foreach, an accelerator's default, mixes no kinds
    made = torch.optim.AdamW(groups, **ADAMW)
    return fsdp2.optim.flatten_optimizer(made) if flat else made


def host_adamw(params: Any, *, runtimes: list[Any], **options: Any) -> torch.optim.Optimizer:
    if not runtimes:
        return torch.optim.AdamW(params, **ADAMW)
    if runtimes[0].name != "fsdp2":
        raise LacksError("torch has no optimizer that steps on the host during backward")
    return fsdp2.optim.HostAdamW(params, **ADAMW, **options)


def muon(params: Any, *, runtimes: list[Any]) -> torch.optim.Optimizer:
    """Muon for matrices, and AdamW for other parameters."""
    matrices, others = split(params)
    if not runtimes:
        return Both(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, **ADAMW))
    if runtimes[0].name != "fsdp2" and not any(isinstance(each, DTensor) for each in matrices):
        raise LacksError("shards of torch's FSDP1 class are no matrices")
    by_adamw = {"params": others, "use_muon": False, "foreach": True, **ADAMW}  # foreach is an accelerator's default
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 1e-2}, by_adamw]
    return fsdp2.optim.Muon(groups, ns_dtype=torch.float32)


class StoppedError(Exception):
    """What a program raises on purpose."""


def stop(*_: object) -> None:
    """A hook that raises."""
    raise StoppedError


def refused(call: Callable[[], Any], error: str) -> None:
    """Call what raises an error that says ``error``."""
    try:
        call()
    except Exception as raised:
        if error not in str(raised):
            raise
    else:
        raise AssertionError(f"it was not refused with an error that says {error!r}")


def fail(handle: Any, model: Any, loss: Callable[[], Tensor], *, in_backward: bool) -> None:
    """Run a pass that the hook of ``handle`` stops, and recover: nothing of it is left."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    try:
        value = loss()
        if in_backward:
            value.backward()
    except StoppedError:
        pass
    handle.remove()
    for buffer, before in buffers:
        buffer.copy_(before)
    model.reset_iter_state(keep_unreduced=not in_backward)
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        if in_backward:
            param.grad = gradient
