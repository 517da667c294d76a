"""One tensor of a sharded model: which entries of the whole tensor this rank holds, and the whole tensor, gathered.

``load_weights`` fills the part that a ``Weight`` holds; ``save_weights`` and ``stream_weights`` use what it gathers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2.checkpoint.pieces import Run, runs
from fsdp2.core import ParamGroup, ShardedParam, Slot, _torch, groups_by_slot, is_plain, plans
from fsdp2.extras import torch_names
from fsdp2.extras.lending import WHOLE, check_idle, gathered, joined_along_dim_0, whole_subclass
from fsdp2.extras.plain_names import bound_state
from fsdp2.tensors.in_files import FileTensor

Rename = Mapping[str, str] | Callable[[str], str | None]

# A method that a tensor subclass may have: it returns a FileTensor for each tensor that files have for it, keyed by the
# suffix that follows the name of the parameter.
IN_FILES = "fsdp2_in_files"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The metadata key that ``save_safetensors`` writes into all its files. Its value is a random text, one per save.
TOKEN = "fsdp2_save"
# The names of dtypes in the headers of safetensors files.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


_TAG = 7090  # of messages; differs from 0, which user code on the same group is likely to use, and from our channels


@dataclass(frozen=True)
class Weight:
    """A parameter or a persistent buffer, as it is bound between passes.

    Attributes:
        names: the names in the state dict; tied weights have several.
        tensor: the parameter or buffer; a DTensor if it is sharded or replicated.
        group, param: what ``fully_shard`` knows about it; None if it does not manage the tensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    group: ParamGroup | None = None
    param: ShardedParam | None = None

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the tensor, without autograd; shares its memory."""
        return (_torch.local_of(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor).detach()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in files."""
        return tuple(self.tensor.shape)

    @property
    def managed(self) -> tuple[ParamGroup, ShardedParam]:
        """``group`` and ``param`` of a weight that is known to have them."""
        assert self.group is not None
        assert self.param is not None
        return self.group, self.param

    @property
    def is_packed(self) -> bool:
        """Whether compute reads other values than those in the shards; ``whole`` returns these values."""
        return self.param is not None and hasattr(self.local, WHOLE)

    @property
    def is_cut_once(self) -> bool:
        """Whether the whole tensor is made of the values in the shards of one axis alone."""
        param = self.param
        if param is None or param.spec.unsharded is not None or self.is_packed:
            return False
        return param.layout.num_shards > 1 and param.layout.numel > 0

    @property
    def whole_like(self) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of what ``whole`` returns if nothing is cast."""
        if self.is_packed:
            return self.local.dense_like  # type: ignore[attr-defined]
        return tuple(self.tensor.shape), self.tensor.dtype

    def dtype_in_files(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype in files if the user has asked for ``dtype``."""
        return cast_dtype(self.tensor, dtype)

    def in_files(self) -> list[Weight]:
        """The tensors that files have for this weight: the weight itself, or for a tensor subclass with
        ``fsdp2_in_files``, one or more, keyed by the suffix that follows the name."""
        made: Mapping[str, FileTensor] = {}
        if self.param is not None and not self.local.is_meta:
            made = getattr(self.local, IN_FILES, dict)()
        return [
            WeightInFiles(tuple(name + suffix for name in self.names), self.tensor, self.group, self.param, piece=piece)
            for suffix, piece in made.items()
        ] or [self]

    def along(self) -> list[list[Run]]:
        """For each dim, the entries of the whole tensor that this rank holds."""
        param, tensor = self.param, self.tensor
        along: list[Sequence[int]] = [range(size) for size in tensor.shape]
        if param is None and isinstance(tensor, DTensor):
            along = _cut(tensor.device_mesh, tensor.placements, tensor.shape)
        if param is not None and along:  # every rank holds whole scalars
            before = param.spec.unsharded
            if before is not None:
                along = _cut(before.mesh, before.placements, before.shape)
            start, stop = param.layout.interval(param.mesh.shard.rank)
            along[param.layout.dim] = along[param.layout.dim][start:stop]
        return [runs(entries) for entries in along]

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor as a plain tensor of ``dtype``, cast before it is sent. Collective on the tensor's mesh; a
        plain tensor is this rank's own."""
        with torch.no_grad():
            if self.param is not None and self.is_packed:
                values: torch.Tensor = whole_subclass(self.param, self.local).dequantise()  # type: ignore[attr-defined]
                return values.to(cast_dtype(values, dtype))
            local = plain_values(self.local, dtype)
            if self.group is not None and self.param is not None:
                own = self.param.spec.unsharded_tensor(gathered(self.group, self.param, local))
                return own.full_tensor() if isinstance(own, DTensor) else own
            if not isinstance(self.tensor, DTensor):
                return local
            return _torch.dtensors_like([self.tensor], [local])[0].full_tensor()


@dataclass(frozen=True)
class WeightInFiles(Weight):
    """One of several tensors that files have for a parameter. It is never cast."""

    piece: FileTensor = field(kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape

    def dtype_in_files(self, dtype: torch.dtype | None) -> torch.dtype:
        return self.piece.dtype

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        piece, whole = self.piece, self.piece.tensor.detach()
        if piece.is_cut and isinstance(self.tensor, DTensor):
            whole = joined_along_dim_0(self.tensor, whole)
        nbytes = math.prod(piece.shape) * piece.dtype.itemsize
        return whole.contiguous().view(-1).view(torch.uint8)[:nbytes].view(piece.dtype).view(piece.shape)


def weights_of(model: nn.Module, caller: str) -> list[Weight]:
    """The tensors of ``model``'s state dict in its order. Reshards, and takes over what users put in place of shards.

    Raises:
        ScheduleError: a forward or backward is running, or ``fsdp2.unsharded`` has lent parameters.
        ValueError: ranks hold different parameters under the same names.
    """
    check_idle(model, caller)
    by_slot = groups_by_slot()
    slots = [Slot(module, name) for module in model.modules() for name in _torch.parameters_dict(module)]
    groups = dict.fromkeys(by_slot[slot][0] for slot in slots if slot in by_slot)
    for group in groups:
        if group.options.apart_over is not None:
            raise ValueError(
                f"{caller}: parameter '{group.params[0].full_name}' is of experts that differ between ranks, but have "
                "the same names there (ExpertMeshes.shard_experts). Before shard_experts, make such parameters "
                "DTensors on meshes.experts: DTensor.from_local(experts, meshes.experts, [Shard(0)])."
            )
        group.take_replaced()
    managed = {id(param.sharded): (group, param) for group in groups for param in group.params}
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in bound_state(model).items():
        if isinstance(tensor, torch.Tensor):  # modules may add other objects, such as "extra state"
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    return [Weight(tuple(names[key]), tensor, *managed.get(key, ())) for key, tensor in tensors.items()]


def check_ready(weights: Sequence[Weight], caller: str) -> None:
    """Refuse weights that this rank cannot gather."""
    for weight in weights:
        if isinstance(weight.tensor, DTensor) and weight.tensor.device_mesh.get_coordinate() is None:
            raise ValueError(
                f"{caller}: '{weight.names[0]}' is on {weight.tensor.device_mesh}, which rank {dist.get_rank()} is not "
                "in. Call it on the ranks of that mesh only, with their group."
            )
        if weight.local.is_meta:
            raise RuntimeError(
                f"{caller}: '{weight.names[0]}' is still on the meta device. Call model.to_empty(device=...), and "
                "initialise or load the values first."
            )


def cast_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of ``tensor`` after a cast that applies to floating-point tensors only."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def plain_values(local: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of ``local`` as a plain tensor. A subclass yields them when it is copied into a plain tensor."""
    wanted = cast_dtype(local, dtype)
    if is_plain(local):
        return local.to(wanted)
    return torch.empty(local.shape, dtype=wanted, device=local.device).copy_(local)


def _cut(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> list[Sequence[int]]:
    """For each dim, the entries that this rank holds, found by letting torch shard the indices of the entries."""
    along: list[Sequence[int]] = []
    for dim, size in enumerate(shape):
        cuts = [_torch.shards_dim(placement, dim) for placement in placements]
        if not any(cuts):
            along.append(range(size))
            continue
        of_dim = [
            torch_names.as_of_dim_0(each) if cut else Replicate() for each, cut in zip(placements, cuts, strict=True)
        ]
        numbers = torch.arange(size, device=plans.mesh_device(mesh))
        along.append(distribute_tensor(numbers, mesh, of_dim, src_data_rank=None).to_local().tolist())
    return along


def send_to(
    rank: int, group: dist.ProcessGroup, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[dist.Work]:
    """Start sending the ``inputs`` of all ranks of ``group`` to the global ``rank``. Its ``outputs`` have room for them
    in rank order."""
    if dist.get_rank() != rank:
        return dist.batch_isend_irecv([dist.P2POp(dist.isend, each, rank, group, _TAG) for each in inputs])
    messages = []
    for output, mine in zip(outputs, inputs, strict=True):
        for source, row in zip(dist.get_process_group_ranks(group), output.split(mine.numel()), strict=True):
            if source == rank:
                row.copy_(mine)
            else:
                messages.append(dist.P2POp(dist.irecv, row, source, group, _TAG))
    return dist.batch_isend_irecv(messages)


def renamed(key: str, rename: Rename | None) -> str | None:
    """The new name for ``key``; None to leave it out."""
    new: str | None = key
    if isinstance(rename, Mapping):
        new = rename.get(key, key)
    elif callable(rename):
        try:
            new = rename(key)
        except Exception as error:
            raise RuntimeError(f"rename('{key}') raised {type(error).__name__}: {error}") from error
    elif rename is not None:
        raise TypeError(f"rename is a {type(rename).__name__}, expected a mapping or a function of a name.")
    if new is not None and not isinstance(new, str):
        raise TypeError(f"rename gives {new!r} for '{key}', expected a name, or None to leave the tensor out.")
    return new


def check_dtype(dtype: object, caller: str) -> None:
    """Refuse a dtype to which floating-point tensors must not be cast."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{caller}: dtype is {dtype!r}, expected a floating-point dtype, such as torch.bfloat16.")


def extra(name: str, caller: str) -> Any:
    """The module ``name`` of an optional dependency."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"{caller} needs {name}, which is not installed. Run: pip install 'fsdp2[weights]'"
        raise ImportError(text) from error
