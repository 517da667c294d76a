"""What ``torch.distributed.checkpoint`` loads into an optimizer if the checkpoint lacks states of some parameters, such
as those of a module that was never used. Rule: rank 0 alone reads what the checkpoint has, so all ranks load the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from fsdp2.core import expect
from fsdp2.extras.checked import check
from fsdp2.extras.exchange import axis_of, from_first, together
from fsdp2.extras.output import listed

_MAX_NAMES = 4


def optimizer_state_to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    checkpoint: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "optimizer",
    options: StateDictOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict of ``optimizer`` that ``torch.distributed.checkpoint.load`` can fill from ``checkpoint``, also if
    the checkpoint lacks the states of some parameters.

    An optimizer has no states for a parameter that never had a gradient, and so its checkpoint has none, either. But
    torch's ``get_optimizer_state_dict`` gives a new optimizer states of all parameters, and ``load`` would raise that
    they are missing. This function drops those states, also from ``optimizer``, which then starts these parameters
    anew, as it would have in the job that wrote the checkpoint. Give the result to ``load``, and then to
    ``set_optimizer_state_dict``.

    Args:
        model, optimizer: as for ``get_optimizer_state_dict``.
        checkpoint: the folder of the checkpoint, or what reads it from elsewhere.
        key: the key of the optimizer's state dict in the dict that was saved.
        options: as for ``get_optimizer_state_dict``.
        process_group: the ranks that load, and all call this; by default all ranks.

    Raises:
        ValueError: the checkpoint has no states under ``key``; or it has some of parameters for which ``optimizer``,
            which has already been used, has none. All ranks raise it, or what reading the checkpoint raised.
    """
    options = options or StateDictOptions()
    is_right = not (options.full_state_dict or options.broadcast_from_rank0)
    expect(is_right, "optimizer_state_to_load: options", options, "options of a sharded state dict", by_value=True)
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    axis = axis_of(process_group)
    saved: list[str] = []
    with together(axis):
        check("optimizer_state_to_load: key", key, "str")
        if axis.rank == 0:
            reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
            saved = list(reader.read_metadata().state_dict_metadata)
    saved = from_first(axis, saved)
    stateful = _prefixes(saved, f"{key}.state.")

    # Annotated as Any because torch's type also covers dicts that are flattened. Fills in states of a new optimizer.
    made: Any = get_optimizer_state_dict(model, optimizers)
    names: list[str] = [name for group in made["param_groups"] for name in group["params"]]
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    trained = {name: param for name, param in zip(names, params, strict=True) if param.requires_grad}
    with together(axis):
        _check([name for name in trained if made["state"].get(name)], [*trained], stateful, saved, key)
    for name, param in trained.items():
        if name not in stateful:
            for each in optimizers:
                each.state.pop(param, None)
    state: Any = get_optimizer_state_dict(model, optimizers, options=options)
    if "state" in state:  # torch expects all trained parameters in a dict that is not flattened
        state["state"] |= {name: {} for name in trained if name not in state["state"]}
    return dict(state)


def _prefixes(saved: Iterable[str], start: str) -> set[str]:
    """The names of which ``saved`` has states: whatever stands between ``start`` and a later dot of a key."""
    found = set()
    for key in saved:
        if key.startswith(start):
            parts = key.removeprefix(start).split(".")
            found |= {".".join(parts[:n]) for n in range(1, len(parts))}
    return found


def _check(here: list[str], trained: list[str], stateful: set[str], saved: list[str], key: str) -> None:
    if here and not stateful.intersection(trained):
        found = listed(dict.fromkeys(f"'{name.partition('.')[0]}'" for name in saved), _MAX_NAMES)
        raise ValueError(
            f"optimizer_state_to_load: found no states of this optimizer's parameters under '{key}.state' in the "
            f"checkpoint, which has the keys {found}. Pass key= as it was when the checkpoint was saved."
        )
    lacking = stateful.intersection(trained).difference(here)
    if here and lacking:
        names = listed((f"'{name}'" for name in trained if name in lacking), _MAX_NAMES)
        raise ValueError(
            f"optimizer_state_to_load: the checkpoint has states of {names}, and the optimizer has only states of "
            "other parameters, since it has been used. Pass a new optimizer, or call optimizer.state.clear() first."
        )
