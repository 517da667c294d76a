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
    is_own: Callable[[str], bool],
    check: Callable[[States], None],
    fill: Callable[[States], None],
) -> Iterator[None]:
    """In the block, torch's ``load_state_dict`` of ``optimizer`` leaves out the states for whose names ``is_own`` is
    true: ``check`` gets them before anything is loaded, and ``fill`` after the rest has been loaded.

    User hooks run before ``check``, whose input they may change, and after ``fill``.
    """
    found: States = {}

    def take(_: optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        saved = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        owners = dict(zip(saved, params, strict=False))  # torch refuses a different number of parameters
        states: Mapping[Any, Any] = given["state"]
        found.update((owners[key], _chosen(state, is_own)) for key, state in states.items() if key in owners)
        check(found)
        return {
            **given,
            "state": {
                key: _chosen(state, lambda name: not is_own(name)) if key in owners else state
                for key, state in states.items()
            },
        }

    hooks = (
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(lambda _: fill(found), prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _chosen(state: Mapping[str, Any], is_chosen: Callable[[str], bool]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if is_chosen(name)}
