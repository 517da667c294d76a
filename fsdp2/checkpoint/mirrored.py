"""``mirrored``: a checkpoint in the memory of two hosts, from which a restarted job continues without a disk.

Each rank keeps its shards in a file of its host's memory, which outlives the process, and sends them to a neighbour on
another host, which keeps them, too. A thread does so on a process group of its own while training continues. Rules: a
generation is removed when a later one is complete on all ranks, and not before; what can fail on one rank alone is
agreed on before anybody sends; a restarted job takes a generation only if every rank's shards of it are somewhere.

Source: in-memory checkpoints at other hosts, Gemini (Wang et al., SOSP 2023).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn, optim

from fsdp2.checkpoint.mirror_files import HEADER_NBYTES, Found, Header, MirrorFolder, Room
from fsdp2.checkpoint.mirror_state import CALLER, Described, State, Taken, as_text, loaded_text, placed
from fsdp2.core import ScheduleError, _torch, comms, door, expect
from fsdp2.extras.checked import AT_LEAST_1, NOT_NEGATIVE, check
from fsdp2.extras.exchange import any_of, are_alike, exchange, highest, highest_of, together
from fsdp2.extras.half_loaded import said_if_interrupted
from fsdp2.extras.own_groups import host_axis
from fsdp2.extras.own_threads import run_beside

_log = logging.getLogger("fsdp2")
_MESSAGE_NBYTES = 64 * 2**20
_RUN_ID = "TORCHELASTIC_RUN_ID"


class Restored(NamedTuple):
    """What :meth:`Mirror.restore` found: the step, and the state that ``after_step`` was given on this rank."""

    step: int
    state: Any


class _Ranks:
    """Which rank is on which host, and what this rank's neighbours are. Ranks form a ring in which each rank is
    followed by one on the next host, and on a single host by the next rank."""

    def __init__(self, places: Sequence[int], rank: int) -> None:
        hosts: dict[int, list[int]] = {}
        for each, place in enumerate(places):
            hosts.setdefault(place, []).append(each)
        self.local = hosts[places[rank]]
        self.index = self.local.index(rank)
        width = max(map(len, hosts.values()))
        ring = [ranks[index] for index in range(width) for ranks in hosts.values() if index < len(ranks)]
        at = ring.index(rank)
        self.next, self.previous = ring[(at + 1) % len(ring)], ring[at - 1]


@door.all_entries
class Mirror(AbstractContextManager["Mirror"]):
    """What :func:`mirrored` returns. All methods must be called on all ranks."""

    def __init__(self, state: State, optimizers: Sequence[optim.Optimizer], every: int, folder: MirrorFolder) -> None:
        self._state, self._every, self._folder = state, every, folder
        self._asking, self._sending = host_axis("fsdp2_mirrored"), host_axis("fsdp2_mirrored_thread")
        self._rank, self._size = self._asking.rank, self._asking.size
        mine = torch.zeros(self._size, 2, dtype=torch.int64, device="cpu")
        mine[self._rank] = torch.tensor([folder.place, state.digest()], device="cpu")
        table = highest_of(self._asking, mine)
        self._ranks, self._digests = _Ranks(table[:, 0].tolist(), self._rank), table[:, 1].tolist()
        self._latest: Future[None] | None = None
        self._complete: list[Room] = []  # the files of the last complete generation
        self._is_restored = self._is_due = self._is_closed = False
        self._copied = threading.Event()
        self._copied.set()
        self._last_step = -1
        # Other optimizers may write parameters before their step() is called.
        self._copies_late = all(type(each).__module__.startswith("torch.optim") for each in optimizers)
        self._hooks = [each.register_step_pre_hook(self._wait_for_copy) for each in optimizers if self._copies_late]

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that the files of this rank take: its own shards and those of a neighbour. While a
        generation is written, and for reuse after that, there are twice as many."""
        return sum(room.memory.numel() for room in self._complete)

    def restore(self, *, newer_than: int = -1) -> Restored | None:
        """Load the newest step of which the shards of all ranks are in memory, on their own host or with a neighbour.

        Call it once, after the model and optimizers were made and before the first step. A rank whose host has been
        replaced gets its shards from the neighbour. Older and incomplete generations are removed.

        Args:
            newer_than: the step of the checkpoint on disk, if there is one: nothing older is loaded.

        Returns:
            The step and the state; None if no step is complete, so that the caller loads from disk. Rank 0 logs why.

        Raises:
            TypeError, ValueError: ``newer_than`` is no step, or differs between ranks.
            RuntimeError: a rank cannot load; the model may be half loaded.
        """
        self._check_alike(newer_than, "newer_than")
        with together(self._asking):
            mine = [each for each in self._folder.found() if self._vouches_for(each)]
        step, room, needs = self._found_complete(mine, newer_than)
        with together(self._asking):  # no rank writes before the others' files are gone
            kept = [each.name for each in self._folder.found() if each.step == step and room is not None]
            if self._ranks.index == 0:
                self._folder.remove_others(kept)
        self._is_restored, self._is_due = True, needs
        if room is None:
            return None
        return self._loaded(step, room)

    def after_step(self, step: int, state: object = None) -> bool:
        """Mirror the model, the optimizers and ``state`` if ``step`` is a multiple of ``every``.

        Returns when this rank's tensors have been copied to the host, or, on an accelerator with torch's optimizers,
        as soon as the copy is enqueued: then, the next ``step()`` of an optimizer waits for it, and parameters and
        optimizer states must not be changed otherwise before. The rest happens in a thread. If that has not ended
        when the next generation is due, this call waits.

        Args:
            step: the number of the step that has just ended; it must be the same on all ranks.
            state: what this rank needs besides, such as the state dict of a scheduler, the position in the data, or
                ``torch.get_rng_state()``: numbers, strings, tensors, and containers of them. It is copied.

        Returns:
            Whether a generation was begun.

        Raises:
            TypeError, ValueError: ``step`` or ``state`` is none, or ``step`` differs between ranks.
            OSError: a host has too little memory.
            ScheduleError: a forward or backward is running, or ``restore`` was not called.
            RuntimeError: the last generation could not be written on some rank. The one before it is kept.
        """
        check(f"{CALLER}: step", step, "int", NOT_NEGATIVE)
        if step % self._every and not self._is_due:
            return False
        room = None
        try:
            with together(self._asking):
                self._check_open(step)
                self._settle()
                taken = self._state.taken()
                text = as_text({**taken.described(), "state": state})
                digest = self._digests[self._rank]
                header = Header(step, self._rank, self._size, digest, taken.nbytes, len(text), 0)
                room = self._folder.room(header.nbytes)
                room.fill(header, text)
            self._check_alike(step, "step")
        except BaseException:
            if room is not None:
                self._folder.retire(room)
            raise
        self._last_step, self._is_due = step, False
        self._begin(room, header, taken)
        return True

    def wait(self) -> None:
        """Wait until the generation that was begun last is complete on all ranks.

        Raises:
            RuntimeError: it could not be written on some rank. All ranks raise it.
        """
        self._settle()

    def close(self) -> None:
        """End without a restart: wait for the last generation, and remove the files. Leaving a ``with`` block without
        an error does this, too. After an error, the files stay for the restarted job."""
        with together(self._asking):
            self._settle()
        for hook in self._hooks:
            hook.remove()
        with together(self._asking):  # a mirror that is made next may use the same folder
            if self._ranks.index == 0:
                self._folder.remove_others([])
                self._folder.remove()
        self._complete, self._is_closed = [], True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._is_closed:
            self.close()

    @_torch.runs_between_graphs
    def _wait_for_copy(self, *_: object) -> None:
        """Before a step of an optimizer writes what is being copied."""
        self._copied.wait()

    # Agreements

    def _check_open(self, step: int) -> None:
        if self._is_closed:
            raise ScheduleError(f"{CALLER}: after_step was called after close. Make a new mirror.")
        if not self._is_restored:
            raise ScheduleError(
                f"{CALLER}: after_step was called before restore. Call restore() before the first step."
            )
        if step <= self._last_step:
            raise ValueError(f"{CALLER}: step is {step}, but step {self._last_step} is in memory. Count steps upwards.")

    def _check_alike(self, value: int, what: str) -> None:
        if not are_alike(self._asking, value):
            found = exchange(self._asking, value)
            listed = ", ".join(f"{each} on rank {found.index(each)}" for each in sorted({*found}))
            raise ValueError(f"{CALLER}: {what} differs between ranks: {listed}. Pass the same value on all ranks.")

    def _settle(self) -> None:
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.result()

    # Write

    def _begin(self, room: Room, header: Header, taken: Taken) -> None:
        """Copy what may change soon, and let a thread do the rest."""
        copies = []
        with torch.no_grad():
            targets = placed(room.tensors, taken.places)
            for index, (target, tensor) in enumerate(zip(targets, taken.tensors, strict=True)):
                if self._copies_late and index in taken.steady and tensor.device.type != "cpu":
                    copies.append((target, tensor))
                else:
                    target.copy_(tensor)
        late = _LateCopies(copies) if copies else None
        if late is not None:
            self._copied.clear()
        self._latest = run_beside("fsdp2_mirrored", self._write, room, header, late)

    def _write(self, room: Room, header: Header, late: _LateCopies | None) -> None:
        """In the thread: write this rank's generation and that of the rank before it."""
        problem, others = None, []
        try:
            if late is not None:
                late.run()
            room.header = header = header._replace(checksum=room.checksum(header.nbytes))
        except Exception as error:
            problem = error
        finally:
            self._copied.set()
        rooms = [room]
        try:
            self._agree(problem, header.step)
            if self._size > 1:
                others = self._receive_header(header)
                rooms += others
                self._send_on(room, header, *others)
            self._publish(rooms, header.step)
        except BaseException:
            for each in rooms:
                self._folder.retire(each)
            raise
        old, self._complete = self._complete, rooms
        for each in old:
            self._folder.retire(each)
        self._folder.remove_files(each.name for each in self._folder.found() if self._has_left(each, header.step))

    def _receive_header(self, mine: Header) -> list[Room]:
        """Tell the next rank what will follow, and make room for what the previous one will send."""
        sent, got = Room.of_process(HEADER_NBYTES), Room.of_process(HEADER_NBYTES)
        sent.header = mine
        self._swap(sent.memory, got.memory)
        problem, rooms = None, []
        try:
            header = got.header
            if header is None or header[:3] != (mine.step, self._ranks.previous, self._size):
                raise ValueError(f"rank {self._ranks.previous} sends {header}, expected step {mine.step}")
            rooms.append(self._folder.room(header.nbytes))
            rooms[0].header = header
        except Exception as error:
            problem = error
        try:
            self._agree(problem, mine.step)
        except BaseException:
            for each in rooms:
                self._folder.retire(each)
            raise
        return rooms

    def _send_on(self, mine: Room, header: Header, theirs: Room) -> None:
        coming = theirs.header
        assert coming is not None
        sent, got = mine.memory[HEADER_NBYTES : header.nbytes], theirs.memory[HEADER_NBYTES : coming.nbytes]
        self._swap(sent, got)

    def _swap(self, sent: torch.Tensor, got: torch.Tensor) -> None:
        """Send to the next rank, and receive from the previous one, in messages of limited size."""
        group = self._sending.group
        works = [dist.isend(each, self._ranks.next, group) for each in sent.split(_MESSAGE_NBYTES)]
        works += [dist.irecv(each, self._ranks.previous, group) for each in got.split(_MESSAGE_NBYTES)]
        for work in works:
            if work is not None:
                comms.launched(work.wait)

    def _publish(self, rooms: Sequence[Room], step: int) -> None:
        problem = None
        try:
            for room in rooms:
                header = room.header
                assert header is not None
                if not room.is_whole(header):
                    raise RuntimeError(f"the shards of rank {header.owner} did not arrive as they were sent")
                self._folder.publish(room, self._rank)
        except Exception as error:
            problem = error
        self._agree(problem, step)

    def _agree(self, problem: Exception | None, step: int) -> None:
        """In the thread: all ranks raise if one has a problem."""
        if any_of(self._sending, problem is not None):
            found = exchange(self._sending, None if problem is None else f"{type(problem).__name__}: {problem}")
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None)
            raise RuntimeError(
                f"{CALLER}: step {step} is not in memory, the one before it still is. {said}"
            ) from problem

    def _has_left(self, each: Found, step: int) -> bool:
        """Whether the file is of an earlier step, and of a process that is gone or of this one."""
        is_mine = each.holder == self._rank or (self._ranks.index == 0 and each.holder not in self._ranks.local)
        return each.step < step and is_mine and each.name not in {room.name for room in self._complete}

    # Read

    def _vouches_for(self, each: Found) -> bool:
        """Whether this rank checks the file: its own shards, and a part of those whose owners are on other hosts."""
        if each.owner == self._rank:
            return True
        return each.owner not in self._ranks.local and each.owner % len(self._ranks.local) == self._ranks.index

    def _found_complete(self, mine: Sequence[Found], newer_than: int) -> tuple[int, Room | None, bool]:
        """The newest step of which all shards are there, this rank's part of it, and whether some rank lacked its own;
        -1 if there is none."""
        found, limit = False, None
        while True:
            steps = [each.step for each in mine if limit is None or each.step < limit]
            (step,) = highest(self._asking, [max(steps, default=-1)])
            found = found or step >= 0
            if step <= newer_than or step < 0:
                if self._rank == 0:
                    _log.warning("%s", _why_not(found, step, newer_than))
                return -1, None, False
            rooms = self._whole_rooms([each for each in mine if each.step == step])
            table = torch.zeros(self._size, 3, dtype=torch.int64, device="cpu")  # has its own, who has it, size
            for owner, room in rooms.items():
                assert room.header is not None
                table[owner] = torch.tensor([owner == self._rank, self._rank + 1, room.header.nbytes], device="cpu")
            table = highest_of(self._asking, table)
            if bool(table[:, 1].all()):
                return step, self._fetched(rooms, table), not bool(table[:, 0].all())
            limit = step

    def _whole_rooms(self, files: Sequence[Found]) -> dict[int, Room]:
        """By owner, the files in which all is as it was written, for as many ranks as now and models like these."""
        rooms: dict[int, Room] = {}
        for each in files:
            room = self._folder.opened(each.name) if each.owner < self._size else None
            header = None if room is None else room.header
            if room is None or header is None or each.owner in rooms:
                continue
            expected = (each.step, each.owner, self._size, self._digests[each.owner])
            if header[:4] == expected and room.is_whole(header):
                rooms[each.owner] = room
        return rooms

    def _fetched(self, rooms: dict[int, Room], table: torch.Tensor) -> Room:
        """This rank's part: from its host, or from the rank that ``table`` names."""
        group, works = self._sending.group, []
        for owner, (has_own, holder, nbytes) in enumerate(table.tolist()):
            if has_own or self._rank not in (owner, holder - 1):
                continue
            if owner == self._rank:
                rooms[owner] = Room.of_process(nbytes)
            parts = rooms[owner].memory[:nbytes].split(_MESSAGE_NBYTES)
            send, other = (dist.irecv, holder - 1) if owner == self._rank else (dist.isend, owner)
            works += [send(each, other, group) for each in parts]
        for work in works:
            if work is not None:
                comms.launched(work.wait)
        return rooms[self._rank]

    def _loaded(self, step: int, room: Room) -> Restored:
        with together(self._asking):
            header = room.header
            if header is None or not room.is_whole(header):
                raise RuntimeError(
                    f"{CALLER}: the shards of step {step} did not arrive as they were sent. Load from disk."
                )
            found = loaded_text(room.text(header))
            tensors = list(placed(room.tensors, [Described(*each) for each in found["tensors"]]))
        with said_if_interrupted(self._state.model, CALLER), together(self._asking):
            self._state.load(tensors, found["rest"])
        return Restored(step, found["state"])


class _LateCopies:
    """Copies from an accelerator that run on a stream of their own, after what the current stream has been given."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies
        self._streams = comms.streams_for(copies[0][1].device)
        self._versions = _torch.versions_of([tensor for _, tensor in copies])
        self._ready = self._streams.record()

    @torch.no_grad()
    def run(self) -> None:
        with self._streams.beside("mirrored"):
            self._streams.wait_here(self._ready)  # the optimizer has written what is copied
            for target, tensor in self._copies:
                target.copy_(tensor)  # waits for the copy: the thread reads what was copied
        if _torch.versions_of([tensor for _, tensor in self._copies]) != self._versions:
            raise RuntimeError(
                "a parameter or optimizer state was written before the next step() of its optimizer, while it was "
                "copied. Call wait() of the mirror before you write it"
            )


def _why_not(found: bool, step: int, newer_than: int) -> str:
    if not found:
        return f"{CALLER}: no step is in memory. Load from disk."
    if 0 <= step <= newer_than:
        return f"{CALLER}: the newest step in memory is {step}, not newer than {newer_than}. Load from disk."
    return (
        f"{CALLER}: of no step in memory, the shards of all ranks are there, whole and of this model on as many ranks. "
        "Load from disk."
    )


def mirrored(
    model: nn.Module,
    optimizer: optim.Optimizer | Iterable[optim.Optimizer],
    *,
    every: int,
    job: str | None = None,
    folder: str | os.PathLike[str] = "/dev/shm",
) -> Mirror:
    """Keep the shards of ``model`` and ``optimizer`` in the memory of two hosts, for a restart without a disk.

    Each rank writes its shards to a file in ``folder``, and a copy of those of the rank before it, which is on another
    host. The files outlive the processes, so when ``torchrun`` restarts them, :meth:`Mirror.restore` continues from
    the newest step of which all ranks' shards are on some host. Two neighbouring hosts that are lost at once, another
    number of ranks, or another model make it return None: then load from disk.

    Parameters, buffers and optimizer states are restored bit for bit. All ranks must call this, and the methods, at the
    same points.

    Args:
        model: the root of the model, sharded or not.
        optimizer: one optimizer or several.
        every: the number of steps from one generation to the next.
        job: a name that this job has before and after a restart, and no other job on these hosts. Default: the run id
            of ``torchrun``, if it was started with ``--rdzv-id`` or ``--standalone``.
        folder: a folder in the memory of the host, which each host has for itself. Its files are this user's alone.

    Raises:
        TypeError, ValueError: an argument is wrong, or differs between ranks.
        OSError: ``folder`` cannot be used on some rank.
    """
    axis = host_axis("fsdp2_mirrored")
    with together(axis):
        expect(isinstance(model, nn.Module), f"{CALLER}: model", model, "a module")
        optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        for each in optimizers:
            expect(isinstance(each, optim.Optimizer), f"{CALLER}: optimizer", each, "optimizers of torch.optim's kind")
        check(f"{CALLER}: every", every, "int", AT_LEAST_1)
        check(f"{CALLER}: folder", folder, "path")
        check(f"{CALLER}: job", job, "str | None")
        opened = MirrorFolder(Path(folder), _job(job))
        state = State(model, optimizers)
        state.digest()
    if not are_alike(axis, (every, opened.path.name)):
        raise ValueError(f"{CALLER}: every or job differs between ranks. Pass the same values on all ranks.")
    return Mirror(state, optimizers, every, opened)


def _job(job: str | None) -> str:
    if job is None:
        job = os.environ.get(_RUN_ID, "none")
        if job == "none":
            raise ValueError(
                f"{CALLER}: job is None, and torchrun has no run id. Pass job=, a name that the restarted job has, "
                "too, or start torchrun with --rdzv-id."
            )
    return job
