"""A save in the background, with one outcome on all ranks.

A thread runs ``torch.distributed.checkpoint.save`` on a process group of its own. torch's ``async_save`` raises where a
rank cannot copy its tensors, and leaves the others waiting; and what failed later is only in the future. Rules: nothing
is left to a thread that can fail on one rank alone before that rank's thread communicates; a rank that knows of an
error raises it together with all others; the checkpoint has its name only when it is complete.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from fsdp2.core import Axis, CommunicationError, _torch, comms, expect, find_tensors
from fsdp2.extras.checked import check
from fsdp2.extras.exchange import any_of, exchange, together
from fsdp2.extras.own_groups import host_axis
from fsdp2.extras.own_threads import run_beside

_log = logging.getLogger("fsdp2")
_UNFINISHED = ".unfinished_"  # begins the name of a folder that is being written


class AsyncSave:
    """A save that :func:`async_save` has started."""

    def __init__(self, path: Path, axis: Axis, outcome: Future[None]) -> None:
        self._path, self._axis, self._outcome = path, axis, outcome
        self._is_done = self._is_reported = False
        self._world = dist.group.WORLD

    def done(self) -> bool:
        """Whether the save has ended on all ranks, with or without an error. All ranks must call this, and all get the
        same answer. It sends one small message, until it has returned True."""
        if not self._is_done:
            self._is_done = not any_of(self._axis, not self._outcome.done())
        return self._is_done

    def result(self) -> Path:
        """Wait for the save, and return the folder of the checkpoint. Sends nothing, so a rank may call it alone.

        Raises:
            CommunicationError: a rank was lost.
            RuntimeError: some rank could not write. All ranks that call this raise it, and it names the ranks.
        """
        self._is_reported = True
        self._outcome.result()
        return self._path

    def _settle(self) -> None:
        """Wait for the save, and raise its error unless ``result`` has done so on this rank."""
        self._outcome.exception()
        if not self._is_reported and self._world is dist.group.WORLD:
            self.result()


_latest: AsyncSave | None = None


def async_save(
    state_dict: dict[str, Any], checkpoint_id: str | os.PathLike[str], *, planner: SavePlanner | None = None
) -> AsyncSave:
    """Save ``state_dict`` into the new folder ``checkpoint_id`` while training continues.

    Returns as soon as the state dict has been copied to the host; a thread writes the copy. The folder must be one that
    all ranks see. It appears when the checkpoint in it is complete: until then, a folder next to it is written, whose
    name begins with ``.unfinished_``. It is removed if the save fails, so older checkpoints remain the latest.

    If a rank fails, all ranks raise: here, if a rank cannot copy its tensors; otherwise from ``result()`` of the
    handle, or, if some rank has not called that, from the next ``async_save``, which waits for this save first. Rank 0
    also logs the error. All ranks of the default process group must call this. Call ``result()`` before the process
    group is destroyed.

    Args:
        state_dict: as for ``torch.distributed.checkpoint.save``.
        checkpoint_id: the folder; it must not exist.
        planner: as for ``torch.distributed.checkpoint.save``.

    Raises:
        FileExistsError: the folder exists.
        ValueError: ``checkpoint_id`` is the address of another storage.
        RuntimeError: the last save failed, and some rank has not raised its error yet; nothing is saved now.
    """
    global _latest
    asking, writing = host_axis("fsdp2_async_save"), host_axis("fsdp2_async_save_thread")
    latest, _latest = _latest, None
    with together(asking):
        if latest is not None:
            latest._settle()
    with together(asking):  # before the next block, in which a Stateful may communicate
        check("async_save: checkpoint_id", checkpoint_id, "path")
        path = Path(checkpoint_id).absolute()
        _check_new(path, str(checkpoint_id), asking)
    with together(asking):
        made = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
        copied = copy.deepcopy(made, {id(tensor): _on_host(tensor) for tensor in find_tensors(made, [])})
    outcome = run_beside("fsdp2_async_save", _write, copied, path, planner, writing)
    _latest = AsyncSave(path, asking, outcome)
    return _latest


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host. torch's stager copies storages, which wrapper subclasses do not have."""
    if isinstance(tensor, DTensor):
        return _torch.dtensors_like([tensor], [_on_host(_torch.local_of(tensor))])[0]
    return tensor.detach().to("cpu", copy=True)


def _check_new(path: Path, checkpoint_id: str, axis: Axis) -> None:
    is_folder = "://" not in checkpoint_id
    expect(is_folder, "async_save: checkpoint_id", checkpoint_id, "a folder", "Use dcp.async_save.", by_value=True)
    if axis.rank == 0 and path.exists():
        raise FileExistsError(
            f"async_save: the folder {path} exists. Save each checkpoint to a folder of its own, since writing into "
            "this one would destroy the checkpoint that may be there."
        )


def _write(state_dict: dict[str, Any], path: Path, planner: SavePlanner | None, axis: Axis) -> None:
    """In the thread: save, and let all ranks know how it went."""
    unfinished = path.with_name(_UNFINISHED + path.name)
    problem = None
    try:
        if axis.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # a save that was killed may have left it
        given = {"checkpoint_id": unfinished, "planner": planner, "process_group": axis.group}
        comms.launched(dcp.save, state_dict, **given)
        if axis.rank == 0:
            os.rename(unfinished, path)
    except CheckpointException as error:  # torch tells all ranks
        problem = "; ".join(f"rank {rank}: {_described(each)}" for rank, (each, _) in error.failures.items())
    except CommunicationError as error:
        # The others may be in the middle of the save, and would not meet what is sent below. They see this process end.
        raise CommunicationError(f"async_save: the checkpoint {path} was not saved. {error}") from error
    except Exception as error:
        problem = f"rank {axis.rank}: {_described(error)}"
    if not any_of(axis, problem is not None):
        return
    found = "; ".join(dict.fromkeys(each for each in exchange(axis, problem) if each is not None))
    text = f"async_save: the checkpoint {path} was not saved. {found}"
    if axis.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # makes room
        _log.error(text)
    raise RuntimeError(text)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
