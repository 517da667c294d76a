"""The simulated accelerator as a torch device, ``"sim"``: registers ``device.cpp``, and ``torch.sim`` in front of it.

**Asynchrony.** Every operation is put into a queue per stream; a worker thread runs the queues while the host waits
for the device, and only as far as it waits for. That is simpler than a thread per stream with delays, and stronger:
whatever no event orders can run in any order, however far apart it was enqueued, and one seed gives one order. It takes
the shapes of results before there are results: torch's meta kernels know them. An operation without one drains the
device and is noted (``ran_at_once``); no test of training has any. The other way is that operations run at once, beside
the vector clocks of ``tests/harness/races.py``, which see an order that is missing, but no wrong value.

**Left-out waits show as values.** Freed memory is filled with NaN in the order of its stream, and so are outputs of
collectives that have not arrived. A stream that does not wait reads NaN, or what was there before.

Load it only in processes of their own (``support.on_device``): a process has one accelerator, for good.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.harness.cpp import build
from tests.harness.races import caller

DEVICE = "sim"
NAME = "simulated_device"  # of the compiled module
SOURCE = Path(__file__).with_name("device.cpp")

IN_HOST_THREAD = " in the thread of HostAdamW"
host_syncs: list[str] = []  # what made the host wait, and where in fsdp2, since the list was cleared last


@functools.cache
def load() -> Any:
    """Register the device with torch, once per process; returns the compiled module."""
    spec: Any = importlib.util.spec_from_file_location(NAME, build(NAME, SOURCE))
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _module(extension))
    extension.init()
    torch.utils.generate_methods_for_privateuse1_backend()
    # torch's own fully_shard moves modules to the device; their parameters must be replaced, not changed through .data
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    extension.on_sync(lambda what: host_syncs.append(what + caller() + _thread()))
    return extension


def _thread() -> str:
    """Of this thread, if it is one that only steps on the host: it is there to wait."""
    return IN_HOST_THREAD if threading.current_thread().name.startswith("HostAdamW") else ""


def schedule(seed: int = 0, *, late: Sequence[str] = (), first: str = "random") -> None:
    """How streams go on from here on.

    Args:
        seed: of what is drawn.
        late: kinds of operations that run when nothing else can: "all-gather", "reduce-scatter", "all-reduce", "copy"
            (from and to the host).
        first: "compute" or "side": the default stream, or the others, go on as long as they can; "random" draws.
    """
    load().schedule(seed, set(late), first)


@contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """What makes the host wait for the device inside the block."""
    host_syncs.clear()
    found: list[str] = []
    try:
        yield found
    finally:
        found += host_syncs


@contextmanager
def captured() -> Iterator[list[str]]:
    """What CUDA would refuse inside the block, or leave out of the graph, if the current stream were captured there.
    The device runs all of it, as always."""
    found: list[str] = []
    load().begin_capture(lambda what: found.append(what + caller()))
    try:
        yield found
    finally:
        load().end_capture()


@contextmanager
def on_launch(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` for all that the device is asked for inside the block, by name: operations (``"aten::copy_"``),
    collectives (``"all-gather"``), and waits of one stream for another (``"wait"``). As on CUDA, an operation on a list
    of tensors that lie alike is one, and so is a coalesced collective; views, memory and events are none.
    """
    load().on_launch(note)
    try:
        yield
    finally:
        load().on_launch(None)


@contextmanager
def _on(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """``stream`` is the current one inside; None changes nothing."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(before if stream is None else stream)
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(before)


def _module(extension: Any) -> types.ModuleType:
    """What ``torch.cuda`` is to CUDA."""
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device=None: None
    module.device = nullcontext  # there is one
    module.manual_seed = module.manual_seed_all = lambda seed: None  # draws are the host's
    module.initial_seed = torch.initial_seed
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.Stream = lambda device=None, priority=0: torch.Stream(device=DEVICE, priority=priority)
    module.Event = lambda enable_timing=False, **kwargs: torch.Event(device=DEVICE, enable_timing=enable_timing)
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=20)
    module.set_stream = torch.accelerator.set_stream
    module.stream = module.StreamContext = _on
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.memory_allocated = lambda device=None: extension.memory_allocated()
    module.max_memory_allocated = lambda device=None: extension.max_memory_allocated()
    module.max_memory_reserved = lambda device=None: extension.max_memory_reserved()
    module.reset_peak_memory_stats = lambda device=None: extension.reset_peak_memory()
    module.empty_cache = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
