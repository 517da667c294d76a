"""Small tensor subclasses with all-gather hooks, each for one thing that the protocol allows.

Rule: what travels, and what becomes of it, are two pure functions on plain tensors, ``encode`` and ``decode``, so that
``extension_reference`` can do by hand what a runtime does through the hooks. Hooks write ``out`` without looking after
its version counter: that is the runtime's part. ``recorded()`` tells which hooks were called, and with what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Meta(NamedTuple):
    """What the pre-hooks here hand to the post-hooks. ``serial`` counts the pre-hook's calls."""

    outer_size: torch.Size
    num_ranks: int
    rank: int
    serial: int


class Call(NamedTuple):
    """One call of a hook on ``self``; ``given`` are its other arguments by name."""

    hook: str
    on: Tensor
    given: dict[str, Any]


_records: list[list[Call]] = []
_serial = 0


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls of hooks inside the block, in order."""
    calls: list[Call] = []
    _records.append(calls)
    try:
        yield calls
    finally:
        _records.pop()


def count(calls: list[Call], hook: str) -> int:
    """How often ``hook`` ("pre", "post" or "fill") was called; "fill" is a post-hook with ``out``."""
    return sum(call.hook == hook for call in calls)


def note(hook: str, on: Tensor, **given: Any) -> None:
    for calls in _records:
        calls.append(Call(hook, on, given))


def next_serial() -> int:
    global _serial
    _serial += 1
    return _serial


def is_in_place(func: Any) -> bool:
    return func.__name__.partition(".")[0].endswith("_")


def _contiguous(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return shard.to(dtype, memory_format=torch.contiguous_format)


class Travelling(torch.Tensor):
    """A wrapper of one plain tensor that computes as that tensor. Subclasses say what is gathered in its place."""

    plain: Tensor
    # Operations that cut, move and copy parameters; all others give plain tensors.
    keeps_class = frozenset((aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default))
    keeps_class |= {aten.new_zeros.default, aten.empty_like.default, aten.zeros_like.default, aten.split.Tensor}
    keeps_class |= {aten.slice.Tensor, aten.view.default, aten.as_strided.default}
    releases_outputs = True

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, plain: Tensor) -> Travelling:
        made: Travelling = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made.plain = plain
        return made

    def like(self, plain: Tensor) -> Travelling:
        return type(self)(plain)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Travelling:
        return cls(inner["plain"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain_args, plain_kwargs = tree_map_only(Travelling, lambda tensor: tensor.plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in cls.keeps_class:
            return tree_map_only(torch.Tensor, args[0].like, result)
        return args[0] if is_in_place(func) and isinstance(result, Tensor) else result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.plain!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # checkpoints are plain

    # What travels: what ``rank`` sends for its plain ``shard`` of a parameter of ``size``; and the parameter, or with
    # more rows, in memory of its own or that of ``outputs``.
    encode: Any = staticmethod(lambda shard, rank, size, num_ranks: (shard.contiguous(),))
    decode: Any = staticmethod(lambda outputs, size, num_ranks, dtype: outputs[0].to(dtype))

    # The protocol

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return self.releases_outputs

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Meta]:
        meta = Meta(outer_size, mesh.size(), mesh.get_local_rank(), next_serial())
        given = {"outer_size": outer_size, "outer_stride": outer_stride, "module": module, "mp_policy": mp_policy}
        note("pre", self, **given, mesh=mesh, metadata=meta)
        return self.encode(self.plain, meta.rank, outer_size, meta.num_ranks), meta

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Meta, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        given = {"outputs": all_gather_outputs, "metadata": metadata, "param_dtype": param_dtype, "out": out}
        note("post" if out is None else "fill", self, **given)
        made = self.decode(all_gather_outputs, metadata.outer_size, metadata.num_ranks, param_dtype)
        if out is None:
            return made, (made,)
        if out.data_ptr() != made.data_ptr():
            self.write(out, made)
        return None

    def write(self, out: Tensor, made: Tensor) -> None:
        out.copy_(made[: out.size(0)])


class Halved(Travelling):
    """Travels in bfloat16."""

    encode = staticmethod(lambda shard, *_: (_contiguous(shard, torch.bfloat16),))
    decode = staticmethod(lambda outputs, size, num_ranks, dtype: outputs[0].to(dtype, copy=True))


class Scaled(Travelling):
    """Rows of int8, each with a scale in float32: two dtypes in one payload."""

    @classmethod
    def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
        scale = shard.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return (shard / scale).round().to(torch.int8), scale

    @classmethod
    def decode(cls, outputs: tuple[Tensor, ...], size: torch.Size, num_ranks: int, dtype: torch.dtype) -> Tensor:
        values, scale = outputs
        return (values.float() * scale).to(dtype)


class Packed4(Travelling):
    """Two values in a byte, and one 0-dim scale per rank. Rows have an even number of entries."""

    @classmethod
    def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
        scale = (shard.float().abs().amax() / 7).clamp(min=1e-12) if shard.numel() else torch.zeros(())
        values = (shard / scale).round().to(torch.int8) + 8
        return (values[:, 0::2] * 16 + values[:, 1::2]).view(torch.uint8), scale

    @classmethod
    def decode(cls, outputs: tuple[Tensor, ...], size: torch.Size, num_ranks: int, dtype: torch.dtype) -> Tensor:
        packed, scales = outputs
        assert scales.shape == (num_ranks,)
        values = torch.stack([packed >> 4, packed & 15], dim=2).flatten(1).float() - 8
        rank_of_row = torch.arange(size[0]) // -(-size[0] // num_ranks)
        return (values * scales[rank_of_row, None]).to(dtype)


class Ragged(Travelling):
    """One dim on the wire, and as many entries as the rank likes: 3 times its number in front of its values."""

    @classmethod
    def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
        return (torch.cat([shard.new_full((3 * rank,), float(rank)), shard.flatten()]),)

    @classmethod
    def decode(cls, outputs: tuple[Tensor, ...], size: torch.Size, num_ranks: int, dtype: torch.dtype) -> Tensor:
        chunk = -(-size[0] // num_ranks)
        pieces, start = [], 0
        for rank in range(num_ranks):
            num_rows = min((rank + 1) * chunk, size[0]) - min(rank * chunk, size[0])
            stop = start + 3 * rank + num_rows * size[1:].numel()
            assert bool((outputs[0][start : start + 3 * rank] == rank).all())
            pieces.append(outputs[0][start + 3 * rank : stop])
            start = stop
        assert start == outputs[0].numel()
        return torch.cat(pieces).view(size).to(dtype)


class Padded(Travelling):
    """Pads its shard to that of the first rank, as torch asks of hooks. What it returns has the padding at its end."""

    decode = staticmethod(Halved.decode)

    @classmethod
    def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
        padded = shard.new_full((-(-size[0] // num_ranks), *size[1:]), float("nan"))
        padded[: shard.size(0)].copy_(shard)
        return (padded,)


class Aliasing(Travelling):
    """What has arrived is the parameter, where its dtype is that of the policy; else a conversion of it."""

    releases_outputs = False


class AliasingHalved(Aliasing):
    """What has arrived is the parameter, in bfloat16 whatever the policy says."""

    encode = staticmethod(Halved.encode)
    decode = staticmethod(lambda outputs, *_: outputs[0])


class Silent(Travelling):
    """Sends nothing: everyone knows the value, the same for all entries."""

    encode = staticmethod(lambda *_: ())
    decode = staticmethod(
        lambda outputs, size, num_ranks, dtype: torch.full(size, float("nan") if outputs else 0.125, dtype=dtype)
    )


def wrap(
    model: nn.Module, make: Callable[[Tensor], Tensor], select: Callable[[str, Tensor], bool] | None = None
) -> Any:
    """``model`` with the parameters that ``select`` picks, or those of two dims, in a subclass; ties stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            picked = parameter.dim() == 2 if select is None else select(f"{prefix}.{name}", parameter)
            if picked and type(parameter) is nn.Parameter:
                if parameter not in made:
                    made[parameter] = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
    return model
