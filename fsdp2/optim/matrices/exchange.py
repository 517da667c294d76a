"""The two all-to-alls of a bucket: shards to owners, results to shards.

On the CPU, a message is a ``Work``, and "wait" blocks this thread. On an accelerator, messages are packed and sent on
the all-gather stream, and the compute stream waits for events. All memory is allocated on the compute stream, and freed
once the compute stream has waited for the last message that reads or writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.core import Axis, CommunicationError, comms
from fsdp2.optim.matrices.domains import Domain
from fsdp2.optim.matrices.messages import BucketMessages, MessageLayout, Slices, Slot
from fsdp2.optim.matrices.planner import Bucket

Source = Callable[[int, Slices], Tensor]  # entries of this rank's shard of a tensor, by its position


class Message:
    """One all-to-all in flight. It owns its send and receive memory until ``wait``."""

    def __init__(self, axis: Axis, sent: Tensor, given: MessageLayout, arriving: MessageLayout) -> None:
        self._axis, self._streams, self._sent = axis, comms.streams_for(sent.device), sent
        self._given, self._arriving = given, arriving
        self._works: Sequence[comms.Waitable] = ()
        self._event: torch.Event | None = None
        self._arrived = sent if axis.group is None else sent.new_empty(sum(arriving.sizes))

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
                        self._arriving.sizes,
                        self._given.sizes,
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


@dataclass(frozen=True)
class Step:
    """The two messages of one bucket in its domain."""

    domain: Domain
    bucket: Bucket
    messages: BucketMessages

    def send_shards(self, source: Source) -> Message:
        """Start sending this rank's shards to owners."""
        given = self.messages.given
        message = Message(self.domain.axis, self.domain.empty(sum(given.sizes)), given, self.messages.arriving)

        def fill(memory: Tensor) -> None:
            for slot in given.slots:
                _place(memory, slot).copy_(source(slot.of, slot.slices), non_blocking=True)

        message.start(fill)
        return message

    def send_results(self, stacks: Sequence[Tensor]) -> Message:
        """Start sending the results of each stack to all ranks that hold shards of it."""
        returned, domain = self.messages.returned, self.domain
        sent = None
        if returned.is_one_tensor and domain.axis.group is not None and stacks[0].is_contiguous():
            sent = stacks[0].view(-1)
        if sent is None or (sent.dtype, sent.device) != (domain.dtype, domain.device):
            sent = domain.empty(sum(returned.sizes))
            fill_results(self.messages, stacks, sent)
        message = Message(domain.axis, sent, returned, self.messages.results)
        message.start(lambda _: None)
        return message


def stacked(messages: BucketMessages, arrived: Tensor) -> list[Tensor]:
    """The whole matrices of each stack, ``[n, rows, columns]``, from what ``arrived``; in its memory, if possible."""
    shapes = [(len(matrices), matrices[0].rows, matrices[0].columns) for matrices in messages.stacks]
    slots = messages.arriving.slots
    if all(slot.is_all for slot in slots):
        places = {slot.of: _place(arrived, slot) for slot in slots}
        return [places[number].view(shape) for number, shape in enumerate(shapes)]
    stacks = [arrived.new_empty(shape) for shape in shapes]
    for slot in slots:
        stacks[slot.of].view(slot.whole)[slot.slices].copy_(_place(arrived, slot))
    return stacks


def fill_results(messages: BucketMessages, stacks: Sequence[Tensor], memory: Tensor) -> None:
    """Write the message of results to ``memory``."""
    for slot in messages.returned.slots:
        _place(memory, slot).copy_(stacks[slot.of].view(slot.whole)[slot.slices])


def take_results(messages: BucketMessages, arrived: Tensor, results: list[Tensor | None]) -> None:
    """Write received elements to ``results``, by tensor. A shard that comes in one piece stays in that memory."""
    for slot in messages.results.slots:
        if slot.is_all:
            results[slot.of] = _place(arrived, slot)
            continue
        whole = results[slot.of]
        if whole is None:
            whole = results[slot.of] = arrived.new_empty(slot.whole)
        whole[slot.slices].copy_(_place(arrived, slot))


def _place(message: Tensor, slot: Slot) -> Tensor:
    return message.narrow(0, slot.offset, slot.numel).view(slot.shape)
