"""The parameters of a ``FullyShardedDataParallel`` as torch's ``FlatParamHandle`` shows them, and what torch's root
knows about the order of units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core.runtime import door
from fsdp2.core.runtime.unit import Unit
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.core.schedule.states import GroupState
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.group import training_state
from fsdp2.extras.torch_view.view import View

_OF_FSDP1 = {"PRE_BACKWARD": "BACKWARD_PRE", "POST_BACKWARD": "BACKWARD_POST"}


@door.all_entries
class Handle(View):
    """The operations of a module's wrapper on the parameters of its unit."""

    shows = "FlatParamHandle"
    instead: ClassVar[Mapping[str, str]] = {
        "_post_backward": "register_comm_hook of the root",
        "_use_unsharded_views": "FullyShardedDataParallel.summon_full_params(module)",
        "unshard_grad": "FullyShardedDataParallel.summon_full_params(module, with_grads=True)",
        "to_cpu": "FullyShardedDataParallel.summon_full_params(module, offload_to_cpu=True)",
        "unflatten_as_params": "FullyShardedDataParallel.summon_full_params(module)",
        "sharded_grad": "the gradients of FullyShardedDataParallel.parameters()",
    }
    not_now: ClassVar[Mapping[str, str]] = {
        "flat_param": "is one parameter of one dtype, and the parameters of this wrapper have several. Read "
        "FullyShardedDataParallel.named_parameters()."
    }

    def __init__(self, wrapper: Any) -> None:
        vars(self).update(_wrapper=wrapper)

    _wrapper: Any  # a FullyShardedDataParallel; importing the class would be circular

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self._unit is other._unit

    def __hash__(self) -> int:
        return hash(self._unit)

    @property
    def _unit(self) -> Unit:
        unit: Unit = self._wrapper._unit
        return unit

    @property
    def flat_param(self) -> nn.Parameter:
        flat: nn.Parameter | None = self._wrapper._flat_param
        if flat is None:
            raise AttributeError  # the view adds the reason
        return flat

    @property
    def _fully_sharded_module(self) -> nn.Module:
        return self._unit.modules[0]

    @property
    def _sharding_strategy(self) -> Any:
        return torch_names.handle_strategy(self._wrapper.sharding_strategy.name)

    @property
    def uses_sharded_strategy(self) -> bool:
        return bool(self._wrapper.sharding_strategy.name != "NO_SHARD")

    @property
    def _offload_params(self) -> bool:
        return bool(self._wrapper.cpu_offload.offload_params)

    @property
    def _use_orig_params(self) -> bool:
        return bool(self._wrapper._settings.use_orig_params)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self._unit.groups[0].params[0].dtypes.orig

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        """Ignored: clients set it after a cast of ``flat_param``, but the runtime reads the dtype of the shards."""

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._unit.groups[0].params[0].dtypes.param

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._unit.groups[0].params[0].dtypes.reduce

    @property
    def device(self) -> torch.device:
        return self._unit.mesh.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._wrapper.process_group
        return group

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    @property
    def _training_state(self) -> Any:
        name = training_state(self._unit, self._unit.groups).name
        return torch_names.handle_training_state(_OF_FSDP1.get(name, name))

    def needs_unshard(self) -> bool:
        """Whether compute would read shards."""
        return any(group.state is not GroupState.UNSHARDED for group in self._unit.groups)

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which is ``flat_param``, is only a part on this rank. It is never unsharded here."""
        return self.uses_sharded_strategy

    def unshard(self) -> None:
        """Gather the parameters of the unit, and bind them."""
        tree = tree_of(self._unit)
        tree.unshard(self._unit)
        tree.finish_unshard(self._unit)

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Bind the shards. The unsharded memory is always freed, whatever is passed, since it would become stale."""
        self._unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move ``flat_param``, and thus the unit's shards, in place. The next use needs them back where they were."""
        self._unit.reshard()
        flat = self.flat_param
        moved = flat.detach().to(*args, **kwargs)
        if moved.device != flat.device or moved.dtype != flat.dtype:
            flat.data = moved


class ExecutionOrder(View):
    """What torch's root knows about the order of its wrappers. The runtime records the order itself."""

    shows = "_ExecOrderData"
    instead: ClassVar[Mapping[str, str]] = {
        "_forward_prefetch_limit": "set_modules_to_forward_prefetch of modules of fsdp2.fully_shard",
        "_backward_prefetch_limit": "set_modules_to_backward_prefetch of modules of fsdp2.fully_shard",
    }

    def __init__(self, wrapper: Any) -> None:
        vars(self).update(_wrapper=wrapper)

    _wrapper: Any

    @property
    def _forward_prefetch_limit(self) -> int:
        """How many units are gathered ahead."""
        return 1

    @_forward_prefetch_limit.setter
    def _forward_prefetch_limit(self, value: int) -> None:
        self._check_limit("_forward_prefetch_limit", value)

    @property
    def _backward_prefetch_limit(self) -> int:
        return 1

    @_backward_prefetch_limit.setter
    def _backward_prefetch_limit(self, value: int) -> None:
        self._check_limit("_backward_prefetch_limit", value)

    def _check_limit(self, name: str, value: int) -> None:
        if value != 1:
            raise AttributeError(self._refusal(f"cannot set '{name}' to {value}", name))

    @property
    def all_handles(self) -> list[Handle]:
        handles: list[Handle] = self._wrapper._all_handles
        return handles

    @property
    def world_size(self) -> int:
        return int(self._wrapper.world_size)

    @property
    def rank(self) -> int:
        return int(self._wrapper.rank)

    @property
    def process_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._wrapper.process_group
        return group
