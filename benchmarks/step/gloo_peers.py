"""Who takes part in ``gloo_step.py``: a transformer, what wraps it, and a bare loop that shows how fast it could be.

Every peer gathers each block before its forward and again before its backward, and reduces its gradients behind that.
Those of ``LLAMA_PEERS`` take a Llama of Hugging Face's transformers, too.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel

import fsdp2
import fsdp2.fsdp1
from benchmarks.llama import loss, units
from fsdp2.core.comm.backends import comm_for
from fsdp2.core.plan.mesh import Axis

Step = Callable[[Tensor], None]
CPU = torch.device("cpu")


class Block(nn.Module):
    """Causal attention with heads of 64, and a gated MLP no wider than the model: seven square matrices, two gains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        heads = [layer(y).unflatten(-1, (-1, 64)).transpose(-2, -3) for layer in (self.q, self.k, self.v)]
        x = x + self.o(scaled_dot_product_attention(*heads, is_causal=True).transpose(-2, -3).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def _trained(model: nn.Module) -> Step:
    parameters = list(model.parameters())

    def step(x: Tensor) -> None:
        is_llama = not x.is_floating_point()  # but tokens
        (loss(model, x) if is_llama else model(x).sum()).backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def unsharded(model: nn.Module) -> Step:
    """Each rank for itself."""
    return _trained(model)


def ddp(model: nn.Module) -> Step:
    return _trained(DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp1(model: nn.Module) -> Step:
    return _in_class(torch_fsdp.FullyShardedDataParallel, model)


def our_fsdp1(model: nn.Module) -> Step:
    return _in_class(fsdp2.fsdp1.FullyShardedDataParallel, model)


def _in_class(cls: Callable[..., Any], model: nn.Module) -> Step:
    own = [unit for unit in units(model) if unit is not model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that FSDP2 supersedes its class
        policy = CustomPolicy(lambda module: any(module is unit for unit in own))
        return _trained(cls(model, auto_wrap_policy=policy, use_orig_params=True, device_id=CPU))


def torch_fsdp2(model: nn.Module) -> Step:
    return _fully_sharded(torch_fsdp.fully_shard, model, init_device_mesh("cpu", (dist.get_world_size(),)))


def ours(model: nn.Module) -> Step:
    return _fully_sharded(fsdp2.fully_shard, model, init_device_mesh("cpu", (dist.get_world_size(),)))


def _fully_sharded(fully_shard: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> Step:
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    return _trained(model)


def deepspeed_zero3(model: nn.Sequential) -> Step:
    """Its defaults keep a model of this size gathered from forward to backward; the others here do not."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_SIZE=world_size)
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.utils import logger  # type: ignore[import-not-found]

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    block_numel = sum(parameter.numel() for parameter in model[0].parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": block_numel,
            "stage3_prefetch_bucket_size": block_numel,
            "stage3_max_live_parameters": 2 * block_numel,
            "stage3_max_reuse_distance": 0,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(x: Tensor) -> None:
        engine.backward(engine(x).sum())

    step.between = engine.step  # type: ignore[attr-defined]  # it takes the gradients away; nobody else's does so
    return step


PEERS: dict[str, Callable[[nn.Sequential], Step]] = {
    "unsharded": unsharded,
    "DDP": ddp,
    "FSDP1": fsdp1,
    "DeepSpeed": deepspeed_zero3,
    "torch FSDP2": torch_fsdp2,
    "fsdp2": ours,
    "fsdp2's class": our_fsdp1,
}


LLAMA_PEERS = ("unsharded", "DDP", "FSDP1", "torch FSDP2", "fsdp2", "fsdp2's class")


def missing_peers() -> dict[str, str]:
    """Peers that cannot take part here, and why."""
    if not importlib.util.find_spec("deepspeed"):
        return {"DeepSpeed": "it is not installed"}
    tools = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
    return {"DeepSpeed": f"it compiles an extension, and there is no {tools[0]}"} if tools else {}


class Waits:
    """How many seconds this thread has been blocked in the ``wait`` of a collective."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        dist.Work.wait = self._noting(dist.Work.wait)  # type: ignore[method-assign]

    def _noting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:
                    self.seconds += time.perf_counter() - start

        return noting


# The floor


class Bytes:
    """The bytes that a step moves, in one tensor per block, and nothing else."""

    def __init__(self, model: nn.Sequential) -> None:
        numels = [sum(parameter.numel() for parameter in block.parameters()) for block in model]
        dtype, self.size = next(model.parameters()).dtype, dist.get_world_size()
        self.shards = [torch.ones(-(-numel // self.size), dtype=dtype) for numel in numels]
        self.full = [torch.ones(shard.numel() * self.size, dtype=dtype) for shard in self.shards]
        self.reduced = [torch.ones_like(shard) for shard in self.shards]


def bare_gloo(model: nn.Sequential) -> Step:
    """The collectives of gloo itself, one after the other."""
    data = Bytes(model)

    def step(_: Tensor) -> None:
        for _ in range(2):
            for full, shard in zip(data.full, data.shards, strict=True):
                dist.all_gather_into_tensor(full, shard)
        for full, reduced in zip(data.full, data.reduced, strict=True):
            dist.reduce_scatter_tensor(reduced, full)

    return step


def _bare(data: Bytes) -> tuple[list[Callable[[], Sequence[Any]]], list[Callable[[], Sequence[Any]]]]:
    """What launches the gather, and the reduction, of each block by our comm."""
    axis = Axis(dist.group.WORLD, data.size, dist.get_rank())
    comms = [comm_for(axis, CPU) for _ in data.shards]
    gathers = [
        comm.all_gather([full], [shard]) for comm, full, shard in zip(comms, data.full, data.shards, strict=True)
    ]

    def reduction(i: int) -> Callable[[], Sequence[Any]]:
        return lambda: comms[i].reduce_scatter()([data.reduced[i]], [data.full[i]])

    return gathers, [reduction(i) for i in range(len(comms))]


def bare_ours(model: nn.Sequential) -> Step:
    """The same by our comm."""
    gathers, reductions = _bare(Bytes(model))

    def step(_: Tensor) -> None:
        for launch in [*gathers, *gathers, *reductions]:
            for work in launch():
                work.wait()

    return step


def floor(model: nn.Sequential) -> Step:
    """The unsharded model beside the bare collectives by our comm, each launched one block ahead. What a runtime adds
    to this, it could do without."""
    gathers, reductions = _bare(Bytes(model))
    last, in_flight = len(model) - 1, {}

    def launch(what: str, i: int) -> None:
        if 0 <= i <= last and (what, i) not in in_flight:
            in_flight[what, i] = (gathers if what == "gather" else reductions)[i]()

    def wait(what: str, i: int) -> None:
        for work in in_flight.pop((what, i), ()):
            work.wait()

    def before(i: int, ahead: int) -> None:
        launch("gather", i)
        wait("gather", i)
        launch("gather", i + ahead)

    def after_backward(i: int) -> None:
        wait("reduce", i + 1)
        launch("reduce", i)

    for i, block in enumerate(model):
        block.register_forward_pre_hook(lambda *_, i=i: before(i, 1))
        block.register_full_backward_pre_hook(lambda *_, i=i: before(i, -1))
        block.register_full_backward_hook(lambda *_, i=i: after_backward(i))
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the input needs no gradient
    trained = _trained(model)

    def step(x: Tensor) -> None:
        trained(x)
        wait("reduce", 0)

    return step


FLOORS: dict[str, Callable[[nn.Sequential], Step]] = {"gloo alone": bare_gloo, "ours alone": bare_ours, "floor": floor}
