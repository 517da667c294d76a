"""What a model computes and keeps, observed under fake tensors: nothing is allocated, nothing is computed.

The model runs once. Of blocks that are called in the same way, only the first runs where it is called, forward and
backward; the others count the same. Activations are what autograd saves, each storage counted once; inputs of several
blocks are counted outside of blocks. The parameters of a unit do not depend on the run.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fsdp2.core import find_tensors, map_tensors
from fsdp2.extras import torch_names
from fsdp2.planner.blocks import Units, params_of_units, structure
from fsdp2.planner.compiled import is_tracing, saved_when_compiled
from fsdp2.planner.scenario import Kernels, Precision
from fsdp2.planner.work import Attention, Checkpointing, Param, Product, UnitWork, Work
from fsdp2.planner.workload import Workload, cause_of, first_line

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class ModelWork:
    """What a model has and what its forward calls.

    Attributes:
        kinds: blocks that are called in the same way, with each checkpointing.
        calls: the calls of units, in the order of forward.
        params: the parameters of each unit, by its path; those of the model itself by "".
        blocks: paths of blocks.
        rest: the work outside of blocks.
        ignored: parameters that stay whole on each rank.
        buffers_nbytes: bytes of buffers, which stay whole, too.
        num_samples: those that the workload's own inputs have; None if the inputs are tokens.
    """

    kinds: tuple[dict[Checkpointing, UnitWork], ...]
    calls: tuple[Call, ...]
    params: dict[str, tuple[Param, ...]]
    blocks: frozenset[str]
    rest: UnitWork
    ignored: tuple[Param, ...] = ()
    buffers_nbytes: int = 0
    num_samples: int | None = None

    @property
    def root(self) -> tuple[Param, ...]:
        return self.params[""]

    def units(self, checkpointing: Checkpointing) -> tuple[UnitWork, ...]:
        """One entry for each call, in the order of forward, without the root. Work outside of blocks is counted with
        the last of them, or after them: in language models, this is the head."""
        units = []
        for call in self.calls:
            work = self._bare(call.path) if call.kind is None else self.kinds[call.kind][checkpointing]
            named = replace(work, name=call.path, params=self.params[call.path])
            units.append(replace(named, has_backward=call.has_backward, hands_on=call.hands_on))
        last = units[-1]
        if last.is_block or sum(unit.name == last.name for unit in units) > 1:
            return (*units, self.rest)
        own = {name: getattr(last, name) for name in ("name", "params", "has_backward", "hands_on")}
        return (*units[:-1], replace(self.rest, **own))

    @property
    def members(self) -> tuple[UnitWork, ...]:
        """All units in the order of the model, without their work. Units that this forward does not use also have
        gradients and optimizer states, since another forward may use them."""
        return tuple(self._bare(path) for path in self.params if path)

    def _bare(self, path: str) -> UnitWork:
        """The unit at ``path`` without its work."""
        return UnitWork(path, self.params[path], Work(), Work(), 0.0, 0.0, is_block=path in self.blocks)


@dataclass(frozen=True)
class Call:
    """A call of the unit at ``path``. ``kind`` is set for a block. ``has_backward``: its output needs a gradient.
    ``hands_on``: its input does, too."""

    path: str
    kind: int | None
    has_backward: bool
    hands_on: bool


def observe(model: nn.Module, units: Units, workload: Workload, ignored: Collection[nn.Parameter] = ()) -> ModelWork:
    """What ``model`` has, and its work for ``workload``. It runs under fake tensors, so its parameters may be on the
    meta device. ``ignored`` parameters are not sharded.

    Raises:
        ValueError: the model cannot run under fake tensors.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints the traceback of what is raised anyway
    before, log.disabled = log.disabled, True
    try:
        return _observed(model, units, workload, ignored)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        takes = "Pass Workload(inputs=...) if it does not take tokens"
        if workload.inputs is not None:
            takes = "See whether it takes what Workload.inputs makes"
        raise ValueError(
            f"plan: this {type(model).__name__} does not run under fake tensors ({type(error).__name__}: "
            f"{first_line(error)}). {takes}, and read no values of tensors in forward."
        ) from error
    finally:
        log.disabled = before


def _observed(model: nn.Module, units: Units, workload: Workload, ignored: Collection[nn.Parameter]) -> ModelWork:
    shape = (workload.batch, workload.sequence // workload.context_parallel)
    inputs = workload.inputs or (lambda: torch.zeros(shape, dtype=torch.int64))
    dtype = Precision(workload.precision).dtype
    with torch_names.fake_tensors(), _masks_as_with_values(), _AsOnGPU(), _without_caches(model):
        made = _Fakes(model, dtype)
        given = _as_arguments(made.inputs(_made_by(inputs)))
        num_samples = _num_samples(given, shape)
        calls = _Calls(model, units, made, is_compiled=Kernels(workload.kernels).are_compiled)
        with calls.watched():
            seen = _run(calls.outside, partial(_forward, model, made), given, _checked_loss(workload))
        shared = calls.shared_storages()
        found = list(calls.kinds.values())
        kinds = [{each: kind.seen.unit(kind.path, each, shared) for each in Checkpointing} for kind in found]
        rest = seen.unit("(outside of blocks)", Checkpointing.NONE, set())
        saved = {key: nbytes for kind in found for key, nbytes in kind.seen.saved.items() if key in shared}
        shared_nbytes = sum(nbytes for key, nbytes in saved.items() if key not in seen.saved)
    if not kinds:
        raise ValueError(
            f"plan: the forward of this {type(model).__name__} calls none of its blocks, such as "
            f"'{units.block_paths[0]}'. Call them as modules, not by other methods: fully_shard sees only these calls."
        )
    params = {path: _params(own.items(), workload) for path, own in params_of_units(model, units, ignored).items()}
    return ModelWork(
        kinds=tuple(kinds),
        calls=tuple(calls.found),
        params=params,
        blocks=frozenset(units.block_paths),
        rest=replace(rest, is_block=False, saved_nbytes=rest.saved_nbytes + shared_nbytes),
        ignored=_params([("", param) for param in ignored], workload),
        buffers_nbytes=sum(buffer.nbytes for buffer in model.buffers()),
        num_samples=num_samples,
    )


def _made_by(inputs: Callable[[], Any]) -> Any:
    try:
        return inputs()
    except (Exception, SystemExit) as error:
        raise ValueError(f"plan: Workload.inputs failed ({cause_of(error)}).") from error


def _num_samples(given: Inputs, shape: tuple[int, int]) -> int | None:
    """The length of the first dim of the first tensor, unless its elements are as many tokens as the workload says."""
    first = next(iter(find_tensors(given, [])), None)
    if first is None or (tuple(first.shape) == shape and not first.is_floating_point()):
        return None
    return first.shape[0] if first.dim() else 1


@contextmanager
def _temporarily(name: str, value: Any, owners: Iterable[Any]) -> Iterator[None]:
    """Inside the block, the attribute ``name`` of all ``owners`` is ``value``."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        for owner, _ in before:
            setattr(owner, name, value)
        yield
    finally:
        for owner, original in before:
            setattr(owner, name, original)


def _without_caches(model: nn.Module) -> AbstractContextManager[None]:
    """Training needs no cache of keys and values. An input called ``use_cache`` still overrides the config."""
    return _temporarily("use_cache", False, cache_configs(model).values())


def cache_configs(model: nn.Module) -> dict[str, Any]:
    """Configs that have ``use_cache``, as in Hugging Face, by the path of a module that holds it."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            found.setdefault(id(config), (path, config))
    return dict(found.values())


def _masks_as_with_values() -> AbstractContextManager[None]:
    """transformers cannot see from fake positions that no sequences are packed, and would make a mask for that."""
    masking, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    return _temporarily(name, lambda position_ids: None, [masking] if hasattr(masking, name) else [])


class _AsOnGPU(TorchFunctionMode):
    """What torch does on GPUs, but not on the CPU, where fake tensors are: attention with dropout keeps no scores, and
    RMSNorm is one kernel."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        elif function is nn.functional.rms_norm and not is_tracing():
            return _RMSNorm.apply(*args[:1], *args[2:3], *(kwargs[key] for key in ("weight",) if key in kwargs))
        return function(*args, **kwargs)


class _RMSNorm(torch.autograd.Function):
    """Moves and keeps what torch's kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        ctx.like_weight = None if weight is None else (weight.shape, weight.dtype)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, _ = ctx.saved_tensors
        return x * grad, ctx.like_weight and x.new_empty(ctx.like_weight[0], dtype=ctx.like_weight[1])


def _checked_loss(workload: Workload) -> Callable[[Any], torch.Tensor]:
    given = workload.loss
    if given is None and workload.kernels == Kernels.COMPILED_LOSS.value:
        return lambda output: _CompiledLoss.apply(_logits_of(output))
    if given is None:
        return language_model_loss

    def loss(output: Any) -> torch.Tensor:
        try:
            value = given(output)
        except Exception as error:
            raise ValueError(
                f"plan: Workload.loss failed for a {_kind_of(output)}, which the model returned "
                f"({type(error).__name__}: {first_line(error)})."
            ) from error
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"plan: Workload.loss returned {kind}, expected a tensor without dims.")
        return value

    return loss


def language_model_loss(output: Any) -> Tensor:
    """Cross-entropy of logits in fp32, over the last dim of a tensor or of an output's ``logits``."""
    logits = _logits_of(output)
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _kind_of(output: Any) -> str:
    return "Tensor" if isinstance(output, Tensor) else type(output).__name__


def _logits_of(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"plan: the model returned a {_kind_of(output)}, expected logits, as a tensor or in an attribute "
            "'logits'. Pass Workload(loss=...), a function of what the model returns."
        )
    return logits


class _CompiledLoss(torch.autograd.Function):
    """Moves and holds what cross-entropy does under ``torch.compile``: its kernels cast logits to fp32 and back without
    writing them. Forward reads them for the largest ones, and for the sums; backward writes their gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        largest, sums = logits.amax(-1).float(), logits.sum(-1).float()
        ctx.save_for_backward(logits, largest, sums)
        return (largest + sums).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, _, _ = ctx.saved_tensors
        return logits * grad


def _params(named: Iterable[tuple[str, nn.Parameter]], workload: Workload) -> tuple[Param, ...]:
    return tuple(
        Param(name, tuple(param.shape), shard_dtype(param, workload.master), param.requires_grad)
        for name, param in named
    )


def shard_dtype(param: nn.Parameter, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the shards of ``param``. Only trained parameters have master weights."""
    is_trained = param.requires_grad and param.is_floating_point()
    return master_dtype if is_trained and master_dtype is not None else param.dtype


def _as_arguments(given: Any) -> Inputs:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}


def _sum_of_outputs(output: Any) -> Tensor:
    """A loss whose backward starts from the gradients that the next block would give."""
    tensors = [each for each in find_tensors((output,), []) if each.requires_grad]
    return _LeftOut.apply([tensors[0].new_empty(())], *tensors)[0] if tensors else torch.empty(())


class _LeftOut(torch.autograd.Function):
    """Returns tensors like ``likes``, and gradients of ``entries``, which are made without computing them."""

    @staticmethod
    def forward(ctx: Any, likes: list[Tensor], *entries: Tensor) -> tuple[Tensor, ...]:
        ctx.likes = [(each.shape, each.dtype) for each in entries]
        return tuple(map(torch.empty_like, likes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grads[0].new_empty(shape, dtype=dtype) for shape, dtype in ctx.likes)


def _forward(model: nn.Module, made: _Fakes, *args: Any, **kwargs: Any) -> Any:
    # tie_weights would swap a module of several names once for each, and not swap it back
    return functional_call(model, made.tensors, args, kwargs, tie_weights=False)


class _Fakes:
    """Fake parameters and buffers of a model by name, in the dtype of its forward. One that several modules hold is
    listed once for each; a module that has several names is listed under one of them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self.tensors = {
            f"{path}.{name}" if path else name: self._like(tensor, is_cast=is_param and tensor.is_floating_point())
            for path, module in model.named_modules()
            for is_param, named in ((True, module.named_parameters), (False, module.named_buffers))
            for name, tensor in named(recurse=False, remove_duplicate=False)
        }
        self.storages = set(map(_storage, self.tensors.values()))

    def _like(self, tensor: Tensor, *, is_cast: bool) -> Tensor:
        """One fake for each ``tensor``, which is kept alive so that no other tensor gets its id."""
        if id(tensor) not in self._made:
            dtype = self.dtype if is_cast else tensor.dtype
            made = torch.empty(tensor.shape, dtype=dtype, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]

    def inputs(self, given: Any) -> Any:
        """Fakes like ``given``, whose tensors may have values."""
        return map_tensors(lambda leaf: self._like(leaf, is_cast=leaf.is_floating_point()), given)


_numbers: dict[int, int] = {}  # by the address of a storage that is alive
_next_number = itertools.count()


def _storage(tensor: Tensor) -> int:
    """The number of the tensor's storage. It is unique, whereas a later storage may have the same address."""
    storage = tensor.untyped_storage()
    address = storage._cdata
    if address not in _numbers:
        _numbers[address] = next(_next_number)
        weakref.finalize(storage, _numbers.pop, address).atexit = False
    return _numbers[address]


def _needs_grad(value: Any) -> bool:
    return any(each.requires_grad for each in find_tensors((value,), []))


@dataclass(frozen=True)
class _Kind:
    """Blocks of one structure that are called in the same way. ``path`` is the first one's, ``likes`` its outputs."""

    path: str
    seen: _Seen
    likes: Any


class _Calls:
    """What a forward calls. ``outside`` is the run around the blocks, which sees nothing of them."""

    def __init__(self, model: nn.Module, units: Units, made: _Fakes, *, is_compiled: bool) -> None:
        self.found: list[Call] = []
        self._is_compiled = is_compiled
        self.outside = _Counter(made)
        self._model, self._units, self._made = model, units, made
        self.kinds: dict[Any, _Kind] = {}  # by what they are called with
        self._given: dict[str, set[int]] = {}  # storages of each block's inputs

    def shared_storages(self) -> set[int]:
        """The storages that were inputs of several blocks."""
        counts = Counter(storage for given in self._given.values() for storage in given)
        return {storage for storage, count in counts.items() if count > 1}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block, model blocks record their inputs and return tensors like the first block of their kind."""
        with ExitStack() as stack:
            for path in self._units.block_paths:
                module = self._model.get_submodule(path)
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, partial(self._call, path, structure(module), module.forward))
            for path in self._units.large:
                note = partial(self._note, path, None)
                hook = self._model.get_submodule(path).register_forward_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def _note(self, path: str, kind: int | None, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.found.append(Call(path, kind, _needs_grad(output), _needs_grad((args, kwargs))))

    def _call(self, path: str, structure: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves = find_tensors((args, kwargs), [])
        key = (structure, torch.is_grad_enabled(), *((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves))
        self._given.setdefault(path, set()).update(map(_storage, leaves))
        if key not in self.kinds:
            self.kinds[key] = self._first_call(path, forward, (args, kwargs))
        kind = self.kinds[key]
        self._note(path, list(self.kinds).index(key), None, args, kwargs, kind.likes)
        differentiable = [leaf for leaf in find_tensors((kind.likes,), []) if leaf.requires_grad]
        # Without an input that needs a gradient, its own parameters need it.
        entries = [leaf for leaf in leaves if leaf.requires_grad] or [torch.empty((), requires_grad=True)]
        made = iter(_LeftOut.apply(differentiable, *entries) if differentiable else ())
        return map_tensors(lambda leaf: next(made) if leaf.requires_grad else torch.empty_like(leaf), kind.likes)

    def _first_call(self, path: str, forward: Callable[..., Any], given: Inputs) -> _Kind:
        """Run a block, which does not count with what is outside of it."""
        likes: list[Any] = []
        self.outside.is_paused = True
        try:
            compiled = self._compiled(path, forward, given) if self._is_compiled else None
            seen = _run(
                _Counter(self._made),
                forward,
                given,
                _sum_of_outputs,
                lambda output: likes.append(map_tensors(_like, output)),
            )
        finally:
            self.outside.is_paused = False
        return _Kind(path, replace(seen, compiled=compiled), likes[0])

    def _compiled(self, path: str, forward: Callable[..., Any], given: Inputs) -> dict[int, int] | None:
        """What autograd keeps of a block under ``torch.compile``, without parameters, in bytes by storage."""
        saved = saved_when_compiled(self._model.get_submodule(path), forward, _as_leaves(given))
        if saved is None:
            return None
        sizes = {_storage(each): each.untyped_storage().nbytes() for each in saved}
        return {key: nbytes for key, nbytes in sizes.items() if key not in self._made.storages}


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Set the module's own ``forward``; None leaves that of its class."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


# One run


@dataclass(frozen=True)
class _Seen:
    """One forward and backward, in bytes by storage.

    Attributes:
        saved: what autograd keeps for backward.
        entries: the inputs, which full checkpointing keeps.
        left: what remains at the end, in caches and in attributes of modules.
        kept_nbytes: what selective checkpointing keeps besides the inputs; backward reads ``read_nbytes`` of it.
        full, selective: the work that these kinds of checkpointing repeat.
        peak_nbytes: the peak in backward of what the run made, including gradients of parameters.
        scores_nbytes: of ``saved``, the scores of attention that is not fused, and what is made of them.
        compiled: what autograd keeps under ``torch.compile``; None if blocks are not compiled.
    """

    forward: Work
    backward: Work
    saved: dict[int, int]
    entries: dict[int, int]
    left: dict[int, int]
    kept_nbytes: int
    full: Work
    selective: Work
    read_nbytes: int
    peak_nbytes: int
    scores_nbytes: int
    compiled: dict[int, int] | None = None

    def unit(self, name: str, checkpointing: Checkpointing, shared: set[int]) -> UnitWork:
        """``shared``: storages that are not counted per block."""
        without = shared | self.left.keys()
        eager, every = (
            sum(nbytes for key, nbytes in saved.items() if key not in without)
            for saved in (self.saved, self.saved if self.compiled is None else self.compiled)
        )
        entry_nbytes = sum(nbytes for key, nbytes in self.entries.items() if key not in shared) if self.saved else 0
        held = sum(self.saved[key] for key in self.saved.keys() & self.entries.keys() if key not in shared)
        again, saved, read = Work(), every, every
        if checkpointing is Checkpointing.FULL:
            again, saved = self.full, entry_nbytes
        elif checkpointing is Checkpointing.SELECTIVE:
            again = self.selective
            saved = min(entry_nbytes + self.kept_nbytes, every)
            read = entry_nbytes + self.read_nbytes
        left = sum(self.left.values())
        return UnitWork(
            name,
            (),
            self.forward,
            self.backward + again,
            saved,
            working_nbytes=max(self.peak_nbytes + held - left - eager + every - saved, 0),
            unread_nbytes=max(saved - read, 0),
            left_nbytes=left,
            given_nbytes=entry_nbytes,
            scores_nbytes=self.scores_nbytes,
            is_block=True,
        )


def _run(
    forward: _Counter,
    function: Callable[..., Any],
    given: Inputs,
    loss: Loss,
    returned: Callable[[Any], None] = lambda _: None,
) -> _Seen:
    """Run a ``function`` of the model, forward and backward, once. ``returned`` receives its result, which is dropped
    before backward."""
    made, memory = forward.made, forward.memory
    args, kwargs = _as_leaves(given)
    leaves = find_tensors((args, kwargs), [])
    entries = {_storage(leaf): leaf for leaf in leaves if _storage(leaf) not in made.storages}
    saved: dict[int, int] = {}
    numels: dict[int, int] = {}
    needed: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Tensor) and _storage(tensor) not in made.storages:
            saved[_storage(tensor)], numels[_storage(tensor)] = tensor.untyped_storage().nbytes(), tensor.numel()
            needed.update(forward.writers_of([tensor]))
        return tensor.detach()  # what no backward reaches would hold itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), forward:
        output = function(*args, **kwargs)
        result = loss(output)
    returned(output)
    del output
    memory.peak = memory.now
    with _Counter(made, memory) as backward:
        if result.requires_grad:
            result.backward()
    del result
    for tensor in (*made.tensors.values(), *entries.values()):
        tensor.grad = None
    entry_nbytes = {key: leaf.untyped_storage().nbytes() for key, leaf in entries.items()}
    for leaf in entries.values():  # the graph of what is left holds it, as that of the whole model would not
        leaf.data = leaf.new_empty(0)
    full, _ = _run_again(forward.ops, needed, keeps=False)
    selective, read_nbytes = _run_again(forward.ops, needed, keeps=True)
    return _Seen(
        forward=forward.total,
        backward=backward.total,
        saved=saved,
        entries=entry_nbytes,
        left=memory.left(),
        kept_nbytes=sum(op.kept_nbytes for op in forward.ops),
        full=full,
        selective=selective,
        read_nbytes=read_nbytes,
        peak_nbytes=memory.peak,
        scores_nbytes=sum(nbytes for key, nbytes in saved.items() if numels[key] in forward.scores_numels),
    )


def _as_leaves(given: Inputs) -> Inputs:
    return map_tensors(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), given)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, requires_grad=False).requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class _Op:
    """One operation. ``sources``: which operations wrote what it reads. ``kept_nbytes``: of its results, if selective
    checkpointing keeps them."""

    work: Work
    sources: tuple[int, ...]
    kept_nbytes: int = 0


def _run_again(ops: Sequence[_Op], needed: Iterable[int], *, keeps: bool) -> tuple[Work, int]:
    """The work of operations that give backward the results of ``needed``, and no more: those that only the output of a
    block needs do not run again. With ``keeps``, kept results exist already; also returns how many bytes of them are
    read."""
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
    return work, read_nbytes


class _Live:
    """Bytes of storages that operations made and that are still alive."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def made(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage(tensor)
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, nbytes)

    def left(self) -> dict[int, int]:
        """The bytes that are still alive, by storage."""
        if self._known:
            gc.collect()
        return dict(self._known)

    def _freed(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self.now -= nbytes


class _Counter(torch_names.DispatchMode):
    """Records what operations compute, move and read. Attention and every second matrix product may be kept."""

    def __init__(self, made: _Fakes, memory: _Live | None = None) -> None:
        super().__init__()
        self.made, self.memory = made, memory or _Live()
        self.ops: list[_Op] = []
        self.is_paused = False
        self.scores_numels: set[int] = set()  # of the scores of attention that is not fused
        self._batched: set[int] = set()  # operations that are batched products
        self._writers: dict[int, int] = {}  # of storages, the operation that wrote them last
        self._num_products = 0
        self._inside = set(made.storages)  # storages that other kernels than products made, and parameters
        self._crossed: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self.is_paused:
            return result
        inputs, outputs = find_tensors((args, kwargs), []), find_tensors((result,), [])
        known = {_storage(each) for each in inputs}
        new = [each for each in outputs if _storage(each) not in known]
        for each in new:
            self.memory.made(each)
        name = function.name().split("::")[-1].split(".")[0]
        if not new and not function._schema.is_mutable:
            return result  # a view
        sources = tuple(self.writers_of(inputs))
        self._writers.update({_storage(each): len(self.ops) for each in outputs})
        if name in ("bmm", "baddbmm"):
            self._batched.add(len(self.ops))
        if name in ("_softmax", "_safe_softmax") and self._follows_batched(sources):
            self.scores_numels.add(outputs[0].numel())
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
        """The operations that wrote ``tensors``, without tensors that existed before."""
        return {self._writers[_storage(each)] for each in tensors if _storage(each) in self._writers}

    def _follows_batched(self, sources: Iterable[int]) -> bool:
        """Whether a batched product made what ``sources`` wrote, perhaps scaled and masked since."""
        left = set(sources)
        while left:
            number = left.pop()
            if number in self._batched:
                return True
            if not self.ops[number].work.products:
                left.update(self.ops[number].sources)
        return False

    def _keeps(self, name: str) -> bool:
        if name not in ("mm", "addmm"):
            return "scaled_dot_product" in name
        self._num_products += 1
        return self._num_products % 2 == 1

    def _beside_product(self, inputs: list[Tensor]) -> Work:
        """The work next to a product: other kernels write its operands, unless those are products or parameters."""
        return Work(
            fused_nbytes=sum(self._crosses(x) for x in inputs if _storage(x) in self._inside - self.made.storages)
        )

    def _moved(self, inputs: list[Tensor], outputs: list[Tensor]) -> Work:
        """The bytes moved. A fused kernel reads results of products, and tensors that existed before."""
        fused = sum(self._crosses(each) for each in inputs if _storage(each) not in self._inside)
        self._inside.update(map(_storage, outputs))
        return Work(moved_nbytes=sum(map(_nbytes, [*inputs, *outputs])), fused_nbytes=fused, num_others=1)

    def _crosses(self, tensor: Tensor) -> int:
        """Bytes that one kernel leaves for another, counted once."""
        if _storage(tensor) in self._crossed:
            return 0
        self._crossed.add(_storage(tensor))
        return _nbytes(tensor)


def _nbytes(tensor: Tensor) -> int:
    """The bytes that a kernel reads or writes of ``tensor``; an expanded dim counts only once."""
    sizes = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return math.prod(sizes) * tensor.dtype.itemsize


def _work_of(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> Work | None:
    """The work of matrix products and attention; None for other operations."""
    if "scaled_dot_product" in name:
        return Work(attention=(_attention(name, args, kwargs),))
    if name == "_grouped_mm":
        first, second = args[0], args[1]
        rows = first[0].numel() if second.dim() < first.dim() else first.numel()
        size = second.shape[-1]
        return Work((Product(rows / first.shape[-1], size, first.shape[-1]),))
    from torch.utils.flop_counter import flop_registry  # imports triton, which `import fsdp2` must not

    formula = flop_registry.get(function.overloadpacket)
    if formula is None:
        return None
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        first, second = [each for each in args if isinstance(each, Tensor)][-2:]
        *times, m, k = first.shape
        return Work((Product(m, second.shape[-1], k, math.prod(times), by_weight=name in ("mm", "addmm")),))
    # A convolution, as the product that makes as many results, one channel per column.
    made = find_tensors((result,), [])[0]
    rows, size = made.numel() / made.shape[1], made.shape[1]
    flops = float(formula(*args, **kwargs, out_val=result))
    return Work((Product(rows, size, flops / 2 / rows / size),))


def _attention(name: str, args: Any, kwargs: Any) -> Attention:
    """Two products in forward, five in backward; half of all pairs if attention is causal."""
    is_backward = "backward" in name
    query, key = args[1:3] if is_backward else args[:2]
    value = args[3] if is_backward else args[2]
    pairs = query.shape[0] * query.shape[1] * query.shape[-2] * key.shape[-2]
    is_causal = kwargs.get("is_causal", any(each is True for each in args))
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
    flops *= (2.5 if is_backward else 1.0) * (0.5 if is_causal else 1.0)
    return Attention(flops, key.shape[-2], _nbytes(key) + _nbytes(value), is_backward)
