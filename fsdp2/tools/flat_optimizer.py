"""Element-wise optimizers that step flat memory: a few long tensors instead of many small DTensors.

``flatten_optimizer`` gives an optimizer a class of its own, derived from the one it has. Its ``step`` puts runs of
neighbouring parameters (``runs.py``) in the place of the parameters, has the optimizer's own step update those, and
brings what that has made back to the parameters. Between steps the optimizer is what it was: param groups, states,
hooks and state dicts are per parameter.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import optim

from fsdp2 import _torch
from fsdp2.group.shards import flat_buffers
from fsdp2.tools.flat_groups import FlatParams

# Their update of an element depends on that element's values alone; tests compare each with its unflattened self. What
# derives from them may do anything.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)

_O = TypeVar("_O", bound=optim.Optimizer)


def flatten_optimizer(optimizer: _O, *, is_elementwise: bool = False) -> _O:
    """Have ``optimizer`` step parameters that are neighbours in memory as one tensor, in place.

    The shards of a ``fully_shard`` group lie behind each other, and so do their gradients. So an element-wise optimizer
    can step a whole group as one flat tensor, where it would else step each DTensor on its own. Values, ``state_dict``,
    ``param_groups``, hooks, schedulers and checkpoints are those of the optimizer as it was, in either direction; bit
    for bit, but for ``fused=True`` on the CPU, whose kernel rounds the last elements of a tensor differently.

    Whatever is not in flat memory is stepped all the same: gradients of your own are copied if they are small,
    other shards are stepped on their own, plain parameters and tensor subclasses by the optimizer as before. A
    parameter without a gradient is left alone, as usual. Nothing is communicated.

    Args:
        optimizer: of ``torch.optim``: SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop, ASGD.
            Before any learning rate scheduler is made for it.
        is_elementwise: vouch that another optimizer, or one derived from these, updates each element by that element's
            value, gradient and states alone, in a step that reads ``param_groups``, ``.grad`` and ``state``.

    Returns:
        ``optimizer``, the same object. Its class has become ``Flat...``, derived from the class it had.

    Raises:
        TypeError: ``optimizer`` is none of torch's.
        ValueError: it is not known to be element-wise, is differentiable, or its ``step`` has been replaced.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"flatten_optimizer: got a {type(optimizer).__name__}, expected a torch.optim.Optimizer. "
            "Pass the optimizer that it wraps, if it wraps one."
        )
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    _check(optimizer, is_elementwise)
    optimizer.__class__ = _flat_class(type(optimizer))  # type: ignore[assignment, arg-type]
    return optimizer


def _check(optimizer: optim.Optimizer, is_elementwise: bool) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE and not is_elementwise:
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        raise ValueError(
            f"flatten_optimizer: {name} is not known to be element-wise; these are: {known}. If its update of an "
            "element depends on that element's value, gradient and states alone, pass is_elementwise=True. If it "
            "depends on the shape of a parameter, or on norms, use the optimizer as it is."
        )
    if optimizer.defaults.get("differentiable") or any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"flatten_optimizer: this {name} has differentiable=True, and its states are written in place. "
            "Use the optimizer as it is."
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"flatten_optimizer: the step of this {name} has been replaced, as learning rate schedulers do, and would "
            "bypass the flat one. Call flatten_optimizer first, then make the scheduler."
        )


@functools.cache
def _flat_class(cls: type[optim.Optimizer]) -> type[FlatOptimizer]:
    body = {"__module__": __name__, "__doc__": FlatOptimizer.__doc__, "_step_as_before": _torch.unhooked_step(cls)}
    return type(f"Flat{cls.__name__}", (FlatOptimizer, cls), body)


class FlatOptimizer(optim.Optimizer):
    """An optimizer that ``flatten_optimizer`` has changed."""

    _params: FlatParams | None = None
    _step_as_before: Callable[[], Any]

    @_torch.hooked_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what ``closure`` does, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step_flat()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what ``load_state_dict`` ends with: the states that were replaced must not live on here."""
        self._params = None
        super().__setstate__(state)

    def _step_flat(self) -> None:
        params, self._params = self._params, None  # after an exception, the states tell what was done
        if params is None or not params.are_those_of(self.param_groups):
            params = FlatParams(self.param_groups, flat_buffers(), [] if params is None else params.slabs())
        for segment in params.segments:
            segment.take_gradients(self.state)
        others = params.one_by_one()
        new = [param for found in others for param in found if param not in self.state]
        with self._runs_for_params(params, others) as state:
            self._step_as_before()
        params.hand_back(self.state, {param: state[param] for param in new if param in state})
        self._params = params

    @contextmanager
    def _runs_for_params(
        self, params: FlatParams, others: list[list[torch.Tensor]]
    ) -> Iterator[dict[torch.Tensor, Any]]:
        """Have the optimizer see runs in place of the parameters in them, next to the ``others`` of each param group.
        Gives the states of what it sees."""
        groups, outer = self.param_groups, self.state
        lists = [group["params"] for group in groups]
        runs: list[list[torch.Tensor]] = [[] for _ in groups]
        inner: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for segment in params.segments:
            for run in segment.runs:
                runs[segment.group].append(run.flat)
                inner[run.flat] = run.state
        inner.update((param, outer[param]) for found in others for param in found if param in outer)
        self.param_groups, self.state = [], inner
        try:
            for group, mine, found in zip(groups, runs, others, strict=True):
                if mine and found:  # not in one launch: plain tensors and DTensors do not mix
                    self.param_groups.append({**group, "params": found})
                if mine or found:
                    group["params"] = mine or found
                    self.param_groups.append(group)  # itself: an optimizer may keep values of its own in it
            yield inner
        finally:
            for group, mine in zip(groups, lists, strict=True):
                group["params"] = mine
            self.param_groups, self.state = groups, outer
