"""One sharded parameter: its forms, and the places where modules bind it.

``ShardedParam`` owns the sharded ``nn.Parameter`` (a DTensor whose local tensor is a slice of the group's flat shard
buffer) and the unsharded one. Rule: the unsharded ``nn.Parameter`` object never changes while its dtype stays, because
autograd saves it (I1).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, seams
from fsdp2.core._torch import GradDtype
from fsdp2.core.marks import NAME_IN_PASS, SHARDED_AS, STANDS_FOR
from fsdp2.core.plan.dtypes import GRADIENTS_FOLLOW_SHARDS, ParamDtypes, param_dtypes
from fsdp2.core.plan.layout import Layout, contiguous_stride
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.plan.placements import ParamSpec, plain_spec
from fsdp2.core.types import MixedPrecisionPolicy


class Slot(NamedTuple):
    """A place where a parameter is bound. Tied parameters have several."""

    module: nn.Module
    name: str


@dataclass(eq=False, repr=False)
class ShardedParam:
    """A managed parameter. It is created before it is sharded, which happens when it becomes part of a group.

    Attributes:
        name, full_name: the names relative to the module given to ``fully_shard`` and to the root, once there is one.
        sharded: the parameter bound between passes, for optimizers and state dicts; the original until sharded.
        layout: how the parameter is cut over the shard axis; model axes may have cut it before.
        policy: the precision policy of this parameter alone.
        local: the shard, until the group takes it; None if the group cuts it.
        grad_dtype: the ``grad_dtype`` that the user set on the original or sharded parameter, if any; outlives both.
        is_cut: there is no original, because ``sharded`` comes from another group or is a copy.
        unsharded: bound in forward and backward. Created at first use; the group owns its memory.
        inner: storages and sizes of the inner tensors that a post-hook made; released with ``unsharded``.
        compute_dtypes: the dtypes for its gradients: ``dtypes``, unless hooks made the parameter in another one.
        accumulated: unreduced gradients in reduce dtype, if that differs from the compute dtype.
    """

    name: str
    sharded: nn.Parameter
    slots: tuple[Slot, ...]
    mesh: ParallelMesh
    layout: Layout
    spec: ParamSpec
    dtypes: ParamDtypes
    policy: MixedPrecisionPolicy
    local: torch.Tensor | None = None
    grad_dtype: GradDtype | None = None
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.full_name = self.name
        self.stride = contiguous_stride(self.layout.shape)
        # Another unit may also hold the original parameter, if they are tied.
        self.origin: Callable[[], nn.Parameter | None] = (lambda: None) if self.is_cut else weakref.ref(self.sharded)
        self.unsharded: nn.Parameter | None = None
        self.inner: list[tuple[torch.UntypedStorage, int]] = []
        self.compute_dtypes = self.dtypes
        self.accumulated: torch.Tensor | None = None

    def inner_gradients(self) -> tuple[str, ...]:
        """Names of the inner tensors whose gradients are reduced one by one. Only a wrapper subclass has any, and only
        if it has the same inner tensors sharded and unsharded, each with the outer shape and dtype."""
        unsharded = self.unsharded_local
        if unsharded is None or not self.is_wrapped:
            return ()
        names = _torch.inner_names(unsharded)
        inner = [getattr(unsharded, name) for name in names]
        is_alike = all(t.shape == unsharded.shape and t.dtype is unsharded.dtype for t in inner)
        return names if is_alike and names == _torch.inner_names(_torch.local_of(self.sharded)) else ()

    @property
    def unsharded_local(self) -> torch.Tensor | None:
        """This rank's part of the unsharded parameter: the whole parameter, unless model axes have cut it."""
        found = self.unsharded
        return _torch.local_of(found) if isinstance(found, DTensor) else found

    @property
    def is_wrapped(self) -> bool:
        """Whether compute reads a tensor subclass, which hooks have made."""
        return type(self.unsharded_local) not in (nn.Parameter, torch.Tensor, type(None))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard, without padding."""
        return self.layout.shard_shape(self.mesh.shard.rank)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the unsharded ``full``, as a view."""
        if not self.layout.shape:  # every rank holds the whole scalar
            return full
        start, stop = self.layout.interval(self.mesh.shard.rank)
        return full.narrow(self.layout.dim, start, stop - start)

    def sharded_parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The DTensor parameter for this rank's shard ``local``, which modules bind between passes."""
        make = nn.Parameter if self.mesh.has_this_rank else _torch.parameter_outside_its_mesh
        param = make(self.spec.sharded.dtensor(local), requires_grad=requires_grad)
        self._keep_grad_dtype(param)
        return param

    def post_forward_parameter(self, local: torch.Tensor, mesh: ParallelMesh) -> nn.Parameter:
        """The DTensor parameter for ``local`` on the post-forward ``mesh``, which has no model axes."""
        spec = plain_spec(self.layout.shape, self.layout.dim, mesh).sharded
        return self._of_a_pass(nn.Parameter(spec.dtensor(local), requires_grad=self.sharded.requires_grad))

    def unsharded_parameter(self, data: torch.Tensor) -> nn.Parameter:
        """The parameter that compute reads, made from ``data``, which has the unsharded shape."""
        return self._of_a_pass(self.spec.unsharded_parameter(data, requires_grad=self.sharded.requires_grad))

    def _of_a_pass(self, made: nn.Parameter) -> nn.Parameter:
        """Mark ``made`` as bound during a pass, so that no optimizer may step it."""
        vars(made).update({NAME_IN_PASS: self.full_name, STANDS_FOR: self.sharded})
        return made

    def grad_dtype_of(self, bound: torch.Tensor) -> GradDtype | None:
        """The ``grad_dtype`` of ``bound``, else the previous one, since dtype conversions and loading lose it."""
        return _torch.own_grad_dtype(bound) or self.grad_dtype

    def _keep_grad_dtype(self, param: nn.Parameter) -> None:
        if self.grad_dtype is not None:
            _torch.set_grad_dtype(param, self.grad_dtype.dtype)

    def follow_compute_dtype(self) -> None:
        """Make gradients follow the dtype of the unsharded parameter, which hooks choose."""
        assert self.unsharded is not None
        if self.unsharded.dtype.is_floating_point:
            policy = replace(self.policy, param_dtype=self.unsharded.dtype)
            self.compute_dtypes = param_dtypes(self.dtypes.orig, policy, self.grad_dtype)
        self.choose_grad_dtype(is_kept=False)

    def choose_grad_dtype(self, *, is_kept: bool) -> None:
        """Choose the dtype in which autograd accumulates the gradients of the next backward. ``is_kept``: the sum stays
        on this rank.

        If the user set a ``grad_dtype``, and with torch 2.15 always, autograd must not round gradients before a wider
        reduction, because some operations return gradients that are wider than their parameters. So autograd then
        leaves gradients in the dtype in which they come. Like torch 2.15, this accumulates in reduce dtype the first
        gradients that are kept, and those that may be pending on a model axis.
        """
        dtypes = self.compute_dtypes
        if self.unsharded is None or dtypes.param is dtypes.reduce:
            return
        if GRADIENTS_FOLLOW_SHARDS:
            is_wider = dtypes.reduce.itemsize > dtypes.param.itemsize
            is_first = is_kept and self.accumulated is None and self.unsharded_grad is None
            as_reduced = not is_wider or is_first or self.spec.may_be_pending
            _torch.set_grad_dtype(self.unsharded, dtypes.reduce if as_reduced else None)
        elif self.grad_dtype is not None:
            _torch.set_grad_dtype(self.unsharded, None)

    def bound(self) -> object:
        """What is bound now, or the sharded parameter it stands for. Users may have replaced it in some slots."""
        bound = (getattr(module, name, None) for module, name in self.slots)
        found = (getattr(each, STANDS_FOR, each) for each in bound)
        return next((each for each in found if each is not self.sharded), self.sharded)

    def current(self) -> nn.Parameter:
        """The parameter that is bound now.

        Raises:
            TypeError: the parameter is gone, or cannot replace the sharded one.
        """
        bound = self.bound()
        if not self._may_take_over(bound):
            raise TypeError(seams.why_not_adopted(self, bound))
        return cast(nn.Parameter, bound)

    def _may_take_over(self, bound: object) -> bool:
        spec = self.spec.sharded
        return (
            isinstance(bound, DTensor)
            and isinstance(bound, nn.Parameter)
            and tuple(bound.shape) == spec.shape
            and bound.placements == spec.placements
            and bound.device_mesh == spec.mesh
            and tuple(_torch.local_of(bound).shape) == self.shard_shape
        )

    def adopt(self, param: nn.Parameter, dtypes: ParamDtypes) -> None:
        """Manage ``param`` in all slots from now on."""
        if param is not self.sharded or dtypes != self.dtypes:
            self.dtypes = self.compute_dtypes = dtypes
            self.forget_unsharded()
        self.grad_dtype = self.grad_dtype_of(param)
        self._keep_grad_dtype(param)
        self.sharded = param
        setattr(param, SHARDED_AS, self.name)

    def forget_unsharded(self) -> None:
        """Forget the unsharded parameter, whose memory or dtype has changed. The next use creates another one."""
        self.keep_grad()
        self.unsharded = None
        self.inner = []

    # Gradients before they are reduced

    @property
    def unsharded_grad(self) -> torch.Tensor | None:
        """The gradient that autograd has left on the unsharded parameter."""
        return None if self.unsharded is None else self.unsharded.grad

    def _take_unsharded_grad(self, pending_in: torch.dtype | None = None) -> torch.Tensor | None:
        """Take ``unsharded_grad`` off the unsharded parameter, and return this rank's part of it. ``pending_in`` is as
        for ``ParamSpec.local_gradient``."""
        grad = self.unsharded_grad
        if grad is not None:
            assert self.unsharded is not None
            self.unsharded.grad = None
            if self.spec.unsharded is not None:
                grad = self.spec.local_gradient(grad, pending_in)
        return grad

    def keep_grad(self) -> None:
        """Add the gradient of the unsharded parameter, if any, to the unreduced ones in ``accumulated``, in reduce
        dtype."""
        dtype = self.compute_dtypes.reduce
        grad = self._take_unsharded_grad(dtype)
        if grad is None:
            return
        if self.accumulated is None:
            self.accumulated = grad.to(dtype)
        else:
            self.accumulated += grad  # without a cast, which would round twice

    def take_grad(self) -> torch.Tensor | None:
        """Take all unreduced gradients, and return their sum."""
        if self.accumulated is None:
            return self._take_unsharded_grad()
        self.keep_grad()
        grad, self.accumulated = self.accumulated, None
        return grad

    # Writes to the shard

    def versioned(self) -> list[torch.Tensor]:
        """The tensors whose versions count writes to the shard. Operations write the DTensor, users of ``to_local()``
        its local tensor, and a wrapper subclass its inner tensors. Each has a separate version."""
        local = _torch.local_of(self.sharded)
        return [self.sharded, local, *(leaf for leaf in _torch.leaves(local) if leaf is not local)]
