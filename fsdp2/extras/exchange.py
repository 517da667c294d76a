"""One-time exchanges between ranks. They are slow, and the CPU waits; a step without agreements never runs them.

Rule: what is asked at each save and load has a message of the same size on any number of ranks. Only ``exchange``, for
what differs between ranks and for errors, sends something of each rank to all.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.core import Axis, ScheduleError, _torch, comms, plans


def exchange(axis: Axis, value: object) -> list[Any]:
    """The ``value`` of every rank on ``axis``, in rank order."""
    if axis.group is None or axis.size == 1:
        return [value]
    if _torch.backend_name(axis.group, torch.device("cpu")) == "gloo":
        return comms.launched(_exchange_by_sums, axis, value)
    values: list[Any] = [None] * axis.size
    with comms.waiting():
        comms.launched(dist.all_gather_object, values, value, group=axis.group)
    return values


def _exchange_by_sums(axis: Axis, value: object) -> list[Any]:
    """Like ``dist.all_gather_object``, but with tensors that ``comm.backends`` knows: see ``_lent`` there."""
    assert axis.group is not None
    mine, rank = pickle.dumps(value), axis.group.rank()
    sizes = torch.zeros(axis.size, dtype=torch.int64, device="cpu")  # whatever the user's default device is
    sizes[rank] = len(mine)
    lengths = _summed(axis, sizes).tolist()
    whole = torch.zeros(sum(lengths), dtype=torch.uint8, device="cpu")
    parts = whole.split(lengths)
    parts[rank].copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    _summed(axis, whole)
    return [pickle.loads(ctypes.string_at(part.data_ptr(), part.numel())) for part in parts]


def any_of(axis: Axis, flag: bool) -> bool:
    """Whether ``flag`` is true on some rank of ``axis``."""
    return bool(highest(axis, [int(flag)])[0])


def are_alike(axis: Axis, value: object) -> bool:
    """Whether all ranks of ``axis`` have the same ``repr`` of ``value``, which they compare by a hash of 56 bits."""
    number = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    found, negated = highest(axis, [number, -number])
    return found == -negated


def highest(axis: Axis, numbers: Sequence[int]) -> list[int]:
    """The highest of each of ``numbers`` on the ranks of ``axis``, which have equally many."""
    device = torch.device("cpu") if axis.group is None else _device_of(axis.group)
    return highest_of(axis, torch.tensor(numbers, dtype=torch.int64, device=device)).tolist()


def highest_of(axis: Axis, numbers: torch.Tensor) -> torch.Tensor:
    """The same for ``numbers`` in a tensor, which it replaces."""
    if axis.group is None or axis.size == 1:
        return numbers
    return comms.launched(_reduced, axis, numbers, dist.ReduceOp.MAX)


def from_first(axis: Axis, value: object) -> Any:
    """The ``value`` of the first rank of ``axis``."""
    if axis.group is None or axis.size == 1:
        return value
    mine = pickle.dumps(value) if axis.rank == 0 else b""
    (size,) = highest(axis, [len(mine)])
    sent = torch.frombuffer(bytearray(mine or size), dtype=torch.uint8).to(_device_of(axis.group))
    found = comms.launched(_summed, axis, sent).cpu()
    return pickle.loads(ctypes.string_at(found.data_ptr(), size))


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors are that ``group`` sends: on the host if it can."""
    try:
        _torch.backend_of(group, torch.device("cpu"))
    except RuntimeError:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def _reduced(axis: Axis, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    comms.wait_for(comms.all_reduce(axis.group, tensor, op))
    return tensor


def _summed(axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
    return _reduced(axis, tensor, dist.ReduceOp.SUM)


def axis_of(group: dist.ProcessGroup | None) -> Axis:
    """The ranks of ``group``, or all ranks."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    return plans.NO_AXIS if group is None else Axis(group, dist.get_world_size(group), dist.get_rank(group))


_ALONE = "raised_alone"  # an attribute of errors


def mark_alone(error: Exception) -> None:
    """Let this rank raise ``error`` without telling others, even in ``together``. Those that make the same call raise
    it by themselves; others may never make the call, and an exchange would meet a collective of theirs."""
    setattr(error, _ALONE, True)


def is_alone(error: BaseException) -> bool:
    """Whether ``mark_alone`` was called for ``error``."""
    return hasattr(error, _ALONE)


@contextmanager
def together(axis: Axis) -> Iterator[None]:
    """All ranks of ``axis`` leave the block normally, or all raise the same error, which says on which ranks it
    happened; except for what ``mark_alone`` has marked. In the block, no collective may follow a line that can fail
    on one rank only. Who presses Ctrl-C on one rank interrupts all."""
    error: Exception | KeyboardInterrupt | None = None
    try:
        yield
    except (Exception, KeyboardInterrupt) as raised:
        if is_alone(raised):
            raise
        error = raised
    if not any_of(axis, error is not None):
        return
    found = exchange(axis, None if error is None else (_kind(error), _text(error)))
    failed = {rank: each for rank, each in enumerate(found) if each is not None}
    kind, _ = next(iter(failed.values()))
    texts = dict.fromkeys(text for _, text in failed.values())
    if error is not None and len(failed) == axis.size and len(texts) == 1:
        raise error
    ranks = {text: [str(rank) for rank in failed if failed[rank][1] == text] for text in texts}
    raise kind("\n".join(f"On rank {', '.join(of)}: {text}" for text, of in ranks.items())) from error


def _kind(error: Exception | KeyboardInterrupt) -> type[Exception | KeyboardInterrupt]:
    """A class similar to that of ``error`` that can be built from a text, and that other ranks know."""
    kinds = (ScheduleError, FileNotFoundError, OSError, ImportError, TypeError, KeyboardInterrupt)
    plain = ValueError if type(error) is ValueError else RuntimeError
    return next((kind for kind in kinds if isinstance(error, kind)), plain)


def _text(error: Exception | KeyboardInterrupt) -> str:
    ours = isinstance(error, (ScheduleError, ImportError)) or type(error) in (TypeError, ValueError, RuntimeError)
    if isinstance(error, OSError):
        ours = error.errno is None  # otherwise it comes from the system
    return str(error) if ours else f"{type(error).__name__}: {error}"
