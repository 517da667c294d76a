"""The state dicts of ``FullyShardedDataParallel``: the methods of torch's class that save and load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core import door
from fsdp2.extras.checked import checked
from fsdp2.fsdp1 import optim_load, optim_state_dict as optim_saving, state_dict as state_dicts, state_dict_kinds


class HasStateDicts(nn.Module):
    """Saves and loads parameters and their optimizer states under the names that they had before wrapping."""

    state_dict_type = staticmethod(state_dict_kinds.state_dict_type)
    set_state_dict_type = staticmethod(state_dict_kinds.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dict_kinds.get_state_dict_type)

    @door.entry
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return parameters and buffers under their original names, as the kind that :meth:`set_state_dict_type` has
        set. Collective for full and local state dicts. Later training does not change the returned values.

        Raises:
            ScheduleError: a forward or backward runs.
            RuntimeError: parameters are on the meta device.
        """
        return state_dicts.save(self, super().state_dict, args, kwargs)

    @door.entry
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole or sharded values, or local ones if that kind is set. All ranks must call it.

        Raises:
            RuntimeError: keys are missing or unexpected, or shapes differ, on some rank. No rank has loaded anything.
            ScheduleError: a forward or backward runs.
        """
        return state_dicts.load(self, super().load_state_dict, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dicts.load_into_wrapper(self, super()._load_from_state_dict, state_dict, prefix, *args)

    def _fqn_modifiers(self) -> dict[str, str]:
        """``torch.distributed.checkpoint.state_dict`` calls this to leave the wrapper out of names."""
        return state_dicts.names_for_checkpoints(self)

    # State dicts of optimizers

    optim_state_dict = staticmethod(optim_saving.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_load.optim_state_dict_to_load)
    rekey_optim_state_dict = staticmethod(optim_load.rekey_optim_state_dict)

    @staticmethod
    @checked()
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: optim_load.OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict` with whole values on the CPU, whatever kind is set. ``optim`` alone says
        which parameters it has, not ``optim_input``."""
        return optim_saving.save(model, optim, is_full=True, rank0_only=rank0_only, group=group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict` with sharded values on the CPU, whatever kind is set."""
        return optim_saving.save(model, optim, is_full=False, group=group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: optim_load.OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert a full state dict that each rank has, so that the optimizer can load it. Does not communicate."""
        return optim_load.to_load(model, optim, full_optim_state_dict, optim_input=optim_input, is_collective=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: optim_load.OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> dict[str, Any]:
        """Convert a full state dict that only ``group``'s first rank has, for the optimizer to load. Collective."""
        return optim_load.to_load(
            model, optim, full_optim_state_dict, rank0_only=True, optim_input=optim_input, group=group
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Convert a sharded state dict so that the optimizer can load it. Collective."""
        return optim_load.to_load(model, optim, sharded_optim_state_dict)
