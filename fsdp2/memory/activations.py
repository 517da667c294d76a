"""``offload_activations``: what units save for backward waits in pinned host memory.

After the forward of each unit, a *chunk* is complete: what autograd has saved since the unit before. When the next unit
starts, the oldest chunks that the budget has no room for are copied to the host, and when that unit has ended, their
memory is freed. In backward, the first tensor that is read of a chunk brings back the chunk before it. So copies have
the time of one unit in both directions, and the CPU never waits for them.

Rules: only compute allocates and frees memory, so it is reused in the order of one stream. What something besides
autograd holds is not copied, since that would free nothing: parameters, masks, what the next unit reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp2.core import ParamGroup, Unit, _torch, comms, door, unit_of, units_under
from fsdp2.extras import torch_names
from fsdp2.extras.output import aligned
from fsdp2.extras.sizes import nbytes_of
from fsdp2.extras.units import sharded_unit

_CALLER = "fsdp2.memory.offload_activations"
_STREAM = "activations"  # of the copies in both directions


@dataclass(frozen=True)
class UnitActivations:
    """What one unit saved for backward in the last forward, in bytes.

    Attributes:
        name: the name of the unit. What outer units save before its forward counts, too.
        saved: all memory that may travel, so neither parameters nor small tensors.
        sent: what was copied to the host.
    """

    name: str
    saved: int
    sent: int = 0


class _Memory:
    """The memory of one or more saved tensors. It travels as a whole.

    Attributes:
        chunk: the last chunk that saved it, which is the first one that reads it in backward.
        saved: the tensors that autograd saved of it.
        host: its copy on the host, once it has been sent.
        returned: where it has come back to, and ``arrived``: the event that readers wait for.
    """

    def __init__(self, nbytes: int, chunk: _Chunk) -> None:
        self.nbytes, self.chunk = nbytes, chunk
        self.saved: list[ref[_Saved]] = []
        self.host: Tensor | None = None
        self.returned: Tensor | None = None
        self.arrived: torch.Event | None = None

    def tensors(self) -> list[Tensor]:
        """The saved tensors, unless it has left the device."""
        found = (each() for each in self.saved)
        return [each.tensor for each in found if each is not None and each.tensor is not None]

    def leave(self) -> None:
        """Free it on the device. Compute has waited for the copy."""
        for each in (each() for each in self.saved):
            if each is not None and each.tensor is not None:
                each.last_version, each.tensor = each.tensor._version, None


class _Chunk:
    """What one unit saved.

    Attributes:
        before: the chunk that backward reads next.
        is_over: nothing of it has to stay on the device any more.
    """

    def __init__(self, before: _Chunk | None) -> None:
        self.before = before
        self.is_over = False
        self.name, self.saved, self.sent = "", 0, 0
        self._memories: list[ref[_Memory]] = []  # autograd owns them

    def add(self, memory: _Memory) -> None:
        memory.chunk = self
        self._memories.append(ref(memory))

    def memories(self) -> list[_Memory]:
        """The memory that is still saved, and that no later chunk saved again."""
        found = (each() for each in self._memories)
        return [each for each in found if each is not None and each.chunk is self]

    @property
    def staying_nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories() if memory.host is None)


class _Saved:
    """What autograd holds in place of a saved tensor. With hooks, autograd does not compare versions, so this does.

    Attributes:
        tensor: the tensor, unless its memory has left the device.
        memory, chunk: its memory, and the chunk that saved it; None if it never travels.
    """

    __slots__ = ("__weakref__", "chunk", "last_version", "memory", "place", "tensor", "version")

    def __init__(self, tensor: Tensor, memory: _Memory | None = None, chunk: _Chunk | None = None) -> None:
        self.tensor: Tensor | None = tensor.detach()  # shares the version, and holds no node that would hold this
        self.version = self.last_version = tensor._version
        self.memory, self.chunk = memory, chunk
        if memory is not None:
            self.place = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
            memory.saved.append(ref(self))

    def value(self) -> Tensor:
        """The tensor, whose memory is on the device.

        Raises:
            RuntimeError: it was written since autograd saved it.
        """
        tensor, version = self.tensor, self.last_version
        if tensor is not None:
            version = tensor._version
        else:
            assert self.memory is not None
            assert self.memory.returned is not None
            dtype, *place = self.place
            memory = self.memory.returned
            tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), *place)
        if version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that forward saved for backward has been modified by an "
                f"inplace operation: it is at version {version}; expected version {self.version}. Clone it before you "
                "write it."
            )
        return tensor


class ActivationOffload:
    """Returned by :func:`offload_activations`. To stop, call ``remove()``, or use it as a context manager. What is on
    the host by then still comes back in its backward. ``str()`` shows a table of the last forward.

    Attributes:
        units: what units saved and sent in the last forward, in order.
        peak: the most bytes of saved activations on the device in the last forward: those that stay within the budget,
            those of the unit whose copies are on their way, and those of the unit that runs.
    """

    def __init__(self, module: nn.Module, budget: int, min_nbytes: int) -> None:
        root = sharded_unit(module, _CALLER)
        self.units: tuple[UnitActivations, ...] = ()
        self.peak = 0
        self._module, self._root = module, root
        self._budget, self._min_nbytes, self._device = budget, min_nbytes, root.mesh.device
        self._streams = comms.streams_for(self._device)
        self._hooks: saved_tensors_hooks | None = None  # while a forward runs
        self._depth = 0  # of calls of the module inside that forward
        self._chunk = _Chunk(None)  # the one that is not complete
        self._chunks: list[_Chunk] = []  # the complete ones of this forward
        self._staying: deque[_Chunk] = deque()  # of this and earlier forwards, oldest first
        self._held: list[_Memory] = []  # what was to be sent, but something else held it; it is asked once more
        self._leaving: list[tuple[list[_Memory], torch.Event | None]] = []  # with the ends of their copies
        self._arriving: list[tuple[list[Tensor], torch.Event | None]] = []
        self._reached: _Chunk | None = None  # by backward
        self._by_key: WeakValueDictionary[object, _Memory] = WeakValueDictionary()  # what has not been sent
        self._running: list[Unit] = []
        self._keys_of_params: set[object] | None = None  # those of the running units, once they are needed
        self._keys: WeakKeyDictionary[ParamGroup, tuple[list[nn.Parameter], set[object]]] = WeakKeyDictionary()

    def attach(self) -> None:
        """Install the hooks. Those before a forward run before the unit gathers, and so make room for that."""
        modules = [each for _, unit in units_under(self._module) for each in unit.modules if each is not self._module]
        for module in modules:
            module.register_forward_pre_hook(self.begin_unit, prepend=True)
            module.register_forward_hook(self.end_unit)
        self._module.register_forward_pre_hook(self.begin, prepend=True)
        self._module.register_forward_hook(self.end, always_call=True)

    def remove(self) -> None:
        """Stop. Later forwards keep their activations on the device."""
        for module in self._module.modules():
            torch_names.remove_hooks(module, self)

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        """``copy.deepcopy`` of a module copies its hooks. The copy shares this object, and so the budget."""
        return self

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("unit", "saved", "sent")]
        rows += [(each.name, str(each.saved), str(each.sent)) for each in self.units]
        rows.append(("bytes", *(str(sum(getattr(each, name) for each in self.units)) for name in ("saved", "sent"))))
        return aligned(rows)

    # Forward

    @_torch.runs_between_graphs
    def begin(self, module: nn.Module, _: Any) -> None:
        """A forward of the module begins."""
        if self._hooks is not None:
            if _torch.is_called_inside_itself(module):
                self._depth += 1
                return
            self._stop()  # torch called no hook when a KeyboardInterrupt ended the last forward
        if not torch.is_grad_enabled() or _torch.in_func_transform() or torch_names.has_saved_tensors_hooks():
            return  # hooks that are there, such as those of a checkpoint around the model, keep what is saved
        self._depth, self._running, self._keys_of_params = 0, [self._root], None
        self._chunk, self._chunks, self.peak = _Chunk(None), [], 0
        self._make_room()
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()

    @_torch.runs_between_graphs
    def begin_unit(self, module: nn.Module, _: Any) -> None:
        """The forward of a unit begins."""
        unit = unit_of(module)
        if self._hooks is not None and unit is not None:
            self._running.append(unit)
            self._keys_of_params = None
            self._make_room()

    @_torch.runs_between_graphs
    def end_unit(self, module: nn.Module, *_: Any) -> None:
        """The forward of a unit has ended."""
        unit = unit_of(module)
        if self._hooks is not None and unit is not None:
            if unit in self._running:  # not if the forward has called the module again
                self._running.remove(unit)
            self._keys_of_params = None
            self._complete(unit.name)
            self._free()

    @_torch.runs_between_graphs
    def end(self, *_: Any) -> None:
        """A forward of the module has ended, or raised."""
        if self._depth:
            self._depth -= 1
        elif self._hooks is not None:
            self._complete(self._root.name)
            self._stop()

    def _stop(self) -> None:
        assert self._hooks is not None
        self._hooks.__exit__()
        self._hooks = None
        self.units = tuple(UnitActivations(each.name, each.saved, each.sent) for each in self._chunks)

    @door.entry
    def pack(self, tensor: Tensor) -> _Saved:
        """Autograd saves ``tensor``."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
            return _Saved(tensor)
        nbytes, key = tensor.untyped_storage().nbytes(), torch_names.storage_key(tensor)
        if nbytes < self._min_nbytes or key in self._params():
            return _Saved(tensor)
        memory = self._by_key.get(key)
        if memory is None:
            memory = self._by_key[key] = _Memory(nbytes, self._chunk)
            self._chunk.add(memory)
        elif memory.chunk is not self._chunk:
            self._chunk.add(memory)
        return _Saved(tensor, memory, self._chunk)

    def _params(self) -> set[object]:
        """The keys of the unsharded parameters of the units that run."""
        if self._keys_of_params is None:
            groups = (group for unit in self._running for group in unit.groups)
            self._keys_of_params = {key for group in groups for key in self._keys_of(group)}
        return self._keys_of_params

    def _keys_of(self, group: ParamGroup) -> set[object]:
        params, keys = self._keys.get(group, (None, set()))
        if params is not group.unsharded.parameters:
            params = group.unsharded.parameters
            keys = {torch_names.storage_key(leaf) for param in params for leaf in _torch.leaves(param)}
            self._keys[group] = params, keys
        return keys

    def _complete(self, name: str) -> None:
        """Everything was saved that belongs to the chunk of the unit ``name``."""
        chunk, saved = self._chunk, self._chunk.staying_nbytes
        if saved:
            chunk.name, chunk.saved = name, saved
            self._chunks.append(chunk)
            self._staying.append(chunk)
            self._chunk = _Chunk(chunk)
        leaving = sum(memory.nbytes for memories, _ in self._leaving for memory in memories)
        self.peak = max(self.peak, leaving + sum(each.staying_nbytes for each in self._staying))

    @door.entry
    def _make_room(self) -> None:
        """Send what the budget has no room for. Copies that are on their way belong to earlier forwards."""
        self._free()
        self._settle()
        self._staying = deque(chunk for chunk in self._staying if chunk.memories())
        going = [memory for memory in self._held if memory.chunk.is_over and self._is_only_saved(memory)]
        self._held = []
        excess = sum(chunk.staying_nbytes for chunk in self._staying) - self._budget
        while excess > 0:
            chunk = self._staying.popleft()
            chunk.is_over = True
            excess -= chunk.staying_nbytes
            for memory in chunk.memories():
                (going if self._is_only_saved(memory) else self._held).append(memory)
        if going:
            self._send(going)

    def _is_only_saved(self, memory: _Memory) -> bool:
        """Whether only autograd holds ``memory``, on the device."""
        tensors = memory.tensors()
        if memory.host is not None or not tensors or tensors[0].untyped_storage().nbytes() != memory.nbytes:
            return False
        return torch_names.num_holders(tensors[0]) == len(tensors)

    def _send(self, going: list[_Memory]) -> None:
        written = self._streams.record()
        is_pinned = self._device.type != "cpu"
        with torch.no_grad(), self._streams.beside(_STREAM):
            self._streams.wait_here(written)  # copies read what compute has written
            with comms.observed(comms.Activity.COPY_TO_HOST):
                for memory in going:
                    (tensor, *_) = memory.tensors()
                    memory.host = torch.empty(memory.nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
                    memory.host.copy_(_bytes_of(tensor), non_blocking=True)
                    memory.chunk.sent += memory.nbytes
                    self._by_key.pop(torch_names.storage_key(tensor), None)  # nobody can save it again
            self._leaving.append((going, self._streams.record()))

    def _free(self, *needed: _Chunk | None) -> None:
        """Free what has been sent, except for what ``needed`` chunks read."""
        for memories, copied in self._leaving:
            self._streams.wait_here(copied)  # compute may write the memory that copies have read
            for memory in memories:
                if memory.chunk not in needed:
                    memory.leave()
        self._leaving.clear()

    # Backward

    @door.entry
    def unpack(self, saved: _Saved) -> Tensor:
        """Autograd reads what ``saved`` stands for."""
        if saved.memory is not None and saved.chunk is not None:
            if saved.chunk is not self._reached:
                self._reach(saved.chunk)
            if saved.tensor is None:
                if saved.memory.returned is None:
                    self._fetch([saved.memory])
                self._streams.wait_here(saved.memory.arrived)  # compute reads what has been copied
        return saved.value()

    def _reach(self, chunk: _Chunk) -> None:
        """Backward reads ``chunk``: the chunk before it comes back, too. What earlier reads of backward have brought
        back goes, which matters only if the graph is kept."""
        self._free(chunk, chunk.before)
        self._settle()
        if self._reached is not None:
            for memory in self._reached.memories():
                if memory.host is not None:
                    memory.returned = None
        self._reached = chunk
        for each in (chunk, chunk.before):
            if each is not None:
                self._fetch([memory for memory in each.memories() if memory.returned is None and not memory.tensors()])

    def _settle(self) -> None:
        for _, arrived in self._arriving:
            self._streams.wait_here(arrived)  # compute may free, and then write, the memory that copies have written
        self._arriving.clear()

    def _fetch(self, memories: list[_Memory]) -> None:
        if not memories:
            return
        with torch.no_grad():
            targets = [torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device) for memory in memories]
            free = self._streams.record()
            with self._streams.beside(_STREAM):
                self._streams.wait_here(free)  # copies write where compute has read something else
                with comms.observed(comms.Activity.COPY_TO_DEVICE):
                    for memory, target in zip(memories, targets, strict=True):
                        assert memory.host is not None
                        target.copy_(memory.host, non_blocking=True)
                arrived = self._streams.record()
        for memory, target in zip(memories, targets, strict=True):
            memory.returned, memory.arrived = target, arrived
        self._arriving.append((targets, arrived))


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory that ``tensor`` lies in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def offload_activations(
    module: nn.Module, budget: int | str = 0, *, min_nbytes: int | str = "1MiB"
) -> ActivationOffload:
    """Keep what forward saves for backward in pinned host memory, except for ``budget`` bytes. Call it after
    ``fully_shard``; it applies to all units that ``module`` contains by then.

    When a unit starts, the oldest saved activations beyond the budget are copied to the host, while the unit computes.
    Backward copies them back while it runs the unit that comes after them. So besides the budget, the device holds what
    two units have saved, the one that computes and its neighbour. Results are the same bits. What is left alone:

    - parameters, and what the program still uses: masks, tables of positions, outputs that you keep;
    - what activation checkpoints inside the model save and recompute. Their inputs are offloaded;
    - tensor subclasses, such as DTensors, and sparse tensors;
    - forwards inside transforms of ``torch.func``, or inside other hooks of saved tensors.

    On a mesh of CPUs, this has no effect, since the memory of the host is that of the device.

    Args:
        module: the root of a sharded model.
        budget: how much may stay on the device: bytes, or text such as ``"8GiB"``. The last units stay, which backward
            reads first.
        min_nbytes: tensors in smaller memory are not copied.

    Raises:
        ValueError: ``module`` is not sharded, or its activations are already offloaded; or an argument is not a size.

    Source: vDNN (Rhu et al., MICRO 2016), where layers are what units are here.
    """
    found = ActivationOffload(
        module,
        0 if budget == 0 else nbytes_of(budget, f"{_CALLER}: budget", "8GiB"),
        nbytes_of(min_nbytes, f"{_CALLER}: min_nbytes", "1MiB"),
    )
    for each in module.modules():
        hooks = each._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), ActivationOffload) for hook in hooks):
            raise ValueError(
                f"{_CALLER}: the activations of this {type(module).__name__} are already offloaded. Call remove() on "
                "what the earlier call returned."
            )
    if sharded_unit(module, _CALLER).mesh.device.type != "cpu":
        found.attach()
    return found
