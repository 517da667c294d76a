"""One interface for CUDA streams and for the CPU, where collectives run on threads of the process group.

On an accelerator, gathers and reductions are enqueued on their own streams, and "wait" makes the compute stream wait:
the CPU never blocks, except for copies from and to the host (I12). On the CPU, a collective returns a ``Work``, and
"wait" blocks this thread until it is done; there are no streams, and every event is ``None``.

Each stream wait below states its producer, consumer and reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cached_property
from typing import ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from fsdp2.core.types import CommunicationError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_HERE = nullcontext()
_MAX_RANKS = 16  # that a message names
_NO_CPU_MEMORY = "DefaultCPUAllocator"  # in the text of torch's error


class Waitable(Protocol):
    """Anything whose completion can be awaited once: a ``dist.Work``, or a chain of them."""

    def wait(self) -> object: ...


class Activity(Enum):
    """The activities that measuring tools can observe here."""

    WAIT = "this thread waits for collectives"
    COPY_TO_DEVICE = "shards are copied from the host"
    COPY_TO_HOST = "gradients are copied to the host"


class _Process:
    """Whether this process waits for collectives that it has launched, and the callback for activities."""

    is_waiting = False
    on_activity: Callable[[Activity, bool], None] | None = None


def observe_activities(on_activity: Callable[[Activity, bool], None] | None) -> None:
    """Call ``on_activity`` with True before and with False after each activity; None ends this. On an accelerator,
    waits and copies are only enqueued on the current stream."""
    _Process.on_activity = on_activity


@contextmanager
def observed(activity: Activity) -> Iterator[None]:
    """Report the block as ``activity``."""
    tell = _Process.on_activity
    if tell is not None:
        tell(activity, True)
    yield
    if tell is not None:
        tell(activity, False)


@contextmanager
def waiting() -> Iterator[None]:
    """In the block, this thread waits for collectives by other means than ``wait_for``."""
    _Process.is_waiting = True
    try:
        yield
    finally:
        _Process.is_waiting = False


def wait_for(works: Sequence[Waitable], on_lost: Callable[[], None] | None = None) -> None:
    """Wait for collectives. If one fails, call ``on_lost``: others may still read and write their memory.

    Raises:
        CommunicationError: one of them failed.
    """
    if not works:
        return
    tell = _Process.on_activity
    _Process.is_waiting = True
    try:  # like launched(), but saves a call
        if tell is not None:
            tell(Activity.WAIT, True)
        for work in works:
            work.wait()
        if tell is not None:
            tell(Activity.WAIT, False)
    except RuntimeError as error:
        if not is_of_backend(error):
            raise
        if on_lost is not None:
            on_lost()
        raise CommunicationError(str(error)) from error
    finally:
        _Process.is_waiting = False


def launched(launch: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call ``launch``, which starts collectives or runs them, and return its result.

    Raises:
        CommunicationError: the backend refused or failed one of them.
    """
    try:
        return launch(*args, **kwargs)
    except RuntimeError as error:
        if is_of_backend(error):
            raise CommunicationError(str(error)) from error
        raise


def is_of_backend(error: RuntimeError) -> bool:
    """Whether ``error``, which the call of a collective has raised, comes from the backend. gloo has no error class of
    its own. Other subclasses of ``RuntimeError`` have other causes; the CPU's allocator is known only by its text."""
    is_plain = type(error) is RuntimeError and _NO_CPU_MEMORY not in str(error)
    return is_plain or isinstance(error, dist.DistError)


def lost(what: str, error: CommunicationError, story: str, groups: Iterable[dist.ProcessGroup]) -> CommunicationError:
    """``error`` of ``what``, with the recent events of this rank, and the ranks that may be lost: backends name an
    address at best. ``groups``: the process groups used for the communication."""
    rank = dist.get_rank()
    others = sorted({other for group in groups for other in dist.get_process_group_ranks(group)} - {rank})
    named = ", ".join(map(str, others[:_MAX_RANKS]))
    if len(others) > _MAX_RANKS:
        named += f" and {len(others) - _MAX_RANKS} more"
    return CommunicationError(
        f"{what} failed on rank {rank}: {error}\n"
        f"It was waiting for {'rank' if len(others) == 1 else 'ranks'} {named}. A rank that ended, or that reports no "
        "error, is lost.\n"
        f"Last events on rank {rank}: {story}.\n"
        "Compare the last events of all ranks: the ranks diverged at the first difference."
    )


class Streams:
    """The implementation for the CPU, without streams. Also the interface that :class:`AcceleratorStreams` implements.

    Attributes:
        runs_ahead: whether this thread continues before the work that it has enqueued is done.
        gathers_are_async: whether the backend runs all-gathers concurrently with the stream that issues them.
        on_gather, on_reduce: context managers; work in their blocks runs on the stream of all-gathers, or on that of
            gradient reductions.
    """

    runs_ahead = False
    gathers_are_async = True
    on_gather: AbstractContextManager[object] = _HERE
    on_reduce: AbstractContextManager[object] = _HERE

    @property
    def gathering_on_compute(self) -> Streams:
        """The streams for groups that gather on the compute stream. The CPU has no streams."""
        return self

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Run the block on the user's ``stream``, in order with the work on the current one; None means the latter."""
        return _HERE

    def beside(self, purpose: str) -> AbstractContextManager[object]:
        """Run the block on a separate stream for ``purpose``. Tools use this to copy to the host and back."""
        return _HERE

    def record(self) -> torch.Event | None:
        """Mark this point of the current stream."""
        return None

    def wait_here(self, event: torch.Event | None) -> None:
        """The current stream waits for ``event``."""

    def wait_on_cpu(self, event: torch.Event | None) -> None:
        """The CPU waits for ``event``: it will read what was copied to the host, or write what was copied from it."""

    def is_idle(self) -> bool:
        """Whether nothing waits for collectives: all that were enqueued are done, or, on the CPU, this process is not
        waiting for any. Other threads may call this."""
        return not _Process.is_waiting

    def gather_after_compute(self) -> None:
        """Gather stream waits for compute, which has written the shards, or other data that hooks read, or has read the
        memory that is released."""

    def gather_after(self, event: torch.Event) -> None:
        """Gather stream waits for ``event``, which marks when the shards were written."""

    def reduce_after_compute(self) -> None:
        """Reduce stream waits for compute, which has written gradients and read the memory of gradients freed since."""

    def compute_after_reduce(self) -> None:
        """Compute waits for all work on the reduce stream, since the optimizer reads the gradients."""


class AcceleratorStreams(Streams):
    """CUDA and similar devices. There is one gather stream and one reduce stream for the whole model, both of high
    priority, so that the small copies around a collective do not queue behind large compute kernels."""

    runs_ahead = True
    gathers_are_async = False

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = torch.get_device_module(device), device
        self._gather = self._module.Stream(device=device, priority=-1)
        self._reduce = self._module.Stream(device=device, priority=-1)
        self._others: dict[str, torch.Stream] = {}

    @cached_property
    def gathering_on_compute(self) -> Streams:
        return ComputeStreamGathers(self)

    @property
    def on_gather(self) -> AbstractContextManager[object]:  # type: ignore[override]
        return self._module.stream(self._gather)

    @property
    def on_reduce(self) -> AbstractContextManager[object]:  # type: ignore[override]
        return self._module.stream(self._reduce)

    def beside(self, purpose: str) -> AbstractContextManager[object]:
        if purpose not in self._others:
            self._others[purpose] = self._module.Stream(device=self._device)
        return self._module.stream(self._others[purpose])

    @contextmanager
    def on(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        current = self._module.current_stream()
        stream.wait_stream(current)  # user's stream waits for the current one: it reads data written there
        try:
            with self._module.stream(stream):
                yield
        finally:
            current.wait_stream(stream)  # the current stream waits for the user's: it uses the result

    def record(self) -> torch.Event | None:
        return self._module.current_stream().record_event()

    def wait_here(self, event: torch.Event | None) -> None:
        if event is not None:
            self._module.current_stream().wait_event(event)

    def wait_on_cpu(self, event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def is_idle(self) -> bool:
        try:
            return self._gather.query() and self._reduce.query()
        except RuntimeError:  # the device has failed
            return False

    def gather_after_compute(self) -> None:
        self._gather.wait_stream(self._module.current_stream())

    def gather_after(self, event: torch.Event) -> None:
        self._gather.wait_event(event)

    def reduce_after_compute(self) -> None:
        self._reduce.wait_stream(self._module.current_stream())

    def compute_after_reduce(self) -> None:
        self._module.current_stream().wait_stream(self._reduce)


class ComputeStreamGathers(AcceleratorStreams):
    """Gathers without their own stream: memory is allocated and filled on the compute stream, the backend runs the
    collective concurrently, and the compute stream waits for that where the data is needed."""

    gathers_are_async = True

    def __init__(self, shared: AcceleratorStreams) -> None:
        self._module, self._device, self._others = shared._module, shared._device, shared._others
        self._gather, self._reduce = shared._gather, shared._reduce

    on_gather = _HERE

    def gather_after_compute(self) -> None:
        """Nothing to wait for, since gathers run on the compute stream."""


_streams: dict[torch.device, Streams] = {}


def streams_for(device: torch.device) -> Streams:
    """The streams of ``device``; the same for all models of the process, so that their gathers queue behind each other
    and any of them can reuse freed memory."""
    if device not in _streams:
        _streams[device] = Streams() if device.type == "cpu" else AcceleratorStreams(device)
    return _streams[device]
