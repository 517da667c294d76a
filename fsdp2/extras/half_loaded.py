"""What a model says that was interrupted, as by Ctrl-C, while its parameters were written.

Unlike other errors, an interrupt does not say what it has left behind, and a notebook continues after it. So the next
forward says so, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

_HANDLE = "_fsdp2_half_loaded"  # an attribute of the module, while its next forward has something to say


@contextmanager
def said_if_interrupted(model: nn.Module, caller: str) -> Iterator[None]:
    """Surrounds code that writes all parameters of ``model``. If it ends normally, they are whole again."""
    try:
        yield
    except KeyboardInterrupt:
        _forget(model)
        model.__dict__[_HANDLE] = _let_forward_say(model, caller)
        raise
    _forget(model)


def _let_forward_say(model: nn.Module, caller: str) -> RemovableHandle:
    def say(*_: object) -> NoReturn:
        _forget(model)
        name = type(model).__name__.removeprefix("FSDP")
        raise RuntimeError(
            f"{caller} was interrupted while it wrote the parameters of this {name}, so some have new values, and "
            "others still have the old ones. Load again, or load a checkpoint. (This is said once.)"
        )

    return model.register_forward_pre_hook(say)


def _forget(model: nn.Module) -> None:
    handle = model.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()
