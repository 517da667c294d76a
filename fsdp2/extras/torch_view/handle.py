"""The parameters of a ``FullyShardedDataParallel`` as torch's ``FlatParamHandle`` shows them, and what torch's root
knows about the order of units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp2.core import GroupState, door, tree_of
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.group import training_state
from fsdp2.extras.torch_view.view import View

_OF_FSDP1 = {"PRE_BACKWARD": "BACKWARD_PRE", "POST_BACKWARD": "BACKWARD_POST"}


class _OfWrapper(View):
    """A view of a FullyShardedDataParallel. Importing that class would be circular."""

    _wrapper: Any
    _unit = _key = property(lambda view: view._wrapper._unit)
    process_group = property(lambda view: view._wrapper.process_group)
    rank = property(lambda view: view._wrapper.rank)
    world_size = property(lambda view: view._wrapper.world_size)


@door.all_entries
class Handle(_OfWrapper):
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

    device = property(lambda view: view._unit.mesh.device)
    uses_sharded_strategy = property(lambda view: view._wrapper.sharding_strategy.name != "NO_SHARD")
    _fully_sharded_module = property(lambda view: view._unit.modules[0])
    _sharding_strategy = property(
        lambda view: torch_names.member("HandleShardingStrategy", view._wrapper.sharding_strategy.name)
    )
    _offload_params = property(lambda view: view._wrapper.cpu_offload.offload_params)
    _use_orig_params = property(lambda view: view._wrapper._settings.use_orig_params)
    _dtypes = property(lambda view: view._unit.groups[0].params[0].dtypes)
    _fwd_bwd_param_dtype = property(lambda view: view._dtypes.param)
    _reduce_dtype = property(lambda view: view._dtypes.reduce)

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._dtypes.orig
        return dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        """Ignored: clients set it after a cast of ``flat_param``, but the runtime reads the dtype of the shards."""

    @property
    def flat_param(self) -> nn.Parameter:
        flat: nn.Parameter | None = self._wrapper._flat_param
        if flat is None:
            raise AttributeError  # the view adds the reason
        return flat

    @property
    def _training_state(self) -> Any:
        name = training_state(self._unit, self._unit.groups).name
        return torch_names.member("HandleTrainingState", _OF_FSDP1.get(name, name))

    def needs_unshard(self) -> bool:
        """Whether compute would read shards."""
        return any(group.state is not GroupState.UNSHARDED for group in self._unit.groups)

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which is ``flat_param``, is only a part on this rank. It is never unsharded here."""
        return bool(self.uses_sharded_strategy)

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


class ExecutionOrder(_OfWrapper):
    """What torch's root knows about the order of its wrappers. The runtime records the order itself."""

    shows = "_ExecOrderData"
    instead: ClassVar[Mapping[str, str]] = {
        "_forward_prefetch_limit": "set_modules_to_forward_prefetch of modules of fsdp2.fully_shard",
        "_backward_prefetch_limit": "set_modules_to_backward_prefetch of modules of fsdp2.fully_shard",
    }

    all_handles = property(lambda view: view._wrapper._all_handles)

    @staticmethod
    def _prefetch_limit(name: str) -> property:
        """How many units are gathered ahead: always one."""

        def write(view: ExecutionOrder, value: int) -> None:
            if value != 1:
                raise AttributeError(view._refusal(f"cannot set '{name}' to {value}", name))

        return property(lambda view: 1, write)

    _forward_prefetch_limit = _prefetch_limit("_forward_prefetch_limit")
    _backward_prefetch_limit = _prefetch_limit("_backward_prefetch_limit")
