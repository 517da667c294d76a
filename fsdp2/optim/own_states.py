"""States that an optimizer loads itself, since torch would cast them to the dtype of their parameter.

torch would also move them to the parameter's device. Rule: a state that was saved and loaded is saved again unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn, optim

States = dict[nn.Parameter, dict[str, Any]]  # by parameter and name


@contextmanager
def loading_itself(
    optimizer: optim.Optimizer,
    is_own: Callable[[nn.Parameter, str], bool],
    check: Callable[[States], None],
    fill: Callable[[States], None],
) -> Iterator[None]:
    """In the block, torch's ``load_state_dict`` of ``optimizer`` leaves out the states for whose parameters and names
    ``is_own`` is true: ``check`` gets them before anything is loaded, and ``fill`` after the rest has been loaded.

    User hooks run before ``check``, whose input they may change, and after ``fill``.
    """
    found: States = {}

    def take(_: optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        saved = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        owners = dict(zip(saved, params, strict=False))  # torch refuses a different number of parameters
        states: Mapping[Any, Any] = given["state"]
        others: dict[Any, Mapping[str, Any]] = dict(states)
        for key, state in states.items():
            if (param := owners.get(key)) is not None:
                found[param] = {name: value for name, value in state.items() if is_own(param, name)}
                others[key] = {name: value for name, value in state.items() if name not in found[param]}
        check(found)
        return {**given, "state": others}

    hooks = (
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(lambda _: fill(found), prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
