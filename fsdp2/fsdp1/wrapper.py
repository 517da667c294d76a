"""``FullyShardedDataParallel``: a module around the user's module, which is one unit of the runtime."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp2.core import PreparedUnit, UnshardHandle, _torch, marks, plans, prepare_unit, tree_of, unit_of
from fsdp2.extras.checked import checked
from fsdp2.extras.copying import copied_module
from fsdp2.extras.lending import no_sync
from fsdp2.extras.plain_names import IN_FSDP1, inside_checkpoint, plain_name
from fsdp2.extras.refusals import check_not_flattened
from fsdp2.fsdp1 import (
    comm_hooks,
    evaluation,
    extensions,
    full_params,
    in_backward,
    orig_params,
    state_dict as state_dicts,
)
from fsdp2.fsdp1.auto_wrap import (
    add_full_precision,
    check_nothing_is_wrapped,
    chosen_by,
    replace_everywhere,
)
from fsdp2.fsdp1.has_state_dicts import HasStateDicts
from fsdp2.fsdp1.init_states import (
    broadcast,
    cast_buffers,
    check_flat,
    check_materialise,
    keep_low_precision,
    materialise,
)
from fsdp2.fsdp1.private_names import HasPrivateNames
from fsdp2.fsdp1.search import FLAT, params_of, wrappers_in
from fsdp2.fsdp1.settings import DeviceId, Ignored, ProcessGroups, Settings, checked_ignored, checked_settings
from fsdp2.fsdp1.state_dict_kinds import FULL_SETTINGS
from fsdp2.fsdp1.state_values import memory_order
from fsdp2.fsdp1.torch_names import HYBRID, FSDPExtensions
from fsdp2.fsdp1.undo import restorer, undone_on_error

evaluation.register()


class FullyShardedDataParallel(HasStateDicts, HasPrivateNames):
    """Shards the parameters of ``module`` like torch's class of this name, on the runtime of :func:`fsdp2.fully_shard`.

    The wrapper and what it wraps form one unit: parameters that no wrapper inside manages are gathered together, and
    their gradients are reduced together. With ``use_orig_params``, optimizers may be built before wrapping.

    Args:
        module: the module to wrap. Its class and names stay the same. If it is or already has a wrapper, nothing
            is left for this one to shard.
        process_group: the ranks to shard over; for hybrid strategies a pair (shard, replicate). Default: all ranks.
        sharding_strategy: ``FULL_SHARD``, the default, frees parameters between forward and backward. ``SHARD_GRAD_OP``
            keeps them. ``NO_SHARD`` keeps them whole and averages gradients. ``HYBRID_SHARD`` and
            ``_HYBRID_SHARD_ZERO2`` shard over one group of ranks and replicate over another.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards, gradients and optimizer states on the host.
        auto_wrap_policy: which modules inside get a wrapper of their own: a policy of ``fsdp2.fsdp1.wrap``, or a
            function ``(module, recurse, nonwrapped_numel)``.
        backward_prefetch: None gathers one unit at a time in backward. ``BACKWARD_PRE`` and ``BACKWARD_POST`` do the
            same here: they gather the next unit while one runs.
        mixed_precision: the dtypes of parameters, reductions and buffers, and the inputs to cast.
        ignored_modules, ignored_states: modules or parameters that are left unchanged. Pass one of the two. Anything
            that an inner wrapper ignores is ignored, too.
        param_init_fn: gives values to the parameters of one module on the meta device. Default: the module's
            ``to_empty`` and ``reset_parameters``.
        device_id: the device to shard on: an index, or a device. Default: that of the module, else the accelerator.
        sync_module_states: copy parameters and buffers from the first rank to all ranks. Buffers of ignored modules
            are copied, too.
        forward_prefetch, limit_all_gathers: accepted, but without effect: units are always prefetched in forward, and
            at most two at a time hold memory.
        use_orig_params: if True, the parameters are DTensors under their own names. Parameters from before wrapping
            stand for them, so an optimizer, list or average that holds those keeps working. If False, the default,
            one flat 1-D parameter per wrapper stands for them, and an optimizer, built after wrapping, steps once per
            wrapper. All parameters of a wrapper then have the same dtype and ``requires_grad``.
        device_mesh: the ranks as a mesh, instead of ``process_group``: one axis, or (replicate, shard).

    Raises:
        ValueError: arguments contradict each other; parameters cannot form one flat parameter; ``fully_shard`` was
            called on ``module``.
        TypeError: an argument is of the wrong type.

    If construction raises, even in a user's function, the modules are unchanged. For this, the original parameters
    are kept until all modules inside are wrapped.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023; the interface of ``torch.distributed.fsdp``.
    """

    @checked()
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
        device_id: DeviceId = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        options = dict(locals())  # inner wrappers get them, too, except for these
        for name in ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules"):
            del options[name]
        super().__init__()
        settings = checked_settings(module, options, has_policy=auto_wrap_policy is not None)
        inside = [inner._ignored for inner in wrappers_in(module)]
        ignored = checked_ignored(module, ignored_modules, ignored_states, inside)
        self._settings: Settings = settings
        self._ignored: Ignored = ignored
        self._orig_buffer_dtypes: dict[str, torch.dtype] = {}  # of buffers that were cast, by clean name
        self._has_run = False
        self._is_full_precision = False  # in ``eval()``, if the user asked for it
        self._sends_states = sync_module_states
        self._extension: FSDPExtensions | None = None
        self._has_comm_hook = False
        self._state_dict_settings = FULL_SETTINGS
        self._load_errors: list[str] = []  # of the last load
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"FullyShardedDataParallel: {type(module).__name__} has no forward, so its parameters are never "
                "gathered. Wrap the modules inside it.",
                stacklevel=2,
            )
        for name, param in module.named_parameters():  # before sync_module_states writes any
            if param not in ignored.params and unit_of(module) is None:
                check_not_flattened(plain_name(module, name), param)
        check_materialise(module, ignored, param_init_fn)
        options["process_group"] = None if device_mesh is not None else settings.groups
        options["ignored_states"] = list(ignored.params)
        with undone_on_error(module):
            if auto_wrap_policy is not None:
                self._wrap_inside(module, auto_wrap_policy, options)
            if unit_of(module) is not None:
                self._wrap_again(module, sync_module_states=sync_module_states)
            else:
                self._shard(module, param_init_fn, sync_module_states=sync_module_states)
        if backward_prefetch is None:
            self._unit.configure(backward_units=())

    def _shard(
        self, module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None, *, sync_module_states: bool
    ) -> None:
        """Make the unit of ``module`` and of all modules inside it that belong to no unit."""
        settings, ignored = self._settings, self._ignored
        self._check_groups_inside(module)
        if not settings.use_orig_params:
            check_flat(module, ignored)
        materialise(module, ignored, param_init_fn, settings.parallel.device)
        if sync_module_states:
            broadcast(module, ignored, settings)
        precision = settings.mixed_precision
        if precision.keep_low_precision_grads and precision.param_dtype is not None:
            keep_low_precision(module, ignored)
        extension = extensions.flatten(module, ignored.params)
        prepared = self._prepared(module)
        originals = [[(param.name, param.sharded) for param in resolved.params] for resolved in prepared.resolved]
        orders = {name: memory_order(original) for group in originals for name, original in group}
        self._memory_orders = {name: order for name, order in orders.items() if order is not None}
        unit = prepared.commit()
        for named, group in zip(originals, unit.groups, strict=True):
            group.configure(fills_beside_others=True)
            for (_, original), param in zip(named, group.params, strict=True):
                if settings.use_orig_params and type(original) in (nn.Parameter, DTensor):
                    full_params.keep_attributes(vars(original), param.sharded)
            if settings.use_orig_params:
                orig_params.keep((original for _, original in named), group.params)
        self._fsdp_wrapped_module = module
        self.__dict__[marks.UNIT] = unit  # tools may be given the wrapper
        orig_params.answer_as_originals(self)
        if not settings.use_orig_params and unit.groups:
            _torch.parameters_dict(self._flat_owner)[FLAT] = None  # the name, for clients that look for it
        state_dicts.install(self)
        extensions.install(self, extension)

    def _wrap_again(self, module: nn.Module, *, sync_module_states: bool) -> None:
        """Wrap ``module``, which units manage completely. The wrapper itself becomes a unit without parameters."""
        self._check_groups_inside(module)
        self._memory_orders = {}
        self._prepared(self).commit()
        self._fsdp_wrapped_module = module
        if sync_module_states:
            broadcast(self, self._ignored, self._settings)
        state_dicts.install(self)

    def _prepared(self, module: nn.Module) -> PreparedUnit:
        settings = self._settings
        return prepare_unit(
            (module,),
            settings.parallel,
            reshard_after_forward=settings.reshard_after_forward,
            mp_policy=settings.policy,
            offload_policy=settings.offload_policy,
            ignored_params=self._ignored.params,
        )

    def _wrap_inside(self, module: nn.Module, policy: Any, options: dict[str, Any]) -> None:
        """Wrap the modules inside ``module`` that ``policy`` chooses, inner ones first, with ``options``."""
        check_nothing_is_wrapped(module)
        restore = restorer(module)
        extensions.flatten(module, self._ignored.params)
        self._prepared(module)  # refuses parameters that cannot be sharded, before anything is wrapped
        restore()
        ignored, precision = self._ignored, options["mixed_precision"]
        chosen = chosen_by(policy, module, ignored.modules, ignored.params)
        if precision is not None:
            chosen = add_full_precision(module, precision._module_classes_to_ignore, chosen)
        for each in () if self._settings.use_orig_params else (module, *chosen):
            check_flat(each, Ignored(ignored.params, ignored.modules | (chosen.keys() - {each})))
        wrapped = {
            each: FullyShardedDataParallel(each, **{**options, **overrides}) for each, overrides in chosen.items()
        }
        replace_everywhere(module, wrapped)

    def _check_groups_inside(self, module: nn.Module) -> None:
        """Check that inner wrappers with a hybrid strategy replicate over the same ranks."""
        mine = self._settings
        for inner in self.fsdp_modules(module):
            ranks, of_inner = mine.parallel.ranks, inner._settings.parallel.ranks  # a row for each replica
            if mine.strategy in HYBRID and inner.sharding_strategy in HYBRID and ranks != of_inner:
                raise ValueError(
                    f"FullyShardedDataParallel: {mine.strategy.name} expects the same process groups in all wrappers, "
                    f"but a {type(inner.module).__name__} inside shards over each of {of_inner} and this one over each "
                    f"of {ranks}. Pass one device_mesh to all of them."
                )

    # What the wrapper is

    @property
    def module(self) -> nn.Module:
        """The wrapped module. If that is a ``checkpoint_wrapper``, the module inside it."""
        return inside_checkpoint(self._fsdp_wrapped_module)

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
        """Look up attributes that the wrapper lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == IN_FSDP1:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """An item of the wrapped module, if that is an ``nn.Sequential``."""
        return cast(Any, self._fsdp_wrapped_module)[key]

    def check_is_root(self) -> bool:
        """Whether no other wrapper encloses this one. Before the first forward, this call makes it the root, so call it
        on the outermost wrapper."""
        return tree_of(self._unit).root is self._unit

    @staticmethod
    @checked()
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, ``module`` included, outer ones first; with ``root_only``, the roots only."""
        wrappers = wrappers_in(module)
        return [each for each in wrappers if each.check_is_root()] if root_only else wrappers

    # Training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, with inputs cast as ``MixedPrecision`` says."""
        precision, unit = self._settings.mixed_precision, self._unit
        is_root = unit.is_root
        if is_root and not self._has_run:
            self._begin_to_run()
        if is_root and self._settings.full_precision_in_eval:
            evaluation.follow_training(self)
        casts = (is_root and precision.cast_root_forward_inputs) or (unit.groups and precision.cast_forward_inputs)
        if casts and precision.param_dtype is not None and not self._is_full_precision:
            args, kwargs = plans.cast_floating((args, kwargs), precision.param_dtype)
        return self._modules[IN_FSDP1](*args, **kwargs)  # type: ignore[misc]  # spares two calls of __getattr__

    @_torch.runs_between_graphs
    def _begin_to_run(self) -> None:
        """Called when the first forward of the outermost wrapper begins."""
        wrappers = self.fsdp_modules(self)
        orig_params.take_over_optimizers(wrappers)
        for wrapper in wrappers:
            in_backward.check_or_join(wrapper)
        for wrapper in wrappers:
            wrapper._cast_buffers()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block, backward reduces no gradients: see :func:`fsdp2.no_sync`. Call it on the root.

        Raises:
            RuntimeError: the wrapper is not the root.
        """
        if not self.check_is_root():
            raise RuntimeError(
                "no_sync: this FullyShardedDataParallel is inside another one. Call no_sync on the outermost one."
            )
        return no_sync(self)

    def clip_grad_norm_(self, max_norm: float | torch.Tensor, norm_type: float | Literal["inf"] = 2.0) -> torch.Tensor:
        """Scale all gradients in place so that their norm, taken over all ranks, is at most ``max_norm``. All ranks
        must call it: see :func:`fsdp2.clip_grad_norm_`.

        Args:
            max_norm: the largest norm that is not changed.
            norm_type: any positive number, or ``float("inf")``.

        Returns:
            The norm before clipping, of the widest dtype among the gradients; fp32 if this rank has none.

        Raises:
            RuntimeError: the wrapper is not the root.
            ScheduleError: a forward or backward is running.
        """
        return full_params.clip(self, max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce all gradients with ``hook``, which also divides them: the runtime no longer divides anything.

        Under ``NO_SHARD``, or with one rank, ``hook(state, gradients)`` gets a unit's flat gradients and reduces them
        in place. Otherwise ``hook(state, gradients, shard)`` gets flat gradients ``[W * n]``, and writes the reduced
        elements ``[r * n, (r + 1) * n)`` into ``shard`` ``[n]`` on rank r. Both have the reduce dtype; the hook may
        replace their ``data`` by another dtype, as torch's hooks do. The order of elements differs from torch's class:
        the message holds each rank's parts of all parameters one after another, padded.

        Args:
            state: the first argument of each call.
            hook: one of ``torch.distributed.algorithms._comm_hooks``, or the user's own.

        Raises:
            ValueError: ``hook`` is not callable.
            RuntimeError: the wrapper is not the root; a wrapper has a hook already, or a hybrid strategy.
        """
        comm_hooks.register(self, state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this wrapper's parameters before its next forward. With ``async_op``, return a handle at once."""
        tree_of(self._unit).unshard(self._unit)
        handle = UnshardHandle(self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    # What torch and Python call

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on each module, inner ones first, while the parameters of its unit are whole. Changes by ``fn``
        are written to the shards. All ranks must call it."""
        with full_params.summon_full_params(self, recurse=False):
            return super().apply(fn)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``cuda`` and similar methods to the shards."""
        self._unit.reshard()
        params = params_of(self)
        attributes = [dict(vars(param.sharded)) for param in params]
        result = super()._apply(*args, **kwargs)
        for param, before in zip(params, attributes, strict=True):
            full_params.keep_attributes(before, param.bound())
        orig_params.answer_as_originals(self)
        self._unit.mark_stale()
        return result

    def __deepcopy__(self, memo: dict[Any, Any]) -> FullyShardedDataParallel:
        """A sharded copy with the same values and settings, but no gradients. All ranks must copy."""
        memo[id(self._settings)] = self._settings
        memo[id(self._ignored)] = self._ignored
        memo[id(self._extension)] = self._extension
        if self._unit.modules[0] is self:
            return cast(FullyShardedDataParallel, copied_module(self, memo))
        memo[id(self)] = made = object.__new__(type(self))
        copied = copied_module(self._unit.modules[0], memo)
        state = {name: value for name, value in vars(self).items() if name != marks.UNIT}
        made.__dict__.update(copy.deepcopy(state, memo))
        made.__dict__[marks.UNIT] = unit_of(copied)
        if "_flat" in state:
            made.__dict__["_flat"] = made._flat_param  # now, since a copied optimizer may have it
        extensions.install(made, made._extension)
        orig_params.answer_as_originals(made)
        return made

    def _cast_buffers(self) -> None:
        """Cast buffers to ``MixedPrecision.buffer_dtype``, once."""
        dtype = self._settings.mixed_precision.buffer_dtype
        if dtype is not None and not self._has_run:
            self._orig_buffer_dtypes = cast_buffers(self._unit.modules[0], self._ignored, dtype)
        self._has_run = True
