"""The two all-to-alls of a bucket: shards to owners, results to shards.

On the CPU, a message is a ``Work``, and "wait" blocks this thread. On an accelerator, messages are packed and sent on
the all-gather stream, and the compute stream waits for events. All memory is allocated on the compute stream, and freed
once the compute stream has waited for the last message that reads or writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.core import Axis, CommunicationError, comms
from fsdp2.optim.matrices.messages import BucketMessages, MatrixSlot, ShardSlot, Slices

Source = Callable[[int, Slices], Tensor]  # entries of this rank's shard of a tensor, by its position


class Message:
    """One all-to-all in flight. It owns its send and receive memory until ``wait``."""

    def __init__(
        self, axis: Axis, streams: comms.Streams, sent: Tensor, sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        self._axis, self._streams, self._sent = axis, streams, sent
        self._sizes, self._sent_sizes = list(sizes), list(sent_sizes)
        self._works: Sequence[comms.Waitable] = ()
        self._event: torch.Event | None = None
        self._arrived = sent if axis.group is None else sent.new_empty(sum(sizes))

    def start(self, fill: Callable[[Tensor], None]) -> None:
        """Let ``fill`` write the message, then send it.

        Raises:
            CommunicationError: a rank is lost.
        """
        self._streams.gather_after_compute()  # compute has written what is sent, and has read what was in the memory
        with self._streams.on_gather:
            fill(self._sent)
            if self._axis.group is not None:
                with _naming_ranks(self._axis):
                    work = comms.launched(
                        dist.all_to_all_single,
                        self._arrived,
                        self._sent,
                        self._sizes,
                        self._sent_sizes,
                        group=self._axis.group,
                        async_op=not self._streams.runs_ahead,
                    )
                self._works = () if work is None else (work,)
            self._event = self._streams.record()

    def wait(self) -> Tensor:
        """Return the received elements, ``[sum of sizes]``, for the compute stream. Call it once: nothing is kept.

        Raises:
            CommunicationError: a rank is lost.
        """
        with _naming_ranks(self._axis):
            comms.wait_for(self._works)
        self._streams.wait_here(self._event)  # compute waits for the gather stream: it reads what has arrived
        self._works, self._event = (), None
        arrived = self._arrived
        del self._sent, self._arrived
        return arrived


@contextmanager
def _naming_ranks(axis: Axis) -> Iterator[None]:
    """Let errors of the backend in the block name the ranks that may be lost."""
    try:
        yield
    except CommunicationError as error:
        if axis.group is None:
            raise
        story = "exchange shards with the owners of matrices"
        raise comms.lost("whole_matrices", error, story, [axis.group]) from error.__cause__


def send_shards(axis: Axis, messages: BucketMessages, source: Source, like: Tensor) -> Message:
    """Start sending this rank's shards to owners. ``like`` is an empty tensor of the messages' dtype and device."""
    sent = like.new_empty(sum(messages.given_sizes))
    message = Message(axis, comms.streams_for(like.device), sent, messages.arriving_sizes, messages.given_sizes)

    def fill(memory: Tensor) -> None:
        for slot in messages.given:
            _place(memory, slot).copy_(source(slot.tensor, slot.slices), non_blocking=True)

    message.start(fill)
    return message


def stacked(messages: BucketMessages, arrived: Tensor) -> list[Tensor]:
    """The whole matrices of each stack, ``[n, rows, columns]``, from what ``arrived``; in its memory, if possible."""
    if messages.arrives_whole:
        sizes = [len(each.matrices) * each.rows * each.columns for each in messages.stacks]
        parts = arrived.split(sizes) if sizes else ()
        return [
            part.view(len(each.matrices), each.rows, each.columns)
            for part, each in zip(parts, messages.stacks, strict=True)
        ]
    stacks = [arrived.new_empty(len(each.matrices), each.rows, each.columns) for each in messages.stacks]
    for slot in messages.arriving:
        _entries(stacks, slot).copy_(_place(arrived, slot))
    return stacks


def send_results(axis: Axis, messages: BucketMessages, stacks: Sequence[Tensor], like: Tensor) -> Message:
    """Start sending the results of each stack to all ranks that hold shards of it."""
    sent = _as_message(stacks, like) if messages.returns_whole and axis.group is not None else None
    if sent is None:
        sent = like.new_empty(sum(messages.returned_sizes))
        fill_results(messages, stacks, sent)
    message = Message(axis, comms.streams_for(like.device), sent, messages.results_sizes, messages.returned_sizes)
    message.start(lambda _: None)
    return message


def _as_message(stacks: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """The memory of the stack, if there is only one and it has the message's dtype and device; otherwise None."""
    if len(stacks) != 1 or not stacks[0].is_contiguous():
        return None
    return stacks[0].view(-1) if (stacks[0].dtype, stacks[0].device) == (like.dtype, like.device) else None


def fill_results(messages: BucketMessages, stacks: Sequence[Tensor], memory: Tensor) -> None:
    """Write the message of results to ``memory``."""
    for slot in messages.returned:
        _place(memory, slot).copy_(_entries(stacks, slot))


def take_results(
    messages: BucketMessages, arrived: Tensor, make: Callable[[int], Tensor], results: list[Tensor | None]
) -> None:
    """Write received elements to ``results``, by tensor. A shard that came in one piece stays in the received memory;
    ``make`` allocates the others."""
    for slot in messages.results:
        if slot.is_all:
            results[slot.tensor] = _place(arrived, slot)
            continue
        whole = results[slot.tensor]
        if whole is None:
            whole = results[slot.tensor] = make(slot.tensor)
        whole[slot.slices].copy_(_place(arrived, slot))


def _place(message: Tensor, slot: ShardSlot | MatrixSlot) -> Tensor:
    return message.narrow(0, slot.offset, math.prod(slot.shape)).view(slot.shape)


def _entries(stacks: Sequence[Tensor], slot: MatrixSlot) -> Tensor:
    if slot.count > 1:
        return stacks[slot.stack].narrow(0, slot.index, slot.count)
    return stacks[slot.stack][slot.index].view(slot.box_shape)[slot.slices]
