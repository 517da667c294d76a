"""``FullyShardedDataParallel``: a module around the user's module, which is one unit of the runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp2.api.contexts import no_sync
from fsdp2.api.copying import copied_module
from fsdp2.api.fully_shard import prepare_unit
from fsdp2.fsdp1 import state_dict as state_dicts
from fsdp2.fsdp1.flat_param import FlatParameter, flat_parameter
from fsdp2.fsdp1.names import WRAPPED, clean_name
from fsdp2.fsdp1.settings import ProcessGroups, Settings, checked_settings, ignored_params_of
from fsdp2.group.param import Slot
from fsdp2.plan.dtypes import cast_floating
from fsdp2.runtime.root import Unit, unit_of
from fsdp2.schedule.states import Lent


class FullyShardedDataParallel(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | Any | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        ignored = ignored_params_of(module, ignored_modules, ignored_states)
        settings = checked_settings(
            process_group,
            sharding_strategy,
            cpu_offload,
            backward_prefetch,
            mixed_precision,
            device_id,
            device_mesh,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
        )
        self._settings: Settings = settings
        prepared = prepare_unit(
            (module,),
            settings.parallel,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=settings.policy,
            offload_policy=settings.offload_policy,
            ignored_params=ignored,
        )
        prepared.commit()
        self._fsdp_wrapped_module = module
        state_dicts.install(self)

    # What the wrapper is

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        return self._settings.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        return self._settings.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        return self._settings.cpu_offload

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that parameters are sharded over."""
        return self._settings.process_group

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        return self._settings.parallel.device

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """An item of the wrapped module, if that is an ``nn.Sequential``."""
        return cast(Any, self._fsdp_wrapped_module)[key]

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one. Before the first forward, this call decides it: call it on the
        outermost wrapper."""
        return self._unit.form_root().unit is self._unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, ``module`` included, outer ones first; with ``root_only``, the roots only."""
        wrappers = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return [each for each in wrappers if each.check_is_root()] if root_only else wrappers

    # Training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, with inputs cast as ``MixedPrecision`` says."""
        precision = self._settings.mixed_precision
        casts = precision.cast_root_forward_inputs if self._is_root() else precision.cast_forward_inputs
        if casts and precision.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), precision.param_dtype)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside the block reduce nothing: see :func:`fsdp2.no_sync`. Call it on the root.

        Raises:
            RuntimeError: the wrapper is not the root.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "no_sync: this FullyShardedDataParallel is inside another one. Call no_sync on the outermost one."
            )
        return no_sync(self)

    # Parameters and buffers

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names. With ``use_orig_params``, and inside ``summon_full_params``, the original ones
        under their original names. Otherwise one ``_flat_param`` per wrapper stands for all parameters of its unit."""
        seen: set[nn.Parameter] = set()
        for name, param in self._parameters_in(prefix, recurse):
            if not remove_duplicate or param not in seen:
                seen.add(param)
                yield name, param

    def _parameters_in(self, prefix: str, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        cleans = self._settings.use_orig_params or self._unit.lent is not Lent.NOTHING
        hidden: set[Slot] = set()
        modules = list(self.named_modules(prefix=prefix, remove_duplicate=False)) if recurse else [(prefix, self)]
        for name, module in modules:
            name = name and f"{name}."
            if isinstance(module, FullyShardedDataParallel) and recurse:  # it is a parameter of the wrapped module
                flat = module._flat_param
                if flat is not None and module._unit.lent is Lent.NOTHING:
                    yield f"{name}{WRAPPED}._flat_param", flat
                    hidden |= {slot for param in flat._group.params for slot in param.slots}
            for short, param in module._parameters.items():
                if param is not None and Slot(module, short) not in hidden:
                    yield clean_name(f"{name}{short}") if cleans else f"{name}{short}", param

    @property
    def _flat_param(self) -> FlatParameter | None:
        """The flat parameter of this wrapper; None with ``use_orig_params``, or without parameters."""
        groups = self._unit.groups
        if self._settings.use_orig_params or not groups:
            return None
        flat = self.__dict__.get("_flat")
        if flat is None or flat._group is not groups[0]:
            flat = self.__dict__["_flat"] = flat_parameter(groups[0])
        flat.follow_shards()
        return cast(FlatParameter, flat)

    # State dicts

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Set the kind of state dicts inside the block: see :meth:`set_state_dict_type`. Also after an exception, the
        earlier settings come back."""
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
        got a ``device_mesh``, else ShardedTensors. Local ones have one ``_flat_param`` per wrapper, as torch's class
        lays it out; they fit only the same wrapping and number of ranks.

        Returns:
            What was set before; None if there are no wrappers.

        Raises:
            RuntimeError: a config is of another kind than ``state_dict_type``; wrappers have different settings.
        """
        return state_dicts.set_types(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """The settings of the wrappers in ``module``; None if there are none.

        Raises:
            RuntimeError: wrappers have different settings.
        """
        return state_dicts.get_types(module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Parameters and buffers under their original names, of the kind that :meth:`set_state_dict_type` has set.
        Collective, if it is a full or local one. Values do not change when the model is trained on.

        Raises:
            ScheduleError: a forward or backward runs.
        """
        return state_dicts.save(self, super().state_dict, args, kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole or sharded values, or local ones if they are set. All ranks must call it.

        Raises:
            RuntimeError: keys are missing or unexpected, or shapes differ, on some rank. No rank has loaded anything.
            ScheduleError: a forward or backward runs.
        """
        return state_dicts.load(self, super().load_state_dict, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dicts.load_into_wrapper(self, super()._load_from_state_dict, state_dict, prefix, *args)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What ``torch.distributed.checkpoint.state_dict`` asks, to leave the wrapper out of names."""
        return state_dicts.names_for_checkpoints(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``cuda`` and similar methods to the shards."""
        self._unit.reshard()
        result = super()._apply(*args, **kwargs)
        self._unit.mark_stale()
        return result

    def __deepcopy__(self, memo: dict[Any, Any]) -> FullyShardedDataParallel:
        """A sharded copy with the same values and settings, but no gradients. All ranks must copy."""
        memo[id(self)] = made = object.__new__(type(self))
        memo[id(self._settings)] = self._settings
        copied_module(self._fsdp_wrapped_module, memo)
        state = {name: value for name, value in vars(self).items() if name != "_flat"}
        made.__dict__.update(copy.deepcopy(state, memo))
        return made

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self._fsdp_wrapped_module)
        assert unit is not None  # __init__ makes it
        return unit

    def _is_root(self) -> bool:
        unit = self._unit
        return unit.root is None or unit.is_root
