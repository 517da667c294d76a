"""A ``with`` block that keeps gradients on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fsdp2.runtime.unit import units_under


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside the block reduce nothing. The next backward after the block reduces their gradients along with
    its own.

    All units under ``module`` get ``set_requires_gradient_sync(False)``; the block restores their settings at its end.

    Raises:
        ValueError: nothing under ``module`` is sharded.
    """
    units = [unit for _, unit in units_under(module)]
    if not units:
        raise ValueError(
            f"no_sync: nothing under this {type(module).__name__} was given to fully_shard. Pass the sharded model."
        )
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.configure, reduces=unit.config.reduces)
            unit.configure(reduces=False)
            for group in unit.groups:
                stack.callback(group.configure, requires_all_reduce=group.options.requires_all_reduce)
                group.configure(requires_all_reduce=False)
        yield
