"""What a model computes and keeps, observed under fake tensors: nothing is allocated, nothing is computed.

One block of each kind runs, forward and backward; the others of its kind count as much. All that is outside of blocks
runs once with the blocks left out. Activations are what autograd saves, each storage counted once; parameters, and what
all blocks are given alike, are not counted per block.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fsdp2.plan.trees import find_tensors, map_tensors
from fsdp2.tools import torch_names
from fsdp2.tools.planner.blocks import Units, structure
from fsdp2.tools.planner.work import Checkpointing, Param, UnitWork, Work

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class ModelWork:
    """``kinds``: one block of each kind, with each checkpointing. ``order``: the units as forward runs them: a kind's
    number for a block, a path for a module beside the blocks. ``rest``: what is computed outside of blocks."""

    kinds: tuple[dict[Checkpointing, UnitWork], ...]
    order: tuple[int | str, ...]
    large: dict[str, tuple[Param, ...]]
    root: tuple[Param, ...]
    rest: UnitWork

    def units(self, checkpointing: Checkpointing) -> tuple[UnitWork, ...]:
        """In the order of forward, without the root. What is outside of blocks is counted with the last of them, or
        behind them: in language models, this is the head."""
        units = []
        for key in self.order:
            if isinstance(key, int):
                units.append(self.kinds[key][checkpointing])
            else:
                units.append(UnitWork(key, self.large[key], Work(), Work(), 0.0, 0.0))
        last = units[-1]
        if last.is_block:
            return (*units, self.rest)
        return (*units[:-1], replace(self.rest, name=last.name, params=last.params))


def observe(
    model: nn.Module,
    units: Units,
    inputs: Callable[[], Any],
    loss: Loss,
    dtype: torch.dtype,
    master_dtype: torch.dtype | None = None,
) -> ModelWork:
    """Run ``model`` under fake tensors. Its parameters may be on the meta device.

    Args:
        inputs: makes the inputs of ``model``: a tensor, or a tuple of arguments, or a dict of them by name.
        loss: gets what ``model`` returns.
        dtype: in which floating-point parameters and inputs are in forward.
        master_dtype: that of the shards of parameters that are trained; None is that of the model.
    """
    blocks = {path: model.get_submodule(path) for path in units.block_paths}
    kinds: dict[Any, list[str]] = {}
    for path, block in blocks.items():
        kinds.setdefault(structure(block), []).append(path)
    with torch_names.fake_tensors(), _masks_as_with_values(), _FusedAttention():
        made = _Fakes(model, dtype)
        given = _as_arguments(made.cast(inputs()))
        calls = _calls(model, made, given, units, [paths[0] for paths in kinds.values()])
        shared = calls.shared_storages()
        per_kind = []
        for paths in kinds.values():
            path = paths[0]
            if path not in calls.inputs:
                raise ValueError(f"plan: the forward does not call block '{path}' of this {type(model).__name__}.")
            seen = _observe(blocks[path], made.of(path), calls.inputs[path], _sum_of_outputs, shared)
            params = _params(blocks[path].named_parameters(), master_dtype)
            per_kind.append({each: seen.unit(path, params, each) for each in Checkpointing})
        with _left_out({blocks[path]: calls.outputs[kind[0]] for kind in kinds.values() for path in kind}):
            seen = _observe(model, made.of(""), given, loss, set())
    numbers = {path: index for index, paths in enumerate(kinds.values()) for path in paths}
    own = {path: model.get_submodule(path).named_parameters(recurse=False) for path in units.large}
    large = {path: _params(params, master_dtype) for path, params in own.items()}
    inside = {id(param) for path in (*blocks, *large) for param in model.get_submodule(path).parameters()}
    beside = [(name, param) for name, param in model.named_parameters() if id(param) not in inside]
    root = _params(beside, master_dtype)
    rest = replace(seen.unit("(outside of blocks)", (), Checkpointing.NONE), is_block=False)
    return ModelWork(tuple(per_kind), tuple(numbers.get(path, path) for path in calls.order), large, root, rest)


@contextmanager
def _masks_as_with_values() -> Iterator[None]:
    """transformers cannot see in fake positions that no sequences are packed, and would make a mask for it."""
    masking, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    original = getattr(masking, name, None)
    if original is None:
        yield
        return
    setattr(masking, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, name, original)


class _FusedAttention(TorchFunctionMode):
    """Dropout of attention is left out: on a CPU it keeps all scores, which kernels of GPUs do not."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        return function(*args, **kwargs)


def language_model_loss(output: Any) -> Tensor:
    """Cross-entropy in fp32 of logits: of the last dim of a tensor, or of an output's ``logits``."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"plan: the model returned a {type(output).__name__}, expected logits, as a tensor or in an attribute "
            "'logits'. Pass Workload(loss=...), a function of what the model returns."
        )
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _params(named: Iterable[tuple[str, nn.Parameter]], master_dtype: torch.dtype | None) -> tuple[Param, ...]:
    return tuple(
        Param(name, tuple(param.shape), shard_dtype(param, master_dtype), param.requires_grad) for name, param in named
    )


def shard_dtype(param: nn.Parameter, master_dtype: torch.dtype | None) -> torch.dtype:
    """Of its shards. Only what is trained has master weights."""
    is_trained = param.requires_grad and param.is_floating_point()
    return master_dtype if is_trained and master_dtype is not None else param.dtype


def _as_arguments(given: Any) -> Inputs:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


def _sum_of_outputs(output: Any) -> Tensor:
    """A loss whose backward starts from what the next block would give."""
    tensors = [each for each in find_tensors((output,), []) if each.requires_grad]
    return _Given.apply(*tensors)


class _Given(torch.autograd.Function):
    """Its backward gives gradients without computing them."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.likes = [(each.shape, each.dtype) for each in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.likes)


class _LeftOut(torch.autograd.Function):
    """In the place of a block: its output comes from nowhere, and so does the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, entry: Tensor, like: Tensor) -> Tensor:
        ctx.like = (entry.shape, entry.dtype)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shape, dtype = ctx.like
        return grad.new_empty(shape, dtype=dtype), None


class _Fakes:
    """Fake parameters and buffers of a model, in the dtype of its forward."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        for name, param in model.named_parameters():
            self.tensors[name] = self._like(param, dtype if param.is_floating_point() else param.dtype)
        for name, buffer in model.named_buffers():
            self.tensors[name] = self._like(buffer, buffer.dtype)

    @staticmethod
    def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype, requires_grad=tensor.requires_grad)

    def of(self, path: str) -> dict[str, Tensor]:
        """By their names inside the module at ``path``."""
        prefix = f"{path}." if path else ""
        return {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)}

    def cast(self, given: Any) -> Any:
        return map_tensors(lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf, given)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class _Calls:
    """``order``: units as forward called them. ``inputs`` and ``outputs``: of the first block of each kind.
    ``arguments``: what each block was given. It stays here, or a storage could get the address of one that is gone."""

    order: list[str]
    inputs: dict[str, Inputs]
    outputs: dict[str, Any]
    arguments: dict[str, list[Tensor]]

    def shared_storages(self) -> set[int]:
        counts = Counter(storage for given in self.arguments.values() for storage in set(map(_storage, given)))
        return {storage for storage, count in counts.items() if count > 1}


def _calls(model: nn.Module, made: _Fakes, given: Inputs, units: Units, firsts: Sequence[str]) -> _Calls:
    """One forward without gradients, in which the first block of each kind runs, and the others return as much."""
    found = _Calls([], {}, {}, {})
    handles = []
    first_of = {structure(model.get_submodule(path)): path for path in firsts}
    originals: dict[nn.Module, Callable[..., Any]] = {}

    def watch(path: str, module: nn.Module, *, is_block: bool) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.order.append(path)
            if is_block:
                found.arguments[path] = find_tensors((args, kwargs), [])
                if path in firsts:
                    found.inputs[path] = (args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if path in firsts:
                found.outputs[path] = output

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    def stand_in(module: nn.Module, first: str) -> None:
        originals[module] = module.__dict__.get("forward", _MISSING)
        module.forward = lambda *args, **kwargs: map_tensors(torch.empty_like, found.outputs[first])

    try:
        for path in units.block_paths:
            module = model.get_submodule(path)
            watch(path, module, is_block=True)
            first = first_of[structure(module)]
            if path != first:
                stand_in(module, first)
        for path in units.large:
            watch(path, model.get_submodule(path), is_block=False)
        with torch.no_grad():
            functional_call(model, made.of(""), *given)
    finally:
        for handle in handles:
            handle.remove()
        _restore(originals)
    return found


_MISSING: Any = object()


def _restore(originals: Mapping[nn.Module, Any]) -> None:
    for module, forward in originals.items():
        if forward is _MISSING:
            del module.forward
        else:
            module.forward = forward


@contextmanager
def _left_out(outputs: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Meanwhile each module of ``outputs`` returns tensors like these, and keeps nothing."""
    originals = {module: module.__dict__.get("forward", _MISSING) for module in outputs}

    def stand_in(like: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = find_tensors((args, kwargs), [])
            entry = next((leaf for leaf in leaves if leaf.requires_grad), leaves[0])
            return map_tensors(lambda leaf: _LeftOut.apply(entry, leaf), like)

        return forward

    try:
        for module, like in outputs.items():
            module.forward = stand_in(like)
        yield
    finally:
        _restore(originals)


# One run


@dataclass(frozen=True)
class _Seen:
    """One forward and backward. ``input_nbytes``: what full checkpointing keeps. ``kept_nbytes``: what selective
    checkpointing keeps besides. ``full`` and ``selective``: what these run again. ``peak_nbytes``: the most that was
    there in backward, gradients of parameters included."""

    forward: Work
    backward: Work
    saved_nbytes: int
    input_nbytes: int
    kept_nbytes: int
    full: _Again
    selective: _Again
    peak_nbytes: int

    def unit(self, name: str, params: tuple[Param, ...], checkpointing: Checkpointing) -> UnitWork:
        again, saved, read = Work(), self.saved_nbytes, self.saved_nbytes
        if checkpointing is Checkpointing.FULL:
            again, saved = self.full.work, self.input_nbytes
        elif checkpointing is Checkpointing.SELECTIVE:
            again = self.selective.work
            saved = min(self.input_nbytes + self.kept_nbytes, self.saved_nbytes)
            read = self.input_nbytes + self.selective.read_nbytes
        return UnitWork(
            name,
            params,
            self.forward,
            self.backward + again,
            saved,
            working_nbytes=max(self.peak_nbytes - saved, 0),
            unread_nbytes=max(saved - read, 0),
            is_block=True,
        )


def _observe(module: nn.Module, tensors: dict[str, Tensor], given: Inputs, loss: Loss, shared: set[int]) -> _Seen:
    args, kwargs = map_tensors(lambda leaf: _as_entry(leaf, shared), given)
    entries = {_storage(leaf): leaf for leaf in find_tensors((args, kwargs), [])}
    params = {_storage(tensor) for tensor in tensors.values()}
    fixed = params | shared
    saved: dict[int, int] = {}
    needed: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Tensor) and _storage(tensor) not in fixed:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            needed.update(forward.writers_of([tensor]))
        return tensor

    memory = _Live()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Counter(memory, params) as forward:
        output = functional_call(module, tensors, args, kwargs)
        result = loss(output)
        del output
    entry_nbytes = sum(leaf.untyped_storage().nbytes() for key, leaf in entries.items() if key not in fixed)
    held = sum(nbytes for key, nbytes in saved.items() if key in entries)  # made before this run
    memory.peak = memory.now
    with _Counter(memory, params) as backward:
        if result.requires_grad:
            result.backward()
    for tensor in tensors.values():
        tensor.grad = None
    return _Seen(
        forward=forward.total,
        backward=backward.total,
        saved_nbytes=sum(saved.values()),
        input_nbytes=entry_nbytes,
        kept_nbytes=sum(op.kept_nbytes for op in forward.ops),
        full=_run_again(forward.ops, needed, keeps=False),
        selective=_run_again(forward.ops, needed, keeps=True),
        peak_nbytes=memory.peak + held,
    )


def _as_entry(leaf: Tensor, shared: set[int]) -> Tensor:
    """An input as the unit before would hand it over: a leaf with a gradient, unless all blocks get it."""
    is_own = leaf.is_floating_point() and _storage(leaf) not in shared
    return leaf.detach().requires_grad_(is_own)


@dataclass(frozen=True)
class _Op:
    """One operation. ``sources``: which operations wrote what it reads. ``kept_nbytes``: of its results, if selective
    checkpointing keeps them."""

    work: Work
    sources: tuple[int, ...]
    kept_nbytes: int = 0


@dataclass(frozen=True)
class _Again:
    """What runs again in backward, and how much of what was kept is read."""

    work: Work
    read_nbytes: int


def _run_again(ops: Sequence[_Op], needed: Iterable[int], *, keeps: bool) -> _Again:
    """What gives backward the results of ``needed``, and no more: what only the output of a block needs does not run
    again. ``keeps``: kept results are there already."""
    work, read_nbytes = Work(), 0
    left, seen = list(needed), set()
    while left:
        number = left.pop()
        if number in seen:
            continue
        seen.add(number)
        op = ops[number]
        if keeps and op.kept_nbytes:
            read_nbytes += op.kept_nbytes
        else:
            work += op.work
            left += op.sources
    return _Again(work, read_nbytes)


class _Live:
    """Bytes of storages that operations made and that are still there."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: set[int] = set()

    def made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class _Counter(torch_names.DispatchMode):
    """Notes what operations compute, move and read. Attention and every other matrix product may be kept."""

    def __init__(self, memory: _Live, fixed: set[int]) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self._memory = memory
        self._writers: dict[int, int] = {}  # of storages, the operation that wrote them last
        self._num_products = 0
        self._fixed = frozenset(fixed)
        self._inside = set(fixed)  # storages that other kernels than products made, and parameters
        self._crossed: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        inputs, outputs = find_tensors((args, kwargs), []), find_tensors((result,), [])
        known = {_storage(each) for each in inputs}
        new = [each for each in outputs if _storage(each) not in known]
        for each in new:
            self._memory.made(each)
            self._inside.discard(_storage(each))  # an address that was freed
            self._crossed.discard(_storage(each))
        name = function.name().split("::")[-1].split(".")[0]
        if not new and not function._schema.is_mutable:
            return result  # a view
        sources = tuple(self.writers_of(inputs))
        self._writers.update({_storage(each): len(self.ops) for each in outputs})
        work = _work_of(function, name, args, kwargs, result)
        if work is not None:
            kept_nbytes = sum(each.untyped_storage().nbytes() for each in new) if self._keeps(name) else 0
            self.ops.append(_Op(work + self._beside_product(inputs), sources, kept_nbytes))
        else:
            self.ops.append(_Op(Work() if "empty" in name else self._moved(inputs, outputs), sources))
        return result

    @property
    def total(self) -> Work:
        return sum((op.work for op in self.ops), Work())

    def writers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """The operations that wrote ``tensors``, unless they were there before."""
        return {self._writers[_storage(each)] for each in tensors if _storage(each) in self._writers}

    def _keeps(self, name: str) -> bool:
        if name not in ("mm", "addmm"):
            return "scaled_dot_product" in name
        self._num_products += 1
        return self._num_products % 2 == 1

    def _beside_product(self, inputs: list[Tensor]) -> Work:
        """Other kernels write its operands, unless products or parameters are these."""
        return Work(fused_nbytes=sum(self._crosses(x) for x in inputs if _storage(x) in self._inside - self._fixed))

    def _moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> Work:
        """A fused kernel reads what products made, and what was there before."""
        fused = sum(self._crosses(each) for each in inputs if _storage(each) not in self._inside)
        self._inside.update(map(_storage, outputs))
        return Work(moved_nbytes=sum(map(_nbytes, [*inputs, *outputs])), fused_nbytes=fused)

    def _crosses(self, tensor: Tensor) -> int:
        """Bytes that a kernel leaves for another one, counted once."""
        if _storage(tensor) in self._crossed:
            return 0
        self._crossed.add(_storage(tensor))
        return _nbytes(tensor)


def _nbytes(tensor: Tensor) -> int:
    """What a kernel reads or writes of ``tensor``: an expanded dim only once."""
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    numel = 1
    for size in sizes:
        numel *= size
    return numel * tensor.dtype.itemsize


def _work_of(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Work | None:
    """Of matrix products and attention; None for all else."""
    if "scaled_dot_product" in name:
        return Work(other=_attention_flops(name, args, kwargs))
    if name == "_grouped_mm":
        first, second = args[0], args[1]
        rows = first[0].numel() if second.dim() < first.dim() else first.numel()
        return Work(other=2.0 * rows * second.shape[-1])
    from torch.utils.flop_counter import flop_registry  # imports triton, which `import fsdp2` must not

    formula = flop_registry.get(function.overloadpacket)
    if formula is None:
        return None
    flops = float(formula(*args, **kwargs, out_val=result))
    if name in ("mm", "addmm"):
        operands = [each for each in args if isinstance(each, Tensor)][-2:]
        return Work(linear=flops, operand_numel=sum(each.numel() for each in operands))
    return Work(other=flops)


def _attention_flops(name: str, args: Any, kwargs: Any) -> float:
    """Two products forward, five backward; half of all pairs if it is causal."""
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]
    value = args[3] if is_backward else args[2]
    pairs = query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
    is_causal = kwargs.get("is_causal", any(each is True for each in args))
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
    return flops * (2.5 if is_backward else 1.0) * (0.5 if is_causal else 1.0)
