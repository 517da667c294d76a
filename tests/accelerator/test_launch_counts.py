"""What the simulated accelerator says that it was asked for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.accelerator import device
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device.DEVICE)


@on_device(2)
def test_operations_collectives_and_waits_are_told_and_lists_count_as_on_cuda(ctx: RankContext) -> None:
    found: list[str] = []
    square, flat, pair = _new(4, 4), _new(32), [_new(4, 4), _new(4, 4)]
    stream = torch.Stream(device=device.DEVICE)
    with device.on_launch(found.append):
        told = {}
        for name, call in {
            "operation": lambda: square.view(-1)[2:].add_(1),
            "copy": lambda: square.to(torch.bfloat16),
            "list": lambda: torch._foreach_copy_(pair, [square, square]),
            "list, cast": lambda: torch._foreach_copy_(pair, [_new(4, 4, dtype=torch.bfloat16)] * 2),
            "list, other strides": lambda: torch._foreach_copy_(pair, [square, square.t()]),
            "list, added": lambda: torch._foreach_add_(pair, [square, square]),
            "split": lambda: torch.split_with_sizes_copy(square, [3, 1], dim=1, out=[_new(4, 3), _new(4, 1)]),
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
