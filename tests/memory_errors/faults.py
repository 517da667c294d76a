"""``python -m tests.memory_errors.faults``: for each memory error made on purpose, how its process ended, as JSON."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.memory_errors.allocator import install_guard_allocator, num_guarded_allocations, report_fatal_signals

NUMEL = 1000  # 4000 bytes: 32 bytes behind the tensor are within the alignment


def use_after_free() -> None:
    """Reads a tensor that is gone."""
    address = torch.zeros(NUMEL).data_ptr()
    ctypes.string_at(address, 4)


def overflow_by_one_element() -> None:
    """Writes one element too many, which the alignment hides until the tensor is freed."""
    tensor = torch.zeros(NUMEL)
    ctypes.memset(tensor.data_ptr() + 4 * NUMEL, 0, 4)
    del tensor


def overflow_of_whole_cache_lines() -> None:
    """Writes behind a tensor that fills its last cache line."""
    tensor = torch.zeros(1024)
    ctypes.memset(tensor.data_ptr() + 4096, 0, 1)


def underflow() -> None:
    """Writes the byte before a tensor."""
    tensor = torch.zeros(NUMEL)
    ctypes.memset(tensor.data_ptr() - 1, 0, 1)
    del tensor


def write_to_a_storage_that_was_resized() -> None:
    """Keeps the address of memory that ``resize_`` has freed, and uses it after the storage got memory again."""
    storage = torch.UntypedStorage(4 * NUMEL)
    address = storage.data_ptr()
    storage.resize_(0)
    storage.resize_(4 * NUMEL)
    ctypes.memset(address, 0, 4)


def message_into_memory_that_was_freed() -> None:
    """A receive is in flight when its storage is emptied: it is gloo's thread that writes."""
    with tempfile.TemporaryDirectory() as folder:
        sender = os.fork()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(sender == 0), world_size=2)
        tensor = torch.zeros(NUMEL)
        if sender == 0:
            time.sleep(0.5)
            dist.send(tensor, 0)
            os._exit(0)
        work = dist.irecv(tensor, 1)
        tensor.untyped_storage().resize_(0)
        time.sleep(5)
        del work


def nothing() -> None:
    """Right use of memory: the process survives."""
    before = num_guarded_allocations()
    storage = torch.UntypedStorage(4 * NUMEL)
    tensor = torch.empty(0).set_(storage, 0, (NUMEL,))
    tensor.fill_(1)
    storage.resize_(0)
    storage.resize_(4 * NUMEL)
    tensor.fill_(2)
    views = [torch.ones(size)[1:] for size in range(2, 200)]
    assert sum(view.sum().item() for view in views) == sum(range(1, 199))
    assert tensor.data_ptr() % 64 == 0
    assert num_guarded_allocations() >= before + 200


ERRORS = [use_after_free, overflow_by_one_element, overflow_of_whole_cache_lines, underflow]
ERRORS += [write_to_a_storage_that_was_resized, message_into_memory_that_was_freed, nothing]


def _end_of(fault: Callable[[], None]) -> dict[str, Any]:
    """How a process ends that makes ``fault``: the signal that ended it, or 0; its exit code; and its report."""
    with tempfile.NamedTemporaryFile("w+") as report:
        child = os.fork()
        if child == 0:
            os.dup2(report.fileno(), sys.stderr.fileno())
            faulthandler.enable()
            report_fatal_signals(sys.stderr.fileno())
            install_guard_allocator()
            try:
                fault()
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return {"signal": signal, "exitcode": os.WEXITSTATUS(status), "report": Path(report.name).read_text()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({fault.__name__: _end_of(fault) for fault in ERRORS}))
