"""Steps that either all ranks of an axis complete, or none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fsdp2.extras.exchange import exchange
from fsdp2.plan.mesh import NO_AXIS, Axis
from fsdp2.types import ScheduleError


def axis_of(group: dist.ProcessGroup | None) -> Axis:
    """The ranks of ``group``, or all ranks."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    return NO_AXIS if group is None else Axis(group, dist.get_world_size(group), dist.get_rank(group))


@contextmanager
def together(axis: Axis) -> Iterator[None]:
    """All ranks of ``axis`` leave the block normally, or all raise the same error, which says on which ranks it
    happened. In the block, no collective may follow a line that can fail on one rank only."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    found = exchange(axis, None if error is None else (_kind(error), _text(error)))
    failed = {rank: each for rank, each in enumerate(found) if each is not None}
    if not failed:
        return
    kind, _ = next(iter(failed.values()))
    texts = dict.fromkeys(text for _, text in failed.values())
    if error is not None and len(failed) == axis.size and len(texts) == 1:
        raise error
    ranks = {text: [str(rank) for rank in failed if failed[rank][1] == text] for text in texts}
    raise kind("\n".join(f"On rank {', '.join(of)}: {text}" for text, of in ranks.items())) from error


def _kind(error: Exception) -> type[Exception]:
    """A class similar to that of ``error`` that can be built from a text, and that other ranks know."""
    kinds = (ScheduleError, FileNotFoundError, OSError, ImportError, TypeError)
    plain = ValueError if type(error) is ValueError else RuntimeError
    return next((kind for kind in kinds if isinstance(error, kind)), plain)


def _text(error: Exception) -> str:
    ours = isinstance(error, (ScheduleError, ImportError)) or type(error) in (TypeError, ValueError, RuntimeError)
    if isinstance(error, OSError):
        ours = error.errno is None  # otherwise it comes from the system
    return str(error) if ours else f"{type(error).__name__}: {error}"
