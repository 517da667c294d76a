"""The simulated accelerator runs behind the host, reuses memory by stream, knows when the host waits for it, and tells
what it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.device import counted_syncs
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext

SIM: Any = device.DEVICE


def side_stream() -> torch.Stream:
    return torch.sim.Stream()  # type: ignore[attr-defined]


def on(stream: torch.Stream) -> Any:
    return torch.sim.stream(stream)  # type: ignore[attr-defined]


# Streams and events


@on_device(1)
def test_event_orders_only_what_was_enqueued_when_it_was_recorded(ctx: RankContext) -> None:
    device.schedule(0, first="compute")
    x, side = torch.zeros(4, device=SIM), side_stream()
    side.wait_stream(torch.accelerator.current_stream())
    with on(side):
        x.add_(1)
        event = side.record_event()
        x.add_(1)
    torch.accelerator.current_stream().wait_event(event)
    assert x.tolist() == [1.0] * 4


def _race(seed: int) -> list[float]:
    """The order of ten additions and ten multiplications that nothing orders."""
    device.schedule(seed)
    x, side = torch.ones((), device=SIM), side_stream()
    side.wait_stream(torch.accelerator.current_stream())
    for _ in range(10):
        x.mul_(2)
        with on(side):
            x.add_(1)
    torch.accelerator.synchronize()
    return [x.item()]


@on_device(1)
def test_a_seed_gives_one_order_and_seeds_give_many(ctx: RankContext) -> None:
    _race(0)  # what a device does only once draws, too
    values = [_race(seed) for seed in range(8)]
    assert values == [_race(seed) for seed in range(8)]
    assert len({value[0] for value in values}) > 2


FLOATS = (torch.float32, torch.float64)
SQUARES = (torch.ones(2, 2), torch.ones(2, 2).t())
# Pairs that differ in one thing only that decides the shape or dtype of the result.
ALIKE: list[Callable[[str], Tensor]] = [
    *(lambda at, dim=dim: torch.ones(2, 3, device=at).std(dim) for dim in (0, 1)),
    *(lambda at, keep=keep: torch.ones(2, 3, device=at).std(1, keepdim=keep) for keep in (False, True)),
    *(lambda at, by=by: torch.ones(3, dtype=torch.int32, device=at) * by for by in (2, 2.0, True, torch.tensor(2.0))),
    *(lambda at, to=to: F.embedding(torch.tensor([0]).to(at), torch.ones(3, 2, dtype=to, device=at)) for to in FLOATS),
    *(lambda at, n=n: F.embedding(torch.tensor([0] * n).to(at), torch.ones(3, 2, device=at)) for n in (1, 2)),
    *(lambda at, x=x: torch.where(x.to(at) > 0, x.to(at), x.to(at)) for x in SQUARES),
    *(lambda at, n=n: torch.cat([torch.ones(1, device=at)] * n) for n in (1, 2)),
]


@on_device(1)
def test_result_has_the_form_that_its_own_arguments_give_it(ctx: RankContext) -> None:
    for _ in range(2):  # what is known of an operation is kept
        for call in ALIKE:
            found, expected = call(SIM), call("cpu")
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, check_stride=True)


@on_device(1)
def test_error_of_an_operation_is_raised_when_the_host_waits(ctx: RankContext) -> None:
    table, index = torch.zeros(3, 2, device=SIM), torch.tensor([5]).to(SIM)
    F.embedding(index, table)
    with pytest.raises(RuntimeError, match="simulated device: index out of range"):
        torch.accelerator.synchronize()
    assert table.sum().item() == 0


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@on_device(1)
def test_memory_that_was_freed_too_early_reads_as_nan(ctx: RankContext, dtype: torch.dtype) -> None:
    device.schedule(0, first="compute")
    x, side = torch.ones(4, dtype=dtype, device=SIM), side_stream()
    side.wait_stream(torch.accelerator.current_stream())
    with on(side):
        y = x + 1
    del x
    torch.empty(100, device=SIM)  # may lie there
    torch.accelerator.synchronize()
    assert y.isnan().all()


@on_device(1)
def test_new_memory_is_nan(ctx: RankContext) -> None:
    assert torch.empty(7, device=SIM).isnan().all()
    storage = torch.zeros(4, device=SIM).untyped_storage()
    storage.resize_(0)
    storage.resize_(32)
    assert torch.empty(0, device=SIM).set_(storage, 0, (8,), (1,)).isnan().all()


@on_device(1)
def test_tensor_without_memory_cannot_be_read(ctx: RankContext) -> None:
    x = torch.zeros(4, device=SIM)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        x + 1


@on_device(1)
def test_each_stream_reserves_the_most_that_it_held(ctx: RankContext) -> None:
    device.schedule(0, first="compute")
    extension, side = device.load(), side_stream()
    extension.reset_peak_memory()
    before = extension.max_memory_reserved()
    x = torch.empty(1024, dtype=torch.uint8, device=SIM)
    del x
    torch.empty(1024, dtype=torch.uint8, device=SIM)  # the same memory
    assert extension.max_memory_reserved() == before + 1024
    with on(side):
        y = torch.empty(1024, dtype=torch.uint8, device=SIM)  # the other stream's memory does not serve
    assert extension.max_memory_reserved() == before + 2048
    with on(side):
        y.fill_(1)
    y.record_stream(torch.accelerator.current_stream())
    del y
    with on(side):
        torch.empty(1024, dtype=torch.uint8, device=SIM)  # y's is in use until the device comes to the mark
    assert extension.max_memory_reserved() == before + 3072


@on_device(1)
def test_memory_is_counted_and_limited(ctx: RankContext) -> None:
    extension = device.load()
    before = extension.memory_allocated()
    x = torch.empty(1000, dtype=torch.uint8, device=SIM)
    assert extension.memory_allocated() == before + 1024
    extension.set_memory_limit(before + 2048)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(2000, device=SIM)
    finally:
        extension.set_memory_limit(0)
    extension.reset_peak_memory()
    del x
    assert extension.memory_allocated() == before
    assert extension.max_memory_allocated() == before + 1024


# What makes the host wait


@on_device(1)
def test_what_makes_the_host_wait_is_counted(ctx: RankContext) -> None:
    x, pinned = torch.ones(4, device=SIM), torch.ones(4).pin_memory()
    current = torch.accelerator.current_stream
    acts: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: x.sum(), []),
        (lambda: x.to(torch.bfloat16), []),
        (lambda: pinned.to(SIM, non_blocking=True), []),
        (lambda: pinned.copy_(x, non_blocking=True), []),
        (lambda: pinned.to(SIM), ["copy from the host"]),
        (lambda: torch.ones(4).to(SIM, non_blocking=True), ["copy from the host, not pinned"]),
        (lambda: torch.ones(4).copy_(x, non_blocking=True), ["copy to the host, not pinned"]),
        (lambda: x.cpu(), ["copy to the host"]),
        (lambda: x.tolist(), ["copy to the host"]),
        (lambda: x[0].item(), ["item"]),
        (lambda: bool(x[0] > 0), ["item"]),
        (lambda: x.nonzero(), ["aten::nonzero"]),
        (lambda: x[x > 0], ["aten::nonzero", "aten::index"]),
        (lambda: torch.equal(x, x), ["aten::equal"]),
        (lambda: torch.accelerator.synchronize(), ["synchronize"]),
        (lambda: current().synchronize(), ["stream.synchronize"]),
        (lambda: current().record_event().synchronize(), ["event.synchronize"]),
    ]
    for index, (act, expected) in enumerate(acts):
        with counted_syncs() as found:
            act()
        assert found == expected, index


@on_device(1)
def test_pinned_memory_is_read_when_the_stream_comes_to_it(ctx: RankContext) -> None:
    pinned, plain = torch.ones(4).pin_memory(), torch.ones(4)
    late, early = pinned.to(SIM, non_blocking=True), plain.to(SIM, non_blocking=True)
    pinned.zero_()
    plain.zero_()
    assert late.tolist() == [0.0] * 4
    assert early.tolist() == [1.0] * 4


# Rules of a stream that is captured into a graph


@on_device(1)
def test_what_a_captured_stream_may_not_be_asked_for_is_told(ctx: RankContext) -> None:
    x, current = torch.ones(4, device=SIM), torch.accelerator.current_stream()
    before = current.record_event()

    def beside(*, begins: bool = True, ends: bool = True) -> None:
        side = side_stream()
        if begins:
            side.wait_stream(current)
        with on(side):
            x.add_(1)
        if ends:
            current.wait_stream(side)

    def only_waits() -> None:
        side_stream().wait_stream(current)

    unjoined = "the capture ends before its stream has waited for others:"
    acts: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: x.sum(), []),
        (beside, []),
        (only_waits, []),
        (lambda: beside(ends=False), [unjoined]),
        (lambda: beside(begins=False, ends=False), ["compute on a stream that is not captured"]),
        (lambda: current.wait_event(before), ["a captured stream waits for an event that is not captured"]),
        (lambda: before.query(), ["event.query"]),
        (lambda: current.query(), ["stream.query"]),
        (lambda: x.tolist(), ["the host waits: copy to the host"]),
    ]
    for index, (act, expected) in enumerate(acts):
        with device.captured() as found:
            act()
        assert [what.rstrip(" 0123456789") for what in found] == expected, index
    side = side_stream()
    with on(side), device.captured() as found:
        current.wait_stream(side)
    assert found == ["the default stream waits for a captured one"]
    with device.captured() as found:
        event = current.record_event()
    current.wait_event(event)
    assert found == ["a wait for an event of a capture that has ended"]


# Operations


@on_device(1)
def test_backward_runs_on_a_thread_of_the_device_and_on_the_streams_of_forward(ctx: RankContext) -> None:
    seen: list[tuple[bool, int]] = []
    side = side_stream()

    def note(gradient: Tensor) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        seen.append((is_main, torch.accelerator.current_stream().stream_id))

    x = torch.ones(4, device=SIM, requires_grad=True)
    with on(side):
        side.wait_stream(torch.sim.default_stream())  # type: ignore[attr-defined]
        y = x * 2
    y.register_hook(note)
    torch.accelerator.current_stream().wait_stream(side)
    z = y * 3
    z.register_hook(note)
    z.sum().backward()
    assert [is_main for is_main, _ in seen] == [False, False]
    assert seen[0][1] == 0
    assert x.grad.tolist() == [6.0] * 4  # type: ignore[union-attr]


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=SIM)


@on_device(2)
def test_operations_collectives_and_waits_are_told_and_lists_count_as_on_cuda(ctx: RankContext) -> None:
    found: list[str] = []
    square, flat, pair = new(4, 4), new(32), [new(4, 4), new(4, 4)]
    stream = side_stream()
    with device.on_launch(found.append):
        told = {}
        for name, call in {
            "operation": lambda: square.view(-1)[2:].add_(1),
            "copy": lambda: square.to(torch.bfloat16),
            "list": lambda: torch._foreach_copy_(pair, [square, square]),
            "list, cast": lambda: torch._foreach_copy_(pair, [new(4, 4, dtype=torch.bfloat16)] * 2),
            "list, other strides": lambda: torch._foreach_copy_(pair, [square, square.t()]),
            "list, added": lambda: torch._foreach_add_(pair, [square, square]),
            "split": lambda: torch.split_with_sizes_copy(square, [3, 1], dim=1, out=[new(4, 3), new(4, 1)]),
            "chunks": lambda: torch._chunk_cat(pair, 0, 2, out=flat.view(2, 16)),
            "wait": lambda: stream.wait_stream(torch.accelerator.current_stream()),
            "collective": lambda: dist.all_reduce(square),
        }.items():
            call()
            told[name], found[:] = " ".join(found).replace("aten::", ""), []
    square.add_(1)
    assert not found
    assert told == {
        "operation": "add",
        "copy": "copy_",
        "list": "_foreach_copy_",
        "list, cast": "_foreach_copy_",
        "list, other strides": "copy_ copy_",
        "list, added": "_foreach_add_",
        "split": "split_with_sizes_copy",
        "chunks": "_chunk_cat",
        "wait": "wait",
        "collective": "all-reduce",
    }
