"""One step of some parameters of a unit on the host: gradients arrive, AdamW runs in a thread, results are sent back.

The training thread enqueues copies to the host and continues. The host's thread waits for these copies, steps, and
enqueues copies back. No other code may read or write a job's tensors before ``HostUnit.wait``, which also makes the
device wait. Each stream wait states producer, consumer and reason.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fsdp2.core import ParamGroup, ScheduleError, _torch, comms
from fsdp2.extras import torch_names
from fsdp2.optim.host_adamw.memory import HostParam, make_staging, take_over

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MASTER = "master"  # a state of shards with lower precision than their master


class Options(NamedTuple):
    """Options for the step of one parameter, as they were when its gradient became ready."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool

    @staticmethod
    def of(group: Mapping[str, Any]) -> Options:
        beta1, beta2 = map(float, group["betas"])
        as_they_are = (group[name] for name in ("eps", "weight_decay", "amsgrad", "maximize"))
        return Options(float(group["lr"]), beta1, beta2, *as_they_are)


@contextmanager
def _copying_out(streams: comms.Streams) -> Iterator[None]:
    """Inside the block, copies to the host may read what the current stream has produced."""
    made = streams.record()
    with streams.beside("copy to host"):
        streams.wait_here(made)  # copy-out waits for the current stream: it reads what that stream produced
        yield


class Factor:
    """The factor for gradients: ``value``, a 0-dim tensor on the device that is being copied to the host."""

    def __init__(self, value: Tensor, streams: comms.Streams) -> None:
        self._streams = streams
        self._host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=value.device.type != "cpu")
        with _copying_out(streams):
            self._host.copy_(value, non_blocking=True)
            self._copied = streams.record()
        self._source: Tensor | None = value

    def arrived(self) -> Tensor:
        """The value on the host. The calling thread waits for it."""
        self._streams.wait_on_cpu(self._copied)  # this thread reads what was copied
        self._source = None
        return self._host


class _Step(NamedTuple):
    """A job's work for one parameter. ``target`` is the memory of its shard, and also the ``master`` if nothing is
    copied through ``staged``. ``is_read`` means that the master first takes the values of the shard."""

    target: Tensor
    master: Tensor
    gradient: Tensor
    state: dict[str, Any]
    options: Options
    staged: Tensor | None
    is_read: bool


class Job:
    """A step of parameters whose gradients are ready on the current stream. Copies to the host start here. With
    ``keeps_gradients``, other code still reads gradients that are on the host, so they are not scaled in place."""

    def __init__(
        self,
        params: Sequence[HostParam],
        states: Sequence[dict[str, Any]],
        options: Sequence[Options],
        streams: comms.Streams,
        *,
        keeps_gradients: bool,
    ) -> None:
        found = torch_names.grads_of([each.param for each in params])
        grads = [_torch.local_of(each) for each in found if each is not None]
        make_staging(params, grads)
        self._streams, self._keeps_gradients = streams, keeps_gradients
        self._sources: list[Tensor] = []  # on the device, until they have been copied
        self._steps: list[_Step] = []
        copies = any(grad.device.type != "cpu" for grad in grads)
        with _copying_out(streams), comms.observed(comms.Activity.COPY_TO_HOST) if copies else nullcontext():
            for each, grad, state, option in zip(params, grads, states, options, strict=True):
                self._steps.append(self._step(each, grad, state, option))
            self._copied = streams.record()

    def _step(self, param: HostParam, grad: Tensor, state: dict[str, Any], options: Options) -> _Step:
        target, staged = param.target(), param.staged
        if param.is_own_master or staged is None or param.gradient is None:
            return _Step(target, target, grad, state, options, None, is_read=False)
        is_read = param.take_changes()
        if is_read:
            staged.copy_(target, non_blocking=True)
        if grad.device.type != "cpu":
            param.gradient.copy_(grad, non_blocking=True)
            self._sources.append(grad)
            grad = param.gradient
        master = _torch.local_of(state[MASTER]) if param.is_narrow else staged
        return _Step(target, master, grad, state, options, staged, is_read)

    @torch.no_grad()
    def run(self, factor: Factor | None, unit: str) -> torch.Event | None:
        """Step ``unit`` on the host's thread. Returns the event that marks that the shards have the results."""
        self._streams.wait_on_cpu(self._copied)  # this thread reads what was copied
        self._sources.clear()
        for step in self._steps:
            if step.is_read and step.staged is not None:
                take_over(step.master, step.staged)
        scale = None if factor is None else factor.arrived()
        tell, start = _Observer.on_step, time.perf_counter()
        for options in dict.fromkeys(step.options for step in self._steps):
            steps = [step for step in self._steps if step.options == options]
            grads = [step.gradient.to(step.master.dtype) for step in steps]
            if scale is not None and self._keeps_gradients:
                grads = [grad * scale for grad in grads]
            elif scale is not None:
                torch_names.foreach_mul(grads, scale)
            _run_adamw(steps, grads, options)
        if tell is not None:
            tell(unit, start, time.perf_counter())
        with self._streams.beside("copy back"):
            for step in self._steps:
                if step.staged is not None:
                    step.staged.copy_(step.master)  # a no-op if they are the same tensor
                    step.target.copy_(step.staged, non_blocking=True)
            return self._streams.record()


def _run_adamw(steps: Sequence[_Step], grads: list[Tensor], options: Options) -> None:
    masters = [step.master for step in steps]
    averages, squares, maxima = [
        [_torch.local_of(step.state[name]) for step in steps if name in step.state] for name in MOMENTS
    ]
    counts = [step.state["step"] for step in steps]
    adamw(masters, grads, averages, squares, maxima, counts, fused=True, **options._asdict())


OnHostStep = Callable[[str, float, float], None]


class _Observer:
    on_step: OnHostStep | None = None


def observe_host_steps(on_step: OnHostStep | None) -> None:
    """Call ``on_step`` on the host's thread with each unit's name and the begin and end of its step, in seconds of
    ``time.perf_counter``; None stops this. A step begins when the gradients are on the host."""
    _Observer.on_step = on_step


class HostUnit:
    """The parameters of one unit, or of none, that the host steps, at most one job at a time.

    Attributes:
        is_begun: a backward has begun the step of the unit, and ``step`` has not ended it yet.
    """

    def __init__(self, group: ParamGroup | None, streams: comms.Streams) -> None:
        self.name, self.streams = "(none)" if group is None else group.name, streams
        self._group = None if group is None else weakref.ref(group)
        self._running: Future[torch.Event | None] | None = None
        self.is_begun = False

    def start(self, job: Job, factor: Factor | None, thread: Executor) -> None:
        """Run ``job`` on the host's ``thread``."""
        self._running = thread.submit(job.run, factor, self.name)

    def wait(self, *_: object) -> None:
        """Block this thread until the host has stepped, and let the current stream wait for the results. As a hook of
        state dicts, it ignores the arguments.

        Raises:
            RuntimeError: the step has failed.
        """
        self.streams.wait_here(self._joined())  # compute waits for copy-back: it reads and writes the shards

    def wait_before_gather(self) -> None:
        """Like ``wait``, for streams that read the shards in an all-gather of the unit.

        Raises:
            ScheduleError: a backward asks, after an earlier one: the values that its forward read may be gone.
        """
        group = None if self._group is None else self._group()
        if self.is_begun and group is not None and group.running == "backward":
            raise ScheduleError(
                f"HostAdamW: a backward reads the parameters of unit '{self.name}' after an earlier one has begun "
                "their step. Call step() after each backward; or, if gradients of several backwards add up, call "
                "set_is_last_backward(False) on the root of each but the last, or do not reduce in them (no_sync). "
                "A reentrant checkpoint runs backwards of its own: pass use_reentrant=False to it."
            )
        event = self._joined()
        if event is None:
            return
        self.streams.gather_after(event)  # gather stream waits for copy-back: it reads the shards
        if group is not None and group.gathers_on_compute:
            self.streams.wait_here(event)  # compute waits for copy-back: it reads the shards itself

    def drop(self) -> None:
        """Wait for a step whose result is no longer needed."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()

    def _joined(self) -> torch.Event | None:
        """Wait for the host. Returns the event that marks that the shards have the results."""
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            return running.result()
        except Exception as error:
            raise RuntimeError(
                f"HostAdamW: the step of unit '{self.name}' failed on this rank: {type(error).__name__}: {error}. Its "
                "parameters may have been stepped in part: go on from a checkpoint. Other ranks do not know; they fail "
                "at their next collective with this rank."
            ) from error
