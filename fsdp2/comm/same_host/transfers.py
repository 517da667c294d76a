"""Collectives among ranks of one host: each rank reads what it needs in the memory of the others, one copy per byte.

Through the loopback device, every byte is copied twice by the kernel, on the cores that should compute.

**Protocol.** The transfers of one comm are numbered, alike on all ranks. Tokens (``host_ranks``) carry the numbers.

1. When rank A launches a transfer, its inputs are complete. A tells all others READY, and where its inputs lie.
2. When rank B has launched the same transfer and has READY of all others, it reads their inputs. To each it says DONE
   when it reads nothing of it any more.
3. The transfer is over on A when A has read what it needs, and has DONE of all others.

**Why no byte is wrong.** No rank ever writes the memory of another. What B reads was complete before READY was sent;
the system calls that carry tokens order the memory around them. It stays as it is until A's ``wait`` returns, which is
not before the transfer is over: until then the caller owes it to any backend to neither write nor free inputs and
outputs. Should the caller forget the transfer, this room still refers to its tensors until it is over. B reads as many
bytes as A offers, since READY says how many they are, and any other number than B's own is an error. If A gives up, it
disconnects before its ``wait`` or launch raises; B says DONE, and believes what it read, only while A is connected.

**Why it ends.** A rank that has launched a transfer serves the others whatever its main thread does: if that does not
wait, the helper thread of ``host_ranks`` reads and answers. So ``wait`` depends on what other ranks launch, never on
when they wait, as with gloo. Who serves waits for no other rank. A rank that ends, dies or gives up disconnects, and
whoever still needs it gives up as well. One that hangs is given up on after the process group's timeout.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from fsdp2 import _torch
from fsdp2.comm.same_host.host_ranks import NeighbourError, Neighbours, Words
from fsdp2.comm.same_host.remote_memory import Spans
from fsdp2.comm.streams import Waitable

Launch = Callable[[], Sequence[Waitable]]

_READY, _DONE = 0, 1

# Sums are formed in pieces that stay in the cache between reading and adding. Two ranks that summed 16 MiB each at the
# same time took 3.1 ms so, 5.4 ms in pieces of 64 KiB, and 3.5 ms when all was read before adding
# (benchmarks/gloo_step.py --sum-nbytes).
SUM_NBYTES = 512 * 1024
# torch spreads larger pieces over threads, if the user allows it any: for the helper thread those would be new ones,
# beside the ones that compute.
_SERIAL_NUMEL = 32 * 1024 - 1


class _Key(NamedTuple):
    """Which transfer a token is about: on which channel, and the how manieth there."""

    channel: int
    number: int


def _keys(channel: int) -> Iterator[_Key]:
    return (_Key(channel, number) for number in itertools.count())


class _Transfer(ABC):
    """One launch, of ``inputs`` that have ``nbytes`` together, on every rank."""

    what = "a transfer"

    def __init__(self, transfers: Transfers, key: _Key, inputs: Sequence[torch.Tensor], nbytes: int) -> None:
        self.key, self.inputs, self.nbytes = key, inputs, nbytes
        self.readers = set(transfers.neighbours.others)  # who has not said DONE
        self.has_read = False
        self._transfers = transfers

    @abstractmethod
    def read(self, addresses: dict[int, Words]) -> None:
        """Read what this rank needs, given where the inputs of every other rank lie."""

    @property
    def is_over(self) -> bool:
        return self.has_read and not self.readers

    def needs(self, rank: int) -> bool:
        """Whether it cannot be over without ``rank``."""
        return not self.has_read or rank in self.readers

    def attempt(self) -> None:
        """Read, if all others have launched it, too."""
        self._transfers.attempt(self)

    def wait(self) -> None:
        """Block until the outputs are complete, and nobody reads the inputs any more.

        Raises:
            NeighbourError: that will not be, or was not within the time that the process group allows.
        """
        self._transfers.wait_for(self)


class Transfers:
    """The transfers of one process group that are not over. Private methods run for whoever serves."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self._open: dict[_Key, _Transfer] = {}
        self._ready: dict[_Key, dict[int, Words]] = {}
        neighbours.start(self._on_token, self._on_gone, self._on_failure)

    def launch(self, transfer: _Transfer) -> None:
        """Offer its inputs to the others, and take part in it from now on."""
        self._open[transfer.key] = transfer
        self.neighbours.service.add(transfer)
        if self.neighbours.failure is not None:  # asked last: who gives up later drops this transfer, too
            self._on_failure()
            raise self.neighbours.failure
        addresses = [tensor.data_ptr() for tensor in transfer.inputs]
        token = array("Q", [_READY, *transfer.key, transfer.nbytes, *addresses]).tobytes()
        for other in self.neighbours.others:
            self.neighbours.tell(other, token)

    def wait_for(self, transfer: _Transfer) -> None:
        """See ``_Transfer.wait``."""
        if not transfer.is_over:
            deadline = time.monotonic() + self.neighbours.timeout_s
            self.neighbours.service.serve_until(lambda: transfer.key not in self._open, deadline)
            if not transfer.is_over:
                with self.neighbours.service.nothing_served():
                    if not transfer.is_over:
                        raise self.neighbours.fail(self._timed_out(transfer))

    def attempt(self, transfer: _Transfer) -> None:
        """Read, if all others have launched ``transfer``, too."""
        is_open = self.neighbours.failure is None
        if is_open and len(self._ready.get(transfer.key, ())) == len(self.neighbours.others):
            self.neighbours.guard(partial(self._read, transfer, self._ready.pop(transfer.key)))

    def done(self, transfer: _Transfer, rank: int) -> None:
        """Nothing of ``rank`` is read any more, and what was read of it is right."""
        self.neighbours.check_still_there(rank)
        self.neighbours.tell_later(rank, array("Q", [_DONE, *transfer.key]).tobytes())

    def _on_token(self, rank: int, words: Words) -> None:
        key = _Key(words[1], words[2])
        transfer = self._open.get(key)
        if words[0] == _READY:
            self._ready.setdefault(key, {})[rank] = words[3:]
            if transfer is not None:
                self.attempt(transfer)
        elif transfer is not None:
            transfer.readers.discard(rank)
            self._close_if_over(transfer)

    def _read(self, transfer: _Transfer, ready: dict[int, Words]) -> None:
        for rank, (nbytes, *_) in ready.items():
            if nbytes != transfer.nbytes:
                raise NeighbourError(
                    f"{transfer.what}: rank {rank} of the process group sends {nbytes} bytes, expected "
                    f"{transfer.nbytes}, as rank {self.neighbours.rank} does. All ranks must shard the same model and "
                    "run its modules in the same order."
                )
        transfer.read({rank: words[1:] for rank, words in ready.items()})
        transfer.has_read = True
        self._close_if_over(transfer)

    def _close_if_over(self, transfer: _Transfer) -> None:
        if transfer.is_over:
            self._open.pop(transfer.key, None)
            self.neighbours.service.remove(transfer)

    def _on_gone(self, rank: int) -> None:
        """A rank that has finished may leave while others are still at what they need it no longer for."""
        if any(transfer.needs(rank) for transfer in list(self._open.values())):
            self.neighbours.fail(self.neighbours.gone[rank])

    def _on_failure(self) -> None:
        for transfer in list(self._open.values()):
            self.neighbours.service.remove(transfer)
        self._open.clear()

    def _timed_out(self, transfer: _Transfer) -> NeighbourError:
        ready = self._ready.get(transfer.key, {})
        late = sorted(transfer.readers if transfer.has_read else set(transfer.readers) - set(ready))
        found = f"ranks {late} of this process group have not {'read' if transfer.has_read else 'started'} it"
        return NeighbourError(f"{transfer.what} is not complete after {self.neighbours.timeout_s:g} s: {found}.")


class _BoundGather:
    """What all launches of one all-gather share: tensors whose memory comes and goes, and what to read of it."""

    def __init__(
        self, transfers: Transfers, keys: Iterator[_Key], outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.sizes = [mine.nbytes for mine in inputs]
        self.spans = Spans(self.sizes)
        self._transfers, self._keys = transfers, keys
        rank = transfers.neighbours.rank
        slices = [output.split(mine.numel())[rank] for output, mine in zip(outputs, inputs, strict=True)]
        copied = [(to, mine) for to, mine in zip(slices, inputs, strict=True) if to.data_ptr() != mine.data_ptr()]
        self._targets, self._sources = [to for to, _ in copied], [mine for _, mine in copied]

    def launch(self) -> Sequence[Waitable]:
        transfer = _Gather(self._transfers, next(self._keys), self)
        self._transfers.launch(transfer)
        if self._targets:
            _torch.foreach_copy(self._targets, self._sources)
        return (transfer,)


class _Gather(_Transfer):
    what = "an all-gather"

    def __init__(self, transfers: Transfers, key: _Key, bound: _BoundGather) -> None:
        super().__init__(transfers, key, bound.inputs, sum(bound.sizes))
        self._bound = bound

    def read(self, addresses: dict[int, Words]) -> None:
        outputs, sizes = [output.data_ptr() for output in self._bound.outputs], self._bound.sizes
        for rank in self._transfers.neighbours.others:
            slices = [output + rank * size for output, size in zip(outputs, sizes, strict=True)]
            self._transfers.neighbours.read(rank, self._bound.spans, slices, addresses[rank])
            self._transfers.done(self, rank)


class _Reduction(_Transfer):
    """Sums run in rank order, starting behind this rank, as in ``comm.PeerComm``: the results are the same bits."""

    what = "a reduce-scatter"

    def __init__(
        self, transfers: Transfers, key: _Key, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(transfers, key, inputs, sum(values.nbytes for values in inputs))
        self._outputs = outputs

    def read(self, addresses: dict[int, Words]) -> None:
        neighbours = self._transfers.neighbours
        with torch.no_grad():
            for i, (output, values) in enumerate(zip(self._outputs, self.inputs, strict=True)):
                self._sum(output, values, [(rank, addresses[rank][i]) for rank in neighbours.others])
        for rank in neighbours.others:
            self._transfers.done(self, rank)

    def _sum(self, output: torch.Tensor, values: torch.Tensor, sources: list[tuple[int, int]]) -> None:
        neighbours, size, total = self._transfers.neighbours, output.numel(), values.numel()
        start, stop = (min(rank * size, total) for rank in (neighbours.rank, neighbours.rank + 1))
        output[stop - start :].zero_()  # where this rank's part is short
        sums, others = (scratch.view(output.dtype) for scratch in _scratch())
        numel = min(sums.numel(), _SERIAL_NUMEL) if torch.get_num_threads() > 1 else sums.numel()
        offset = start * output.itemsize
        for out, mine in zip(output[: stop - start].split(numel), values[start:stop].split(numel), strict=True):
            sums, others = sums[: mine.numel()], others[: mine.numel()]
            for i, (rank, address) in enumerate(sources):
                neighbours.read_piece(rank, (others if i else sums).data_ptr(), address + offset, mine.nbytes)
                if i:
                    sums.add_(others)
            torch.add(sums, mine, out=out)
            offset += mine.nbytes


@cache
def _scratch() -> tuple[torch.Tensor, torch.Tensor]:
    """Where the pieces to add are kept; only one thread serves at a time."""
    with torch.inference_mode(False):
        return torch.empty(SUM_NBYTES, dtype=torch.uint8), torch.empty(SUM_NBYTES, dtype=torch.uint8)


class SameHostComm:
    """gloo on the CPU, where all ranks of the process group are on one host and may read each other."""

    # A tensor more costs little to gather, but the reduction some calls for each. On 2 ranks, shards of 8 KiB took
    # 31 ms a step direct and 22 to 25 ms in buckets; shards of 128 KiB 42 ms direct and 46 ms in buckets
    # (benchmarks/gloo_step.py --direct-min-nbytes).
    direct_min_nbytes = 16 * 1024
    reduces_uneven = True
    splits = True

    def __init__(self, transfers: Transfers, gathers: int, reductions: int) -> None:
        """``gathers``, ``reductions``: their channels, the same numbers on all ranks."""
        self._transfers = transfers
        self._gathers, self._reductions = _keys(gathers), _keys(reductions)

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Launch:
        return _BoundGather(self._transfers, self._gathers, outputs, inputs).launch if outputs else tuple

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Sequence[Waitable]:
        values = [tensor.contiguous() for tensor in inputs]
        transfer = _Reduction(self._transfers, next(self._reductions), outputs, values)
        self._transfers.launch(transfer)
        return (transfer,)

    def gather_buffer_nbytes(self, nbytes: int) -> int:
        return 0

    def reduce_buffer_nbytes(self, nbytes: int) -> int:
        return 0  # what ``_scratch`` takes it takes once, however much is reduced
