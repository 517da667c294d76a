"""Converts one parameter to its form in state dicts (whole, sharded, or part of torch's flat parameter) and back.

Values that go into a state dict never share memory with the shards, so later steps do not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2.core import ParamGroup, ShardedParam, _torch, is_plain, plans
from fsdp2.extras.lending import gathered_together, whole_subclass
from fsdp2.extras.torch_names import is_sharded_tensor
from fsdp2.fsdp1 import torch_names
from fsdp2.fsdp1.search import Wrapper

CPU = torch.device("cpu")
_ALIGNMENT_NBYTES = 16  # alignment of parameters in torch's flat parameter, with use_orig_params


# Whole


def full_values(
    group: ParamGroup,
    params: Sequence[ShardedParam],
    locals_: Sequence[torch.Tensor],
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Whole values of ``params``, in one launch. All are on ``device``; None means the device of the mesh."""
    plain = [i for i, local in enumerate(locals_) if is_plain(local)]
    got = gathered_together(group, [params[i] for i in plain], [locals_[i] for i in plain]) if plain else []
    whole = dict(zip(plain, got, strict=True))
    del got
    values = []
    for i, param in enumerate(params):
        value = whole.pop(i) if i in whole else whole_subclass(param, locals_[i])
        value = value if device is None or value.device == device else value.to(device)
        values.append(param.spec.unsharded_tensor(_owned(value, locals_[i])))
    return values


def _owned(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``value`` in memory that it shares with nothing else, copying it if necessary."""
    theirs = {leaf.untyped_storage().data_ptr() for leaf in _torch.leaves(local)}
    memory = [leaf.untyped_storage() for leaf in _torch.leaves(value)]
    is_own = theirs.isdisjoint(each.data_ptr() for each in memory)
    has_more = is_plain(value) and memory[0].nbytes() != value.nbytes
    return value if is_own and not has_more else value.clone()


# Sharded


def sharded_value(
    param: ShardedParam,
    local: torch.Tensor,
    wrapper: Wrapper,
    *,
    device: torch.device | None = None,
    use_dtensor: bool | None = None,
) -> torch.Tensor:
    """Convert ``local``, this rank's part of a tensor sharded like ``param``, for a state dict: to a DTensor if the
    user gave a device mesh, else a ShardedTensor. It holds a copy of ``local`` on ``device``. Not collective."""
    own = torch.empty_like(local, device=device or param.mesh.device).copy_(local)
    if not param.layout.shape and param.spec.unsharded is None:
        return own  # every rank has the whole scalar
    if use_dtensor or (use_dtensor is None and wrapper._settings.device_mesh is not None):
        return param.spec.sharded.dtensor(own)
    return torch_names.sharded_tensor(own, param.layout, wrapper.process_group)


def local_value(param: ShardedParam, value: object) -> torch.Tensor | None:
    """This rank's shard of a loaded ``value``, which is whole, a DTensor or a ShardedTensor; it may share its memory.
    None if ``value`` is not a tensor or has another shape. Collective if a DTensor is sharded differently.

    Raises:
        ValueError: a ShardedTensor is sharded differently.
    """
    shape = tuple(param.spec.sharded.shape)
    if not isinstance(value, torch.Tensor):
        return None
    found = torch_names.shape_of(value)
    if not shape and found == (1,) and not isinstance(value, DTensor):  # as in nn.Module, for checkpoints of torch 0.3
        value, found = value[0], torch.Size(())
    if found != shape:
        return None
    if is_sharded_tensor(value):
        return _local_of_sharded_tensor(param, value)
    if isinstance(value, DTensor):
        return _local_of_dtensor(param, value)
    if param.spec.unsharded is not None:  # also sharded over model axes
        mine = param.spec.sharded
        return _torch.local_of(distribute_tensor(value, mine.mesh, mine.placements, src_data_rank=None))
    return param.shard_of(value.detach())


def _local_of_dtensor(param: ShardedParam, value: DTensor) -> torch.Tensor:
    mine = param.spec.sharded
    same_ranks = value.device_mesh == mine.mesh or torch.equal(value.device_mesh.mesh, mine.mesh.mesh)
    if same_ranks and value.placements == mine.placements:
        return _torch.local_of(value).detach()
    if value.device_mesh == mine.mesh:
        return value.redistribute(placements=mine.placements).to_local().detach()
    whole = value.full_tensor().detach()
    local = local_value(param, whole)
    assert local is not None  # the shape is right
    return local


def _local_of_sharded_tensor(param: ShardedParam, value: torch.Tensor) -> torch.Tensor:
    layout = param.layout
    expected = [(start, stop) for start, stop in map(layout.interval, range(layout.num_shards)) if stop > start]
    rest = [(0, size) for size in layout.shape[1:]]
    found = sorted(torch_names.pieces_of(value))
    if found != [[each, *rest] for each in expected] and layout.numel:
        raise ValueError(
            f"load_state_dict: '{param.full_name}' is a ShardedTensor in {len(found)} pieces, expected "
            f"{len(expected)}, cut along dim 0: it was saved on other ranks. Load it by torch.distributed.checkpoint "
            "into model.state_dict(), which cuts it anew."
        )
    locals_ = torch_names.local_shards(value)
    return locals_[0] if locals_ else torch.empty(param.shard_shape, dtype=param.dtypes.orig)


# Local: a part of the flat parameter that torch's class makes


def torch_flat(
    numels: Sequence[int], itemsize: int, num_ranks: int, *, aligned: bool
) -> tuple[list[int], plans.Layout]:
    """Where parameters with ``numels`` elements begin in the flat parameter of torch's class, one after another, and
    how ranks share it. With ``aligned``, as for ``use_orig_params``, each parameter starts at a multiple of 16 bytes,
    and the total is divisible by the number of ranks."""
    step = max(_ALIGNMENT_NBYTES // itemsize, 1) if aligned else 1
    offsets, _ = plans.pack(numels, step)
    end = offsets[-1] + numels[-1]
    numel = -(-end // num_ranks) * num_ranks if aligned else end
    return offsets, plans.shard_layout((numel,), 0, num_ranks)


def flat_layout(wrapper: Wrapper, group: ParamGroup) -> tuple[list[int], plans.Layout]:
    """The layout of the parameters of ``group``, which is the unit of ``wrapper``."""
    numels = [param.layout.numel for param in group.params]
    itemsize = group.params[0].dtypes.orig.itemsize
    return torch_flat(numels, itemsize, wrapper.world_size, aligned=wrapper._settings.use_orig_params)


def memory_order(param: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of ``param`` in memory order, outermost first; None if it is contiguous. Torch's flat parameter stores
    non-contiguous parameters, such as those in ``channels_last``, in this order."""
    if param.is_contiguous():
        return None
    strides = param.stride()
    return tuple(sorted(range(param.dim()), key=lambda dim: (-strides[dim], dim)))


def _order_in_flat(wrapper: Wrapper, param: ShardedParam) -> tuple[int, ...]:
    return wrapper._memory_orders.get(param.name) or tuple(range(len(param.layout.shape)))


def flat_value(
    wrapper: Wrapper, group: ParamGroup, wholes: Sequence[torch.Tensor], device: torch.device | None
) -> torch.Tensor:
    """Build this rank's part of torch's flat parameter, a ShardedTensor, from whole parameters. Not collective."""
    offsets, layout = flat_layout(wrapper, group)
    start, stop = layout.interval(wrapper.rank)
    own = wholes[0].new_zeros(stop - start, device=device or group.mesh.device)
    for param, offset, whole in zip(group.params, offsets, wholes, strict=True):
        first, last = max(start, offset), min(stop, offset + whole.numel())
        if last > first:
            flat = whole.permute(_order_in_flat(wrapper, param)).reshape(-1)
            own[first - start : last - start].copy_(flat[first - offset : last - offset])
    requires_grad = any(param.sharded.requires_grad for param in group.params)
    return torch_names.sharded_tensor(own, layout, wrapper.process_group, requires_grad=requires_grad)


def check_flat_value(wrapper: Wrapper, group: ParamGroup, name: str, value: object) -> None:
    """Raise RuntimeError if ``value``, loaded under ``name``, cannot be the flat parameter of ``group`` here."""
    _, layout = flat_layout(wrapper, group)
    expected_numel = math.prod(layout.shard_shape(wrapper.rank))
    if value is None:
        raise RuntimeError(
            f"load_state_dict: '{name}' is missing. LOCAL_STATE_DICT is set, so the state dict must have the flat "
            "parameter of each wrapper. Set the kind of state dict that was saved."
        )
    shape, mine = torch_names.shape_of(value), []
    if is_sharded_tensor(value):
        mine = [local.numel() for local in torch_names.local_shards(value)]
        if shape == layout.shape and len(mine) <= 1 and sum(mine) == expected_numel:
            return
    found = f" of shape {tuple(shape)}" if shape is not None else ""
    raise RuntimeError(
        f"load_state_dict: '{name}' is a {type(value).__name__}{found} with {sum(mine)} elements on rank "
        f"{wrapper.rank}, expected a ShardedTensor of shape {layout.shape} with {expected_numel}. A local state dict "
        "fits only the model, the wrapping and the number of ranks that it was saved with. Use full or sharded ones to "
        "change these."
    )


def wholes_of_flat(wrapper: Wrapper, group: ParamGroup, value: object) -> dict[ShardedParam, torch.Tensor]:
    """Extract the whole parameters of ``group`` from the flat parameter ``value``. Collective."""
    offsets, layout = flat_layout(wrapper, group)
    locals_ = torch_names.local_shards(value)
    sent = torch.zeros(layout.chunk_numel, dtype=group.params[0].dtypes.orig, device=group.mesh.device)
    if locals_:
        sent[: locals_[0].numel()].copy_(locals_[0])
    got = sent.new_empty(layout.padded_numel)
    dist.all_gather_into_tensor(got.view(torch.uint8), sent.view(torch.uint8), group=wrapper.process_group)
    found = {}
    for param, offset in zip(group.params, offsets, strict=True):
        order = _order_in_flat(wrapper, param)
        whole = got[offset : offset + param.layout.numel].view([param.layout.shape[dim] for dim in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        found[param] = param.spec.unsharded_tensor(whole.permute(back).contiguous())
    return found


def is_replicated(wrapper: Wrapper) -> bool:
    """Whether parameters are whole on each rank, so that state dicts are always full."""
    return wrapper._settings.strategy is ShardingStrategy.NO_SHARD
