"""The state dicts of ``FullyShardedDataParallel``: the methods of torch's class that save and load."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp2.core.runtime import door
from fsdp2.fsdp1 import optim_load, optim_state_dict as optim_saving, state_dict as state_dicts


class HasStateDicts(nn.Module):
    """Saves and loads parameters and their optimizer states under the names that they had before wrapping."""

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Set the kind of state dicts inside the block: see :meth:`set_state_dict_type`. The earlier settings are
        restored afterwards, even after an exception."""
        return state_dicts.types_set(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Set the kind of state dicts of all wrappers in ``module``.

        Full state dicts, the default, have whole tensors. Sharded ones have this rank's shards: DTensors if the wrapper
        was given a ``device_mesh``, else ShardedTensors. Local ones have one ``_flat_param`` per wrapper, laid out as
        torch's class does; they load only with the same wrapping and number of ranks.

        Returns:
            What was set before; None if there are no wrappers.

        Raises:
            RuntimeError: a config is not of the kind ``state_dict_type``; wrappers have different settings.
        """
        return state_dicts.set_types(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """The settings of the wrappers in ``module``; None if there are none.

        Raises:
            RuntimeError: wrappers have different settings.
        """
        return state_dicts.get_types(module)

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

    @staticmethod
    @door.entry
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of ``optim``, keyed by clean parameter names, as the kind that
        :meth:`set_state_dict_type` has set. Collective. Later steps of ``optim`` do not change the returned values.

        Args:
            model: the module whose parameters ``optim`` has; it may have wrappers inside.
            optim_state_dict: what to convert; by default ``optim.state_dict()``.
            group: with ``rank0_only``, its first rank gets the result; the other ranks get an empty dict.

        Raises:
            ValueError: ``optim`` has parameters of another model.
            RuntimeError: a rank lacks states that other ranks have.
        """
        return optim_saving.saved(model, optim, optim_state_dict, group=group)

    @staticmethod
    @door.entry
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Convert ``optim_state_dict``, full or sharded and of any wrapping, so that ``optim`` can load it. Collective.

        Args:
            is_named_optimizer: the keys of the result are names, as TorchRec's optimizers have them.
            load_directly: also load the result into ``optim``.
            group: with ``rank0_only``, its first rank has ``optim_state_dict``; the others may pass anything.

        Raises:
            ValueError: on some rank, it does not fit the model and the optimizer. No rank has loaded anything.
        """
        made = optim_load.loadable(model, optim, optim_state_dict, is_named=is_named_optimizer, group=group)
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
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

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: optim_load.OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Change the keys of a full state dict to the parameter numbers that plain optimizers use, or to names.
        ``model`` and ``optim``, without wrappers, define the mapping. A dict with the right keys is returned as it is.

        Raises:
            ValueError: the model or the optimizer lacks parameters of the state dict.
        """
        return optim_load.rekeyed(optim_state_dict, optim_state_key_type, model, optim_input, optim)
