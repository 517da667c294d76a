"""The memory that tensors hold while steps are recorded, as far as the program tells: shards and their gradients,
optimizer states, and activations. Plans know the rest; ``memory`` combines both.

Where the device's allocator has statistics, activations are part of the allocated bytes that nothing else explains.
Elsewhere, as on the CPU, autograd's saved tensors in the model's forward count, without parameters and buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fsdp2.core import ShardedParam, Unit, UnitTree, _torch, find_tensors
from fsdp2.extras import torch_names
from fsdp2.memory.plan import Held
from fsdp2.report.memory import ALLOCATED, Bytes
from fsdp2.report.modules import ModuleHook
from fsdp2.report.timeline import ROOT

# The events at which activations are read: between them, none begin or end that last.
_ASKED_AT = ("post_forward", "pre_backward", "post_backward", "end_backward", "wait", "reduce")


class HeldBytes:
    """The memory held on the device of ``tree``. ``saves``: count what autograd saves, where nothing else is known.

    Attributes:
        units: the units of ``tree``, by the names that they have now.
        knows_activations: whether there are figures for activations.
    """

    def __init__(self, tree: UnitTree, *, saves: bool) -> None:
        self.units: dict[str, Unit] = {unit.name: unit for unit in tree.units}
        self._device = tree.root.mesh.device
        self._allocated = _allocation(self._device)
        self._saved = SavedTensors(tree) if saves and self._allocated is None else None
        self._optimizers: dict[torch.optim.Optimizer, int] = {}  # with the number of parameters that have states
        self.knows_activations = self._allocated is not None or self._saved is not None

    def watched(self) -> AbstractContextManager[None]:
        """Count what autograd saves, until the block ends."""
        return nullcontext() if self._saved is None else self._saved.watched()

    def at_start(self) -> Bytes:
        """The bytes held when a step begins."""
        found: Bytes = {}
        for name, unit in self.units.items():
            found[name, Held.SHARDS] = self._nbytes(_torch.local_of(param.sharded) for param in _params(unit))
            found |= self.landed(name)
        return found | self._activations()

    def landed(self, unit: str) -> Bytes:
        """The bytes after the gradients of ``unit`` may have changed."""
        grads = (grad for param in _params(self.units[unit]) if (grad := param.sharded.grad) is not None)
        return {(unit, Held.SHARD_GRADIENTS): self._nbytes(map(_torch.local_of, grads))}

    def at(self, event: str, unit: str) -> Bytes:
        """The bytes that have changed when ``event`` happens to ``unit``."""
        if self._saved is not None:
            self._saved.take(event, unit)
        return self._activations() if event in _ASKED_AT else {}

    def steps(self, optimizer: torch.optim.Optimizer) -> Bytes:
        """Called before ``optimizer`` steps: the bytes held since before the first step, if it was not seen yet."""
        return {} if optimizer in self._optimizers else self._states(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> Bytes:
        """Called after ``optimizer`` has stepped. Its states come from its first step or from a loaded state dict."""
        has_changed = self._optimizers.get(optimizer) != len(optimizer.state)
        return (self._states(optimizer) if has_changed else {}) | self._activations()

    def _states(self, optimizer: torch.optim.Optimizer) -> Bytes:
        self._optimizers[optimizer] = len(optimizer.state)
        states = [tensor for each in self._optimizers for tensor in find_tensors(dict(each.state), [])]
        return {("", Held.OPTIMIZER_STATES): self._nbytes(states)}

    def _activations(self) -> Bytes:
        if self._allocated is not None:
            return {("", ALLOCATED): self._allocated()}
        return {} if self._saved is None else self._saved.changed()

    def _nbytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """The bytes of the storages of ``tensors`` on the device, each counted once."""
        leaves = (leaf for tensor in tensors for leaf in _torch.leaves(tensor))
        storages = {torch_names.storage_key(each): each for each in leaves if each.device.type == self._device.type}
        return sum(each.untyped_storage().nbytes() for each in storages.values())


def _params(unit: Unit) -> Iterator[ShardedParam]:
    return (param for group in unit.groups for param in group.params)


def _allocation(device: torch.device) -> Callable[[], int] | None:
    """A function that asks the allocator of ``device`` for all allocated bytes; None if it has no statistics."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    stats = getattr(module, "memory_stats_as_nested_dict", None)
    if stats is not None:  # ``memory_allocated`` makes a flat dict of all statistics first
        return lambda: stats(device)["allocated_bytes"]["all"]["current"]
    allocated = getattr(module, "memory_allocated", None)
    return None if allocated is None else lambda: allocated(device)


class SavedTensors:
    """Counts what autograd saves in the forwards of ``tree``, by the unit that runs, until its memory is freed.

    Tensors that an activation checkpoint or another hook of the user takes are not counted: the innermost hook wins.
    """

    def __init__(self, tree: UnitTree) -> None:
        self._tree = tree
        self._units: dict[str, Unit] = {unit.name: unit for unit in tree.units}
        self._lasting = {torch_names.storage_key(buffer) for module in tree.root.modules for buffer in module.buffers()}
        for name in self._units:
            self._note_parameters(name)
        self._running: list[str] = []
        self._counted: set[int] = set()  # storages
        self._held: dict[str, int] = dict.fromkeys(self._units, 0)
        self._told: dict[str, int] = {}
        self._hooks: list[Any] = []  # of running forwards

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count in the block."""
        (module, *_) = self._tree.root.modules
        before = module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True)
        after = module.register_forward_hook(ModuleHook(self._leave), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            while self._hooks:  # the last step that is recorded ends in the forward of the next one
                self._hooks.pop().__exit__()

    def take(self, event: str, unit: str) -> None:
        """Called when ``event`` happens to ``unit``."""
        if event == "pre_forward":
            self._running.append(unit)
        elif event == "post_forward" and unit in self._running:
            del self._running[self._running.index(unit) :]
        elif event == "wait":
            self._note_parameters(unit)

    def changed(self) -> Bytes:
        """The bytes of the units for which they have changed since the last call."""
        found = {unit: nbytes for unit, nbytes in self._held.items() if self._told.get(unit) != nbytes}
        self._told |= found
        return {(unit, Held.SAVED): nbytes for unit, nbytes in found.items()}

    def _note_parameters(self, unit: str) -> None:
        whole = (param.unsharded for param in _params(self._units[unit]) if param.unsharded is not None)
        self._lasting.update(torch_names.storage_key(leaf) for param in whole for leaf in _torch.leaves(param))

    def _enter(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or _torch.in_transform():
            return
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def _leave(self, *_: Any) -> None:
        if self._hooks and not torch.compiler.is_compiling():
            self._hooks.pop().__exit__()

    @_torch.runs_between_graphs  # compiled code calls it where it saves tensors
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        unit = self._running[-1] if self._running else ROOT  # counts what it is the first to save
        for leaf in _torch.leaves(tensor):
            key, storage = torch_names.storage_key(leaf), leaf.untyped_storage()
            if key not in self._lasting and key not in self._counted:
                self._counted.add(key)
                self._held[unit] += storage.nbytes()
                weakref.finalize(storage, self._free, key, unit, storage.nbytes()).atexit = False
        return tensor

    @_torch.runs_between_graphs
    def _free(self, key: int, unit: str, nbytes: int) -> None:
        self._counted.remove(key)
        self._held[unit] -= nbytes


@_torch.runs_between_graphs
def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
