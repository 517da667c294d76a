"""The memory that gradients land in, with the DTensors that users see on it: made once, used again in every step.

Making a view and a DTensor per parameter costs more Python than all else of landing a group. So both are kept. Their
memory is not: it is freed when users have let go of the gradients, and allocated again for the next ones.

Nobody may see a gradient change that he still holds, or a view of one. So what is kept is used again only if all
references to it are ours, which reference counts tell. Otherwise it is left to whoever holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp2 import _torch
from fsdp2.comm.memory import tensor_on

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, stride and offset in elements


class KeptGradients:
    """The gradients of one reduce plan, on one flat buffer ``[numel]``. ``places``: where each lies. ``as_gradient``:
    the DTensor of gradient i on its local tensor. ``are_set``: whether some parameter has a gradient.

    Attributes:
        flat: the buffer; None before the first use.
        locals: the local tensors of ``grads``.
        grads: the gradients.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        places: Sequence[Place],
        as_gradient: Callable[[int, torch.Tensor], torch.Tensor],
        are_set: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._places, self._as_gradient, self._are_set = places, as_gradient, are_set
        self._is_idle = False  # nobody else has references, and the memory is freed
        self._storage = torch.UntypedStorage(0, device=device)
        self._objects: list[torch.Tensor] = []  # that users, or what is in flight, may have references to
        self._counts: list[int] = []
        self.flat: torch.Tensor | None = None
        self.locals: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []

    def buffer(self) -> torch.Tensor:
        """Uninitialised memory ``[numel]`` for the next reduction, allocated on the current stream: ``flat``, unless
        its values are to be added to gradients that are there, or to what is in flight."""
        self.free()
        if not self._is_idle:
            if not _torch.COUNTS_REFERENCES or self._are_set() or self._is_in_flight():
                return torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._make()  # the first use; or a user holds what was kept, and has it for himself from now on
        self._is_idle = False
        assert self.flat is not None
        self._storage.resize_(self._numel * self._dtype.itemsize)
        return self.flat

    def free(self) -> None:
        """Free the memory if nobody else has references any more."""
        if self.flat is None or self._is_idle:
            return
        if _torch.reference_counts(self._objects, self._storage) == self._counts:
            self._is_idle = True
            self._storage.resize_(0)

    def _make(self) -> None:
        storage = torch.UntypedStorage(self._numel * self._dtype.itemsize, device=self._device)
        with torch.inference_mode(False), torch.no_grad():
            self.flat = tensor_on(storage, 0, (self._numel,), (1,), self._dtype)
            itemsize = self._dtype.itemsize
            self.locals = [
                tensor_on(storage, offset * itemsize, shape, stride, self._dtype)
                for shape, stride, offset in self._places
            ]
            self.grads = [self._as_gradient(i, local) for i, local in enumerate(self.locals)]
        self._storage = storage
        self._objects = [self.flat, *self.locals, *self.grads]
        del storage  # a reference
        self._counts = _torch.reference_counts(self._objects, self._storage)

    def _is_in_flight(self) -> bool:
        flat = self._objects[:1]
        return bool(flat) and _torch.reference_counts(flat, self._storage)[1] != self._counts[1]
