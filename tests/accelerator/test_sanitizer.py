"""torch's own race detector, ``torch.cuda._sanitizer``, agrees that streams order all accesses to memory.

Its bookkeeping needs no CUDA. The simulated device tells it of every operation, collective, allocation, event and wait,
in the order in which the host asks for them. The clocks of ``tests/distributed/test_stream_order.py`` answer the same
question for one process without a device, and with code of our own.

Unlike torch, which tells memory apart by the addresses of tensors and forgets it when it is freed:

- Tensors in one allocation count as one. So a wait that is missing between views shows, too.
- To allocate is to write: the new memory, and all that was freed on the stream. So reuse that comes too early shows.

Not seen: what the CPU does to memory of its own, so no wait of the CPU for copies; and two streams that rightly use
different parts of one allocation would be reported. No case has any.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
from torch.cuda import _sanitizer

from tests.accelerator import device
from tests.accelerator.cases import CASES, mesh_of, names, run
from tests.accelerator.support import on_device
from tests.accelerator.test_left_out_waits import UNSEEN, UNSEEN_OF_4, WAITS, WAITS_OF_4, Wait, leaving_out
from tests.harness.distributed import RankContext
from tests.harness.races import caller
from tests.harness.runtimes import subject
from tests.harness.selection import long

# Without them, a launch takes a tenth of the time.
_NO_STACK_TRACES = SimpleNamespace(
    walk_stack=lambda frame: [], StackSummary=SimpleNamespace(extract=lambda frames, lookup_lines: [])
)


class Sanitizer:
    """Hands what it is told to ``torch.cuda._sanitizer``.

    Attributes:
        found: the races, each once.
        num_launches: how many operations and collectives it was told of.
    """

    def __init__(self) -> None:
        handler = self._handler = _sanitizer.EventHandler()
        self.found: dict[str, None] = {}
        self.num_launches = 0
        self.record_event = handler._handle_event_record
        self.wait_event = handler._handle_event_wait
        self.synchronize_event = handler._handle_event_synchronization
        self.synchronize_stream = handler._handle_stream_synchronization
        self.synchronize = handler._handle_device_synchronization

    def launch(self, name: str, stream: int, read: set[int], written: set[int]) -> None:
        self.num_launches += 1
        self._access(name, stream, read - written, written)

    def allocate(self, address: int, stream: int, freed: set[int]) -> None:
        self._access("allocation", stream, set(), freed)
        for each in freed:
            self._handler._handle_memory_deallocation(each)
        self._handler._handle_memory_allocation(address)
        self._access("allocation", stream, set(), {address})

    def _access(self, name: str, stream: int, read: set[int], written: set[int]) -> None:
        handle, what = self._handler._handle_kernel_launch, name + caller()
        for error in handle(stream, read, written, set(), what, defaultdict(list)):
            assert isinstance(error, _sanitizer.UnsynchronizedAccessError)
            accesses = error.current_access, error.previous_access
            texts = [f"{each.operator} on stream {each.stream}, {each.type} it" for each in accesses]
            self.found[" does not wait for ".join(texts)] = None


def sanitized(ctx: RankContext, name: str) -> Sanitizer:
    """Train the case ``name`` under the eyes of a sanitizer."""
    device.load().drain()
    sanitizer = Sanitizer()
    with pytest.MonkeyPatch.context() as patch, device.traced(sanitizer):
        patch.setattr(_sanitizer, "traceback", _NO_STACK_TRACES)
        run(CASES[name], mesh_of(ctx, name), subject())
    return sanitizer


def check(ctx: RankContext, name: str) -> None:
    sanitizer = sanitized(ctx, name)
    assert sanitizer.num_launches > 100
    assert not sanitizer.found, "\n".join(sanitizer.found)


_SHORT = ["plain", "bf16 reduced in fp32", "replicated only", "offloaded", "optimizer's event"]
_REST = [param.values[0] for param in names(2) if param.values[0] not in _SHORT]


@pytest.mark.parametrize("name", [*_SHORT, *long(*_REST)])
@on_device(2)
def test_sanitizer_finds_all_accesses_ordered(ctx: RankContext, name: str) -> None:
    check(ctx, name)


@pytest.mark.parametrize("name", names(4))
@on_device(4)
def test_sanitizer_finds_all_accesses_ordered_on_4_ranks(ctx: RankContext, name: str) -> None:
    check(ctx, name)


# The tests above can fail


def check_without(ctx: RankContext, wait: Wait) -> None:
    times: list[None] = []
    with leaving_out(wait, times):
        sanitizer = sanitized(ctx, wait.case)
    assert times, f"{wait.case} never comes to {wait}"
    assert sanitizer.found


# For copies, the CPU waits. What rank checks compare decides what a rank does next: without the wait, ranks may hang.
_OF_STREAMS = [wait for wait in WAITS if not wait.place.startswith(("comm.offload.", "extras.rank_checks."))]


@pytest.mark.parametrize("wait", [*UNSEEN, *_OF_STREAMS[:3], *long(*_OF_STREAMS[3:])], ids=str)
@on_device(2)
def test_sanitizer_notices_a_wait_that_is_left_out(ctx: RankContext, wait: Wait) -> None:
    check_without(ctx, wait)


@pytest.mark.parametrize("wait", [*UNSEEN_OF_4, *WAITS_OF_4], ids=str)
@on_device(4)
def test_sanitizer_notices_a_wait_that_is_left_out_on_4_ranks(ctx: RankContext, wait: Wait) -> None:
    check_without(ctx, wait)
