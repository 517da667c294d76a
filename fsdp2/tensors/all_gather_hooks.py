"""The parameters of one group that have all-gather hooks (see ``types``): the hooks decide what is sent.

``HookedParam`` looks up the hooks of one shard, and inspects their signature, once. It checks every call: an error is
an ``ExtensionError`` that names parameter, class and hook. ``HookedParams`` holds the hooked parameters of a group. At
first use, the ranks exchange what their pre-hooks returned, or that one failed. So all ranks know the sizes, or all
ranks raise (I9). Later the ranks exchange nothing, and a failing hook raises on its own rank only, as in torch. The
runtime owns the inner tensors that the post-hooks list: it allocates and frees their memory together with the group's
unsharded storage.

Source: the extension points of PyTorch's FSDP2 (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import ExtensionError, ParallelMesh, ShardedParam, _torch, comms, find_tensors, is_plain, marks, plans
from fsdp2.extras.exchange import exchange
from fsdp2.tensors import torch_names

_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

Kinds = tuple[tuple[torch.Size, torch.dtype], ...]  # of the tensors that are sent


class HookedParam:
    """One parameter with all-gather hooks.

    Attributes:
        metadata: what the pre-hook returned with the payload that was gathered last.
        gathered: the gathered tensors.
        outputs: what the post-hook reads: ``gathered``, or wrappers of these.
        out: the tensor that the post-hook fills, from the first gather on.
        are_released: whether ``outputs`` may be freed after the post-hook.
    """

    def __init__(self, param: ShardedParam, mesh: DeviceMesh, device: torch.device, *, is_staged: bool = False) -> None:
        """``mesh`` is the shard axis. With ``is_staged``, the shard is on the host; pre-hooks get a ``device`` copy."""
        self.param, self._mesh, self._device, self._is_staged = param, mesh, device, is_staged
        self._local = local = _torch.local_of(param.sharded)
        self._class = type(local).__name__
        self._size = torch.Size(param.layout.shape)
        self.metadata: Any = None
        self.are_released = False
        self.gathered: tuple[torch.Tensor, ...] = ()
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.out: torch.Tensor
        for name, other in ((marks.PRE, marks.POST), (marks.POST, marks.PRE)):
            if not callable(getattr(local, name, None)):
                only, lost = f"the class defines only {other}", "sharding would lose what the class adds"
                found = only if hasattr(local, other) else lost
                raise self.error(
                    name, f"is not defined: {found}. Define both hooks, or list the parameter in ignored_params"
                )
        self._pre: Callable[[], object] = self._bind_pre(getattr(local, marks.PRE))
        self._post = getattr(local, marks.POST)
        self._expected: Kinds | None = None
        self._rebuild: list[Callable[[Iterator[torch.Tensor]], torch.Tensor]] = []  # per tensor of the payload
        self._has_seen_result = False  # of a call with ``out``; only the first result is checked
        self._release: Callable[[], object] = getattr(local, _RELEASE, lambda: False)

    def error(self, hook: str, problem: str) -> ExtensionError:
        """An error that names parameter, class and ``hook``; ``problem`` is the rest of the sentence."""
        return ExtensionError(f"parameter '{self.param.full_name}': {self._class}.{hook} {problem.rstrip('.')}.")

    def _call(self, hook: str, call: Callable[..., object], *args: object, when: str = "", **kwargs: object) -> object:
        """Call a hook. ``when`` says in errors which call this is."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            raise self.error(hook, f"{when}raised {type(error).__name__}: {error}") from error

    def payload(self) -> tuple[torch.Tensor, ...]:
        """Make the tensors that this rank sends. For wrapper tensors, these are the plain tensors inside them.

        Raises:
            ExtensionError: the hook raised, or returned something that cannot be gathered.
        """
        result = self._call(marks.PRE, self._pre)
        if type(result) is not tuple or len(result) != 2:
            raise self.error(marks.PRE, f"returned {_described(result)}, expected (tuple of tensors, metadata)")
        tensors, metadata = result
        if type(tensors) is not tuple:
            raise self.error(marks.PRE, f"returned {_described(tensors)} as the tensors, expected a tuple of tensors")
        if any(type(tensor) is not torch.Tensor for tensor in tensors):
            tensors = self._flattened(tensors)
        for tensor in tensors:
            if not tensor.is_contiguous():
                problem = f"returned {_described(tensor)} with strides {tensor.stride()}"
                raise self.error(marks.PRE, f"{problem}, expected contiguous tensors. Call .contiguous()")
            if self._expected is None and tensor.device != self._device:
                raise self.error(marks.PRE, f"returned a tensor on {tensor.device}, expected {self._device}")
        found = kinds_of(tensors)
        if self._expected is not None and found != self._expected:
            raise self.error(
                marks.PRE,
                f"returned {_payload(found)}, expected {_payload(self._expected)} as in the first gather of the group. "
                "Return the same shapes and dtypes each time, because the plan is made once",
            )
        self._expected, self.metadata = found, metadata
        return tensors

    def _flattened(self, tensors: tuple[object, ...]) -> tuple[torch.Tensor, ...]:
        """The plain tensors that ``tensors`` are made of."""
        plain: list[torch.Tensor] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch_names.DISTRIBUTED_TENSORS):
                raise self.error(
                    marks.PRE, f"returned {_described(tensor)} to be gathered, expected tensors of this rank"
                )
            parts = [leaf.detach().as_subclass(torch.Tensor) for leaf in _torch.leaves(tensor)]
            if any(part.shape != tensor.shape for part in parts):
                problem = f"returned {_described(tensor)}, which has inner tensors of other shapes"
                raise self.error(marks.PRE, f"{problem}. Return the inner tensors, and wrap them in {marks.POST}")
            plain += parts
        if self._expected is None:
            self._rebuild = [torch_names.rebuilder(tensor) for tensor in tensors]  # type: ignore[arg-type]  # checked above
        return tuple(plain)

    def joined(self, by_rank: Sequence[Kinds]) -> list[tuple[plans.Layout, torch.dtype]]:
        """How the payloads of all ranks of the shard axis fit together: for each tensor, the layout and the dtype.

        Raises:
            ExtensionError: they do not.
        """
        dtypes = [tuple(dtype for _, dtype in kinds) for kinds in by_rank]
        for rank, found in enumerate(dtypes):
            if found != dtypes[0]:
                problem = f"returned tensors of {dtypes[0]} on the first rank, but of {found} on rank {rank} of "
                raise self.error(marks.PRE, problem + "the shard axis. Return the same dtypes on all ranks")
        try:
            layouts = [
                plans.join([tuple(shape) for shape, _ in same], self.param.layout.dim)
                for same in zip(*by_rank, strict=True)
            ]
        except ValueError as error:
            problem = f"returned tensors that cannot be joined over the ranks: {error}. Return equal other dims"
            raise self.error(marks.PRE, problem) from None
        return list(zip(layouts, dtypes[0], strict=True))

    def bind_outputs(self, gathered: Sequence[torch.Tensor]) -> None:
        """Let the post-hook read ``gathered``, wrapped in the class that the pre-hook returned, if any."""
        self.gathered = tuple(gathered)
        iterator = iter(gathered)
        self.outputs = tuple(rebuild(iterator) for rebuild in self._rebuild) if self._rebuild else self.gathered

    def releases_outputs(self) -> bool:
        """Whether the unsharded tensor does not alias the outputs. Called after the first pre-hook, which may decide.

        Raises:
            ExtensionError: the hook raised, or the answer is not a bool.
        """
        answer = self._call(_RELEASE, self._release)
        if not isinstance(answer, bool):
            raise self.error(_RELEASE, f"returned {_described(answer)}, expected a bool")
        return answer

    def fill(self) -> None:
        """Let the post-hook fill ``out``. As in torch, its result is ignored. Warn if the first result has its own
        memory, since then the hook has most likely not filled ``out``.

        Raises:
            ExtensionError: the hook raised.
        """
        given = self.outputs, self.metadata, self.param.dtypes.param
        result = self._call(marks.POST, self._post, *given, when="(with out) ", out=self.out)
        if result is None or self._has_seen_result:
            return
        self._has_seen_result = True
        made = find_tensors(result, [])
        known = {address for tensor in (*self.outputs, self.out) for address in _memory_of(tensor)}
        if not all(known.issuperset(_memory_of(tensor)) for tensor in made):
            problem = (
                f"returned {_described(result)} in new memory although out was given. fsdp2 ignores this result. Fill "
                "out in place, because autograd has saved out"
            )
            warnings.warn(str(self.error(marks.POST, problem)), stacklevel=2)

    def _first_post(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the unsharded tensor, in its outer size, and the tensors to free with it.

        Raises:
            ExtensionError: the hook raised, or returned something that cannot be the parameter.
        """
        self._post = getattr(self._local, marks.POST)  # users may have fixed it after it failed
        result = self._call(marks.POST, self._post, self.outputs, self.metadata, self.param.dtypes.param)
        expected = "expected (unsharded tensor, tuple of inner tensors to free)"
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.error(marks.POST, f"returned {_described(result)}, {expected}")
        tensor, inner = result
        if not isinstance(tensor, torch.Tensor):
            raise self.error(marks.POST, f"returned {_described(tensor)} as the unsharded tensor, {expected}")
        if not isinstance(inner, (tuple, list)) or not all(isinstance(item, torch.Tensor) for item in inner):
            raise self.error(marks.POST, f"returned {_described(inner)} as the inner tensors, {expected}")
        return self._cut(tensor), list(inner)

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` without the rows that the hooks added as padding."""
        size = self._size
        if tensor.shape == size:
            return tensor
        is_flat = tensor.dim() == 1 and tensor.numel() >= size.numel()
        has_rows = tensor.dim() == len(size) and tensor.shape[1:] == size[1:] and tensor.shape[0] >= size[0]
        if not (is_flat or has_rows) or not tensor.is_contiguous():
            raise self.error(
                marks.POST,
                f"returned {_described(tensor)} with strides {tensor.stride()}, expected a contiguous tensor of shape "
                f"{tuple(size)}, or with more rows",
            )
        cut = torch.as_strided(tensor, size, self.param.stride, tensor.storage_offset())
        if type(cut) is not type(tensor):
            raise self.error(
                marks.POST,
                f"returned a {type(tensor).__name__} of shape {tuple(tensor.shape)}, but cutting to {tuple(size)} made "
                f"a {type(cut).__name__} of that tensor. Let as_strided keep the class",
            )
        return cut

    def _bind_pre(self, pre: Callable[..., object]) -> Callable[[], object]:
        signature = inspect.signature(pre)
        param = self.param
        arguments = (self._mesh, self._size, param.stride, param.slots[0].module, param.policy)
        if len(signature.parameters) not in (1, len(arguments)):
            raise self.error(
                marks.PRE,
                f"has the signature {signature}, expected (self, mesh) or (self, mesh, outer_size, outer_stride, "
                "module, mp_policy)",
            )
        given = arguments[: len(signature.parameters)]
        local, method = getattr(pre, "__self__", None), getattr(pre, "__func__", None)
        if self._is_staged and method is not None and isinstance(local, torch.Tensor):
            return lambda: method(self._on_device(local), *given)
        return partial(pre, *given)

    def _on_device(self, local: torch.Tensor) -> torch.Tensor:
        """A copy of the shard on the device that gathers, enqueued on the current stream."""
        with torch.inference_mode(False):  # in inference mode, to() calls another operation of subclasses than _to_copy
            moved = local.to(self._device, non_blocking=True, copy=True)
        if type(moved) is not type(local):
            raise TypeError(
                f"to() made {_described(moved)} of the offloaded shard, expected a {self._class}. Let "
                "__torch_dispatch__ keep the class for _to_copy"
            )
        return moved

    def make_unsharded(self) -> None:
        """Create the unsharded parameter from the result of the post-hook without ``out``."""
        param = self.param
        versions = [output._version for output in self.gathered]
        tensor, inner = self._first_post()
        if versions != [output._version for output in self.gathered]:
            problem = "wrote into all_gather_outputs, but the outputs are read again. Make a new tensor instead"
            raise self.error(marks.POST, problem)
        if not tensor.dtype.is_floating_point and param.sharded.requires_grad:
            problem = f"made a tensor of {tensor.dtype} for a trainable parameter, expected a floating-point dtype"
            raise self.error(marks.POST, problem)
        try:
            made = param.unsharded_parameter(tensor)
        except RuntimeError as error:  # nn.Parameter requires detach() to keep the class
            problem = f"made a {type(tensor).__name__} that cannot be an nn.Parameter: {error}"
            raise self.error(marks.POST, problem) from error
        inner_memory = self._owned(inner)
        memory = {output.untyped_storage().data_ptr() for output in self.gathered if output.numel()}
        if self.are_released and not memory.isdisjoint(_memory_of(made)):
            problem = (
                f"made a tensor on the memory of all_gather_outputs, but {_RELEASE} returned True, so this memory "
                f"may be freed. Copy the outputs, or return False from {_RELEASE}"
            )
            raise self.error(marks.POST, problem)
        param.unsharded, param.inner = made, inner_memory

    def fill_first(self) -> None:
        """Let the post-hook fill the unsharded parameter for the first time, with checks that later calls skip."""
        assert self.param.unsharded_local is not None
        self.out = self.param.unsharded_local
        before = set(_memory_of(self.out))
        self.fill()
        replaced = before.difference(_memory_of(self.out))
        if not replaced.isdisjoint(before if is_plain(self.out) else self._freed_memory()):
            problem = "put other memory under out. Write into the memory of out, because autograd has saved out"
            raise self.error(marks.POST, problem)

    def _freed_memory(self) -> set[int]:
        """Memory that is freed between gathers and allocated again when a hook fills it. A wrapper tensor may also hold
        tensors from the metadata, such as the scale of torchao's float8, which each call may replace."""
        gathered = {output.untyped_storage().data_ptr() for output in self.gathered}
        return gathered | {storage.data_ptr() for storage, _ in self.param.inner}

    def _owned(self, inner: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
        """The storages of ``inner`` to free and allocate here. Those of the outputs belong to the group's plan."""
        ours = {output.untyped_storage().data_ptr() for output in self.gathered}
        shards = {leaf.untyped_storage().data_ptr() for leaf in _torch.leaves(self._local)}
        owned: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for leaf in (leaf for tensor in inner for leaf in _torch.leaves(tensor)):
            storage = leaf.untyped_storage()
            pointer = storage.data_ptr()
            if pointer in ours or storage.nbytes() == 0:
                continue
            if pointer in shards:
                problem = "listed memory of the shard among the tensors to free. List a tensor with its own memory"
                raise self.error(marks.POST, problem)
            owned[pointer] = (storage, storage.nbytes())
        return list(owned.values())


def kinds_of(tensors: Sequence[torch.Tensor]) -> Kinds:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _payload(kinds: Kinds) -> str:
    return "(" + ", ".join(f"{dtype} {tuple(shape)}".removeprefix("torch.") for shape, dtype in kinds) + ")"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


class HookedParams:
    """The hooked parameters of one group, bound to a gather.

    Attributes:
        storages: memory that ``arrive`` fills, and that is freed with the group's unsharded storage.
    """

    def __init__(self, params: Sequence[ShardedParam], mesh: ParallelMesh, home: comms.Home) -> None:
        self._no_grad = torch.no_grad()  # a single object, entered often and never nested
        self.storages: list[tuple[torch.UntypedStorage, int]] = []
        self._versioned: tuple[torch.Tensor, ...] = ()
        self._params: list[HookedParam] = []
        self._first: list[tuple[torch.Tensor, ...]] = []  # payloads that were made but not sent
        self._are_checked = False  # the post-hooks have filled the unsharded tensors
        self._sent = self._agree(params, mesh, home)  # by replica, rank of the shard axis, parameter

    def _agree(self, params: Sequence[ShardedParam], mesh: ParallelMesh, home: comms.Home) -> list[list[list[Kinds]]]:
        """Make the first payloads. Returns the shapes and dtypes that all ranks send, including other replicas (I9).

        Raises:
            ExtensionError: a hook failed on some rank; all ranks raise.
        """
        mine: list[Kinds] = []
        failure = text = None
        try:
            its = _shard_mesh(mesh)
            self._params = [HookedParam(param, its, mesh.device, is_staged=home.is_staged) for param in params]
            self._first = [hooked.payload() for hooked in self._params]
            for hooked in self._params:
                hooked.are_released = hooked.releases_outputs()
            mine = [kinds_of(payload) for payload in self._first]
        except Exception as error:  # any exception: the other ranks wait for this rank
            failure = error
            text = str(error) if isinstance(error, ExtensionError) else f"{type(error).__name__}: {error}"
        rank = dist.get_rank() if dist.is_initialized() else 0
        rows = exchange(mesh.replicate, exchange(mesh.shard, (rank, text, mine)))
        if failure is not None:
            raise failure
        for other, problem, _ in (entry for row in rows for entry in row):
            if problem is not None:
                raise ExtensionError(f"on rank {other}: {problem}")
        return [[kinds for _, _, kinds in row] for row in rows]

    def inputs(self, first_key: int, *, keeps_consumed: bool) -> dict[int, plans.PlanInput]:
        """For the plan: each tensor that is sent, with keys from ``first_key`` on. With ``keeps_consumed``, memory that
        could be freed after the post-hook is also kept while the group is unsharded.

        Raises:
            ExtensionError: the ranks' payloads do not fit together; all ranks raise.
        """
        inputs: dict[int, plans.PlanInput] = {}
        for i, hooked in enumerate(self._params):
            by_rank, *replicas = ([kinds[i] for kinds in row] for row in self._sent)
            for mine, its in (pair for other in replicas for pair in zip(by_rank, other, strict=True)):
                if mine != its:
                    problem = f"returned {_payload(mine)} on one replica and {_payload(its)} on another replica. "
                    problem += "Replicas hold the same shards. Return the same shapes and dtypes on all replicas"
                    raise hooked.error(marks.PRE, problem)
            is_consumed = hooked.are_released and not keeps_consumed
            origin = plans.Origin.HOOK_CONSUMED if is_consumed else plans.Origin.HOOK
            for k, (layout, dtype) in enumerate(hooked.joined(by_rank)):
                name = f"{hooked.param.name}[{k}]"
                inputs[first_key + len(inputs)] = plans.PlanInput(name, layout, plans.ParamDtypes.uncast(dtype), origin)
        return inputs

    def bind_outputs(self, outputs: Mapping[int, torch.Tensor], first_key: int) -> None:
        """Bind the ``outputs`` of the gather that was planned from ``inputs(first_key)``."""
        key = first_key
        for hooked, payload in zip(self._params, self._first, strict=True):
            hooked.bind_outputs([outputs[key + k] for k in range(len(payload))])
            key += len(payload)

    def payloads(self) -> list[torch.Tensor]:
        """This rank's part of every tensor that hooks send, in order of index, without empty ones."""
        with self._no_grad:
            payloads, self._first = self._first or [hooked.payload() for hooked in self._params], []
        each = (tensor for payload in payloads for tensor in payload if tensor.numel())
        return [tensor if tensor.dim() else tensor.view(1) for tensor in each]

    def arrive(self) -> None:
        """Run the post-hooks after everything has been gathered. Staging memory is freed afterwards."""
        if not self._are_checked:
            self._arrive_checked()
            return
        if self.storages:
            comms.allocate(self.storages)
        # I10: autograd has saved the tensors written here. They get the same values again, so their versions stay.
        versions = [tensor._version for tensor in self._versioned]
        with self._no_grad:
            for hooked in self._params:
                hooked.fill()
        if versions != [tensor._version for tensor in self._versioned]:
            _torch.set_versions(self._versioned, tuple(versions))

    def _arrive_checked(self) -> None:
        """``arrive`` until the post-hooks have run in both modes: they make the unsharded tensors first, and fill them
        from the next arrival on."""
        are_made = all(hooked.param.unsharded is not None for hooked in self._params)
        before = self._collect_versioned()
        versions = tuple(tensor._version for tensor in before)
        with torch.inference_mode(False), torch.no_grad():  # these tensors live longer than the first pass
            for hooked in self._params:
                comms.allocate(hooked.param.inner)
                if hooked.param.unsharded is None:
                    hooked.make_unsharded()
                else:
                    hooked.fill_first()
        _torch.set_versions(before, versions)  # I10
        self.storages = [inner for hooked in self._params for inner in hooked.param.inner]
        self._versioned = self._collect_versioned()
        self._are_checked = are_made

    def _collect_versioned(self) -> tuple[torch.Tensor, ...]:
        made = [hooked.param.unsharded for hooked in self._params]
        return tuple(leaf for tensor in made if tensor is not None for leaf in _torch.versioned(tensor))


def _memory_of(tensor: torch.Tensor) -> list[int]:
    return [leaf.untyped_storage().data_ptr() for leaf in _torch.leaves(tensor)]


def _shard_mesh(mesh: ParallelMesh) -> DeviceMesh:
    """The shard axis of ``mesh`` as a 1D mesh of its own."""
    whole = mesh.mesh
    if whole.ndim == 1 or mesh.shard.group is None:
        return whole
    names = whole.mesh_dim_names
    return whole[names[-1]] if names else DeviceMesh.from_group(mesh.shard.group, whole.device_type)
