"""What fsdp2 relies on in NCCL, asked of a group of one rank: (1) of ``acceptance.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.device import Device, device
from benchmarks.gpu.groups import real_group
from benchmarks.gpu.verdicts import Report, attempt, ensure
from fsdp2.core import _torch
from fsdp2.extras import torch_names


def contract(report: Report, name: str) -> None:
    on = device(name)
    with real_group(on):
        group = dist.group.WORLD
        assert group is not None
        x = torch.ones(64, device=name)
        _gather(group, [torch.empty_like(x)], [x], on_stream=True)  # makes the communicator, for which the host waits
        on.finish()
        for text, check in CONTRACT.items():
            attempt(report, text, partial(check, on, group))
        on.finish()


def _gather(group: dist.ProcessGroup, outputs: list[Tensor], inputs: list[Tensor], *, on_stream: bool) -> Any:
    return _torch.all_gather(group, outputs, inputs, on_stream=on_stream)()


def _reduce(group: dist.ProcessGroup, outputs: list[Tensor], inputs: list[Tensor], *, on_stream: bool) -> Any:
    return _torch.reduce_scatter(group, dist.ReduceOp.SUM, on_stream=on_stream)(outputs, inputs)


def _returns_no_work(on: Device, group: dist.ProcessGroup) -> str:
    works = []
    for count in (1, 3):
        for launch in (_gather, _reduce):
            inputs = [torch.ones(64, device=on.type) for _ in range(count)]
            works.append(launch(group, [torch.empty_like(each) for each in inputs], inputs, on_stream=True))
    ensure(works == [None] * 4, f"works of gather and reduce-scatter of 1 and 3 tensors: {works}")
    return "4 launches"


def _runs_in_the_order_of_its_stream(on: Device, group: dist.ProcessGroup) -> str:
    side = torch.get_device_module(on.type).Stream()
    for launch in (_gather, _reduce):

        def doubled(x: Tensor, y: Tensor, launch: Any = launch) -> Tensor:
            launch(group, [y], [x], on_stream=True)
            return y * 2

        _ensure_host_goes_on(on, side, launch.__name__, doubled)
    return "gather and reduce-scatter behind a busy stream, and the host went on"


def _asynchronous_makes_the_stream_wait(on: Device, group: dist.ProcessGroup) -> str:
    current = torch.get_device_module(on.type).current_stream()
    for launch in (_gather, _reduce):

        def doubled(x: Tensor, y: Tensor, launch: Any = launch) -> Tensor:
            work = launch(group, [y], [x], on_stream=False)
            ensure(work is not None, f"{launch.__name__} returned no work")
            work.wait()
            return y * 2

        _ensure_host_goes_on(on, current, launch.__name__, doubled)
    return "gather and reduce-scatter wait on the device, and the host went on"


def _ensure_host_goes_on(on: Device, stream: Any, name: str, doubled: Callable[[Tensor, Tensor], Tensor]) -> None:
    """``doubled(x, y)`` sends ``x`` to ``y`` and returns twice ``y``, on ``stream``. It runs once before it counts:
    CUDA loads a kernel when it is launched for the first time, and the host may wait for the device then."""
    module = torch.get_device_module(on.type)
    for is_busy in (False, True):
        x, y = torch.zeros(1 << 16, device=on.type), torch.zeros(1 << 16, device=on.type)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            if is_busy:
                on.keep_busy()
            x.fill_(3.0)
            z = doubled(x, y)
            done = stream.record_event()
        ensure(not (is_busy and done.query()), f"{name}: the host has waited")
        on.finish()
        ensure(bool((z == 6.0).all()), f"{name}: expected 6, found {z[0].item()}")


def _takes_several_dtypes(on: Device, group: dist.ProcessGroup) -> str:
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    inputs = [torch.arange(1000, device=on.type).to(dtype) for dtype in dtypes]
    outputs = [torch.zeros_like(each) for each in inputs]
    _gather(group, outputs, inputs, on_stream=True)
    on.finish()
    ensure(all(map(torch.equal, outputs, inputs)), "other values")
    floats, sums = inputs[:2], [torch.zeros_like(each) for each in inputs[:2]]
    _reduce(group, sums, floats, on_stream=True)
    on.finish()
    ensure(all(map(torch.equal, sums, floats)), "other sums")
    return "float32, bfloat16 and uint8 gathered in one launch, the first two reduced in one"


def _gathers_in_place(on: Device, group: dist.ProcessGroup) -> str:
    storages = [torch.arange(1024.0, device=on.type) for _ in range(3)]
    expected = [each.cpu() for each in storages]
    outputs = [each[:512] for each in storages]
    _gather(group, outputs, [each[: 512 // group.size()] for each in storages], on_stream=True)
    on.finish()
    ensure(all(torch.equal(each.cpu(), other) for each, other in zip(storages, expected, strict=True)), "other values")
    return "inputs that are parts of their outputs"


def _input_may_be_freed_at_once(on: Device, group: dist.ProcessGroup) -> str:
    x, y = torch.full((1 << 16,), 3.0, device=on.type), torch.zeros(1 << 16, device=on.type)
    on.keep_busy()
    _gather(group, [y], [x], on_stream=True)
    address = x.data_ptr()
    del x
    other = torch.full((1 << 16,), 9.0, device=on.type)
    is_reused = other.data_ptr() == address
    on.finish()
    ensure(bool((y == 3.0).all()), f"expected 3, found {y[0].item()}")
    return f"on its own stream; its memory was {'' if is_reused else 'not '}used again"


def _agreements(on: Device, group: dist.ProcessGroup) -> str:
    values = torch.tensor([2.0], device=on.type)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        work = dist.all_reduce(values, op, async_op=True)
        ensure(work is not None, "an asynchronous all-reduce returned no work")
        work.wait()  # type: ignore[union-attr]
    ensure(values.item() == 2.0, f"expected 2, found {values.item()}")
    dist.barrier()
    mesh = init_device_mesh(on.type, (1, 1), mesh_dim_names=("replicate", "shard"))
    ensure(mesh["shard"].size() == 1, "a mesh of one rank")
    try:
        import numpy  # noqa: F401
    except ImportError:
        return "all-reduce, barrier, mesh of two axes; not objects, for which torch needs numpy"
    found: list[Any] = [None]
    dist.all_gather_object(found, "of rank 0")
    ensure(found == ["of rank 0"], f"all_gather_object: {found}")
    return "all-reduce, objects, barrier, mesh of two axes"


def _names(on: Device, group: dist.ProcessGroup) -> str:
    name = _torch.backend_name(group, torch.device(on.type, 0))
    expected = "nccl" if on.type == "cuda" else on.backend
    ensure(name == expected, f"the backend says {name!r}, expected {expected!r}")
    return f"{name}, timeout {torch_names.timeout_of(group, torch.device(on.type, 0))}"


CONTRACT: dict[str, Callable[[Device, dist.ProcessGroup], str]] = {
    "a launch on the stream returns no work": _returns_no_work,
    "it runs in the order of its stream": _runs_in_the_order_of_its_stream,
    "an asynchronous one makes the stream wait": _asynchronous_makes_the_stream_wait,
    "one launch takes several dtypes": _takes_several_dtypes,
    "a gather may work in place": _gathers_in_place,
    "an input may be freed behind its launch": _input_may_be_freed_at_once,
    "what ranks agree by": _agreements,
    "name and timeout": _names,
}
