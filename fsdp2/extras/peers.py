"""Direct messages between ranks over gloo, on the CPU, in place of gloo's own all-gather and reduce-scatter.

gloo's collectives stage their data, whereas these messages are sent from and received into the tensors that compute
uses. ``register`` makes them the comm for gloo on the CPU.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fsdp2.core import Axis, _torch, comms, plans
from fsdp2.extras.exchange import highest
from fsdp2.extras.stalls import last_words

# Every comm has its own channels: even if the ranks' programs diverge, no message of one parameter group is mistaken
# for one of another group. Every rank makes its comms on a process group in the same order; else see match_channels.
_FIRST_CHANNEL = 7101  # message tags start far from 0, which user code on the same group is likely to use
_next_channel: dict[tuple[object, ...], int] = {}  # by name and ranks of the process group


def _new_channels(group: dist.ProcessGroup) -> tuple[int, int]:
    """Two new channels: one for gathers, and one for reductions."""
    first = _next_channel.get(_identity(group), _FIRST_CHANNEL)
    _next_channel[_identity(group)] = first + 2
    return first, first + 1


def match_channels(axis: Axis) -> None:
    """Make comms that are created on ``axis`` from now on match, even if the ranks created different ones before."""
    if axis.group is not None:
        mine = _next_channel.get(_identity(axis.group), _FIRST_CHANNEL)
        _next_channel[_identity(axis.group)] = highest(axis, [mine])[0]


_CHECKS = _FIRST_CHANNEL - 1
_NOTHING = torch.zeros(1, dtype=torch.uint8, device="cpu")


def check_connections(group: dist.ProcessGroup) -> None:
    """Find out, on the CPU, whether a rank of ``group`` is lost: gloo reports a closed connection when it tries to send
    a message. The message sent here is never received."""
    if _torch.backend_name(group, torch.device("cpu")) == "gloo":
        for target in range(group.size()):
            if target != group.rank():
                comms.launched(group.send, [_NOTHING], target, _CHECKS)


def _identity(group: dist.ProcessGroup) -> tuple[object, ...]:
    return (group.group_name, *dist.get_process_group_ranks(group))


class PeerComm(comms.AxisComm):
    """gloo: every rank sends its part directly to every other rank, from and to the tensors that compute uses.

    gloo's own all-gather and reduce-scatter stage their data. Measured with 2 ranks and 48 MiB in four tensors: 15 ms
    for either direction here, 24 ms for its all-gather, 35 ms for its reduce-scatter.
    Rank r adds the parts in the order r - 1, r - 2, ..., r + 1, r, so a result does not depend on where an element
    lies.

    Sends come first: a ``send`` whose receive is already known writes all its data on the calling thread, while gloo's
    own thread spins. Receives first made a step 3 to 13% longer (2 ranks, widths 256 to 1024;
    benchmarks/step/gloo_step.py).
    """

    # For smaller shards, a message costs more than the bucket's copy: with shards of 128 KiB a step took 87 ms direct
    # and 70 ms in buckets. With shards of 2 MiB both take the same time, and direct saves the bucket's memory
    # (benchmarks/step/gloo_step.py --direct-min-nbytes).
    routing = plans.Routing(direct_min_nbytes=512 * 1024)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._gather_tag, self._reduce_tag = _new_channels(group)
        # Staggered, so that no rank is the first target of all others.
        self._targets = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._sources = [(self._rank - step) % self._size for step in range(1, self._size)]

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> comms.Launch:
        sends: list[tuple[torch.Tensor, int]] = []
        receives: list[tuple[torch.Tensor, int]] = []
        own: list[torch.Tensor] = []
        for output, mine in zip(outputs, inputs, strict=True):
            slices = output.split(mine.numel())
            sends += [(mine, target) for target in self._targets]
            receives += [(slices[source], source) for source in self._sources]
            own.append(slices[self._rank])
        copy_own = comms.copies(own, inputs)

        def launch() -> Sequence[comms.Waitable]:
            messages = _Messages()
            for part, target in sends:
                messages.start(self._group.send, part, target, self._gather_tag)
            for part, source in receives:
                messages.start(self._group.recv, part, source, self._gather_tag)
            copy_own()
            return (messages,)

        return launch

    def reduce_scatter(self, *, averages: bool = False) -> comms.ReduceLaunch:
        assert not averages  # see can_average
        return self.reduce

    def reduce(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[comms.Waitable]:
        """Sum each of ``inputs`` into its output."""
        pairs = zip(outputs, inputs, strict=True)
        return [self._reduce_one(output, values) for output, values in pairs]

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Sequence[comms.Waitable]:
        """Send row r of each input to rank r. Row r of its output is what rank r has sent here."""
        messages = _Messages()
        for mine in inputs:
            for target in self._targets:
                messages.start(self._group.send, mine[target], target, self._reduce_tag)
        for output in outputs:
            for source in self._sources:
                messages.start(self._group.recv, output[source], source, self._reduce_tag)
        for output, mine in zip(outputs, inputs, strict=True):
            output[self._rank].copy_(mine[self._rank])
        return (messages,)

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        return nbytes // self._size * max(self._size - 2, 0)  # the first part arrives in the output

    def _reduce_one(self, output: torch.Tensor, values: torch.Tensor) -> comms.Waitable:
        parts = _parts(values, output.numel(), self._size)
        mine = parts[self._rank]
        if mine.numel() < output.numel():
            output[mine.numel() :].zero_()
            output = output[: mine.numel()]
        received = [output, *(torch.empty_like(output) for _ in self._sources[1:])]
        messages = _Messages()
        for target in self._targets:
            if parts[target].numel() > 0:
                messages.start(self._group.send, parts[target], target, self._reduce_tag)
        if mine.numel() > 0:
            for buffer, source in zip(received, self._sources, strict=True):
                messages.start(self._group.recv, buffer, source, self._reduce_tag)
        return _PeerSum(messages, received, mine)


_in_flight: set[_Messages] = set()


class _Messages:
    """Messages that gloo sends and receives. They stay in ``_in_flight`` until they have been waited for, even if their
    owner goes away (I17): a message without memory to arrive in blocks its connection for all later ones.
    """

    def __init__(self) -> None:
        self._works: deque[dist.Work] = deque()
        self._error: RuntimeError | None = None
        _in_flight.add(self)

    def start(self, call: Callable[..., dist.Work], tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send ``tensor``, or receive it. A failure is raised later, by ``wait``: other messages may be in flight."""
        if self._error is None:
            try:
                self._works.append(call([tensor], rank, tag))
            except RuntimeError as error:
                self._error = error

    def wait(self) -> None:
        """Wait for all messages that have not been waited for. After an interrupt, the next call waits for the rest."""
        try:
            if self._error is not None:
                raise self._error
            while self._works:
                self._works.popleft().wait()
        except RuntimeError as error:
            raise RuntimeError(f"{error}{last_words()}") from error
        _in_flight.discard(self)


class _PeerSum:
    """Messages in flight, and the sum to compute when the messages have arrived."""

    def __init__(self, messages: _Messages, received: list[torch.Tensor], mine: torch.Tensor) -> None:
        self._messages, self._received, self._mine = messages, received, mine

    def wait(self) -> None:
        self._messages.wait()
        output, *others = self._received
        for other in [*others, self._mine]:
            output.add_(other)


def _parts(values: torch.Tensor, size: int, count: int) -> list[torch.Tensor]:
    """``values`` cut into ``count`` consecutive parts of ``size``; the last ones may be short or empty."""
    total = values.numel()
    bounds = [min(i * size, total) for i in range(count + 1)]
    return [values.narrow(0, start, stop - start) for start, stop in itertools.pairwise(bounds)]
