"""The conformance check passes classes that keep the protocol, and names what is wrong with others, in golden texts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2 import MixedPrecisionPolicy
from fsdp2.core.trees import find_tensors, map_tensors
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    MXBlocks,
    MXFP8AllGatherTensor,
)
from fsdp2.tensors.float8 import Float8Tensor, magnitude, quantise_float8, row_magnitudes, scale_from
from fsdp2.tensors.int8 import dequantise, quantise
from fsdp2.tensors.mxfp8 import dequantise_mxfp8, quantise_mxfp8
from fsdp2.tensors.nf4 import NF4Tensor
from fsdp2.tensors.two_tensor import TwoTensor
from fsdp2.testing import SHAPES, check_all_gather_extension
from tests.harness import extensions
from tests.harness.extensions import is_in_place
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

aten = torch.ops.aten
TEXTS = texts_beside(__file__)
MATRICES = [shape for shape in SHAPES if len(shape) > 1]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ROWS = Float8Scaling.PER_ROW
MX_COLUMNS = partial(MXFP8AllGatherTensor, blocks=MXBlocks.COLUMNS)  # on 3 ranks with 32 rows each, none share a block


class Wrapper(extensions.Travelling):
    """Sent multiplied by ``factor``. Broken classes differ in one thing each."""

    factor: int
    __reduce_ex__ = Tensor.__reduce_ex__

    def __init_subclass__(cls) -> None:
        torch.serialization.add_safe_globals([cls])
        if "<locals>" not in cls.__qualname__:  # pickle looks there, also for what type() has made
            setattr(sys.modules[cls.__module__], cls.__qualname__, cls)

    def __new__(cls, plain: Tensor, factor: int = 2) -> Wrapper:
        made = super().__new__(cls, plain)
        made.factor = factor
        return made

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["plain"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["plain"], factor)

    def like(self, plain: Tensor) -> Wrapper:
        return type(self)(plain, self.factor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, *cls.before(func, args, kwargs or {}))

    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self.plain * self.factor,), self.factor

    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return out.copy_(outputs[0]).div_(factor)
        made = outputs[0].to(param_dtype, copy=True).div_(factor)
        return made, (made,)


torch.serialization.add_safe_globals([Wrapper])


def _share_a_scale(shards: list[Any]) -> None:
    scale = scale_from(torch.stack([magnitude(shard._data) for shard in shards]).amax(0))
    for shard in shards:
        shard.precomputed(scale)


def _float8(full: Tensor, dtype: torch.dtype, magnitudes: Any = magnitude) -> Tensor:
    scale = scale_from(magnitudes(full))
    return Float8Tensor(quantise_float8(full, scale), scale, dtype)


float8_rows = partial(_float8, magnitudes=row_magnitudes)


def _nf4(full: Tensor, dtype: torch.dtype) -> Tensor:
    return NF4Tensor.quantise(full).dequantise(dtype)


def int8(full: Tensor, dtype: torch.dtype) -> Tensor:
    made = torch.empty_like(full, dtype=dtype)
    dequantise(*quantise(full, 16), 16, out=made)
    return made


def mxfp8(full: Tensor, dtype: torch.dtype, blocks: MXBlocks = MXBlocks.ROWS) -> Tensor:
    made = torch.empty_like(full, dtype=dtype)
    dequantise_mxfp8(*quantise_mxfp8(full, blocks), blocks, out=made)
    return made


def _pair(full: Tensor, dtype: torch.dtype) -> Tensor:
    return TwoTensor(full.to(dtype), (full + 1).to(dtype))


def _exact(make: Callable[[Tensor], Tensor], value: Callable[[Tensor, torch.dtype], Tensor], **options: Any) -> Any:
    """``make`` gives ``value`` on any number of ranks, in fp32 and in bf16."""
    in_bf16 = {"value": lambda full: value(full, torch.bfloat16), "mp_policy": BF16, **options}
    yield make, {"value": lambda full: value(full, torch.float32), "world_sizes": (1, 2, 3, 4, 9), **options}
    yield pytest.param(make, in_bf16, marks=pytest.mark.ci)


def _in_ci(values: tuple[Any, ...]) -> Any:
    return pytest.param(*values, marks=pytest.mark.ci)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Wrapper, {"value": lambda full: full}),
        (Wrapper, {"trainable": False, "mp_policy": BF16, "dtype": torch.float64}),
        *_exact(BFloat16AllGatherTensor, lambda full, dtype: full.bfloat16().to(dtype)),
        *_exact(partial(BFloat16AllGatherTensor, pad=True), lambda full, dtype: full.bfloat16().to(dtype)),
        *_exact(Float8AllGatherTensor, _float8, prepare=_share_a_scale),
        *_exact(partial(Float8AllGatherTensor, scaling=ROWS), float8_rows, shapes=MATRICES),
        *_exact(partial(Int8AllGatherTensor, block_size=16), int8, shapes=[(7, 40), (5, 3, 9)]),
        *_exact(MXFP8AllGatherTensor, mxfp8, shapes=[(7, 40), (5, 3, 9)]),
        *_exact(MX_COLUMNS, partial(mxfp8, blocks=MXBlocks.COLUMNS), shapes=[(96, 3)], world_sizes=(1, 3)),
        *_exact(NF4Tensor.quantise, _nf4, shapes=MATRICES, trainable=False),
        *_exact(lambda full: TwoTensor(full, full + 1), _pair),
        (extensions.AliasingHalved, {"value": lambda full: full.bfloat16()}),
        *map(_in_ci, [
            (Wrapper, {"value": lambda full: full, "dim": -1, "shapes": MATRICES}),
            (Int8AllGatherTensor, {"shapes": MATRICES, "value": lambda full: full, "tolerance": 0.02}),
            (extensions.Ragged, {"value": lambda full: full}),
            (extensions.Padded, {"value": lambda full: full}),
            (extensions.Halved, {}),
            (extensions.Packed4, {"shapes": [(8, 4), (5, 6)], "value": lambda full: full, "tolerance": 0.5}),
        ]),
    ],
)  # fmt: skip
def test_class_that_keeps_the_protocol_passes(make: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    check_all_gather_extension(make, **options)


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {}


def _broken(cls: type[Wrapper]) -> type[Wrapper]:
    BROKEN[cls.__name__] = cls
    return cls


def _sending(name: str, pre_hook: Callable[[Any, Any], Any]) -> None:
    """A class with another pre-hook."""
    _broken(type(name, (Wrapper,), {"fsdp_pre_all_gather": pre_hook}))


def _receiving(name: str, post_hook: Callable[..., Any]) -> None:
    """A class with another post-hook. ``right`` is that of ``Wrapper``, with other arguments if it is given any."""

    def post(self: Wrapper, outputs: Any, factor: int, param_dtype: Any, *, out: Any = None) -> Any:
        def right(**other: Any) -> Any:
            given = {"outputs": outputs, "factor": factor, "param_dtype": param_dtype, "out": out, **other}
            return Wrapper.fsdp_post_all_gather(self, **given)

        return post_hook(self, outputs, out, right)

    _broken(type(name, (Wrapper,), {"fsdp_post_all_gather": post}))


def _losing_class(name: str, operation: Any) -> type[Wrapper]:
    """A class that gives plain tensors in ``operation``, too."""
    return _broken(type(name, (Wrapper,), {"keeps_class": Wrapper.keeps_class - {operation}}))


_losing_class("LosesItsClassOnDetach", aten.detach.default)
_losing_class("CannotBeCut", aten.new_zeros.default)
LosesItsClassOnClone = _losing_class("LosesItsClassOnClone", aten.clone.default)
_losing_class("LosesItsClassOnEmptyLike", aten.empty_like.default)
_losing_class("LosesItsClassOnTo", aten._to_copy.default)
_broken(type("HasNoPostHook", (Wrapper,), {"fsdp_post_all_gather": None}))
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_broken(type("AnswersOne", (Wrapper,), {_RELEASE: lambda self: 1}))
_sending("ReturnsAList", lambda self, mesh: ([self.plain], None))
_sending("SendsWhatRanksCannotJoin", lambda self, mesh: ((self.plain[:, mesh.get_local_rank() :].contiguous(),), 1))
_sending(
    "SendsAnotherDtypeFromTheSecondRank",
    lambda self, mesh: ((self.plain.to(torch.float64 if mesh.get_rank() else torch.float32),), 1),
)
_sending("DependsOnTheNumberOfRanks", lambda self, mesh: ((self.plain * mesh.size(),), 1))
_sending("DependsOnTheRank", lambda self, mesh: ((self.plain * 1,), 1 + mesh.get_rank()))
_sending("FailsOnEmptyShards", lambda self, mesh: ((self.plain / self.plain.amax(),), 1))
_sending("Communicates", lambda self, mesh: torch.distributed.all_reduce(self.plain, group=mesh.get_group()))
_sending("AsksForMore", lambda self, mesh, rank: None)


def _with_the_shard(self: Wrapper, outputs: Any, out: Any, right: Callable[..., Any]) -> Any:
    made = right()
    return None if out is not None else (made[0], (made[0], self.plain))


def _with_other_memory(self: Wrapper, outputs: Any, out: Any, right: Callable[..., Any]) -> Any:
    made = right(out=None)
    if out is None:
        return made
    out.data = made[0]
    return None


_receiving("FreesTheShard", _with_the_shard)
_receiving("Leaks", lambda self, _, out, right: right() if out is not None else (right()[0], ()))
_receiving("ReleasesWhatItNeeds", lambda self, outputs, out, _: (outputs[0], ()) if out is None else None)
_receiving("WritesIntoOutputs", lambda self, outputs, out, _: (outputs[0].div_(2), ()) if out is None else None)
_receiving("IgnoresOut", lambda self, _, out, right: right() if out is None else None)
_receiving("ReturnsAnother", lambda self, _, out, right: right(out=None))
_receiving("ReturnsOneTensor", lambda self, outputs, *_: outputs[0])
_receiving("DropsARow", lambda self, outputs, _, right: right(outputs=(outputs[0][1:],)))
_receiving("PutsOtherMemoryUnderOut", _with_other_memory)


@_broken
class ChangesItsPayload(Wrapper):
    num_calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.num_calls += 1
        return (self.plain.repeat(self.num_calls, 1),), 1


class Spreading(Wrapper):
    """Whatever is computed with it becomes one of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return map_tensors(lambda tensor: tensor if isinstance(tensor, Wrapper) else cls(tensor), result)


@_broken
class SpreadsToItsGradient(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=None if out is None else out.plain)
        return None if out is not None else (Spreading(made[0]), made[1])

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["itself"], self.factor

    @property
    def itself(self) -> Tensor:
        return self.plain

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["itself"], factor)


@_broken
class ClonesNothing(Wrapper):
    def __deepcopy__(self, memo: Any) -> Any:
        return torch.nn.Parameter(self.detach())


@_broken
class ForgetsItsFactor(Wrapper):
    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["plain"], 3)

    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, 2, param_dtype, out=out)


@_broken
class LooksAtItsValues(Wrapper):
    def __new__(cls, plain: Tensor, factor: int = 2) -> Wrapper:
        assert plain.sum().item() is not None
        return super().__new__(cls, plain, factor)


@_broken
class SendsWhatItSentFirst(Wrapper):
    sent: Any = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.sent = self.plain * self.factor if self.sent is None else self.sent
        return (self.sent,), self.factor


@_broken
class IsNotWrittenOnLists(Wrapper):
    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if not func.__name__.startswith("_foreach_"):
            return args, kwargs
        return map_tensors(lambda tensor: tensor.clone() if isinstance(tensor, cls) else tensor, (args, kwargs))


@_broken
class RefusesToBeStepped(Wrapper):
    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        written = find_tensors(args[:1], []) if is_in_place(func) else []
        if func is not aten.copy_.default and any(isinstance(tensor, cls) for tensor in written):
            raise NotImplementedError("only copy_ writes this class")
        return args, kwargs


class IsNotSafeToRead(Wrapper):
    def __init_subclass__(cls) -> None:
        """Torch is not told of subclasses."""


@_broken
class CannotBeRead(IsNotSafeToRead):
    pass


@_broken
class LosesItsFactor(Wrapper):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.plain.clone() * 2,)


@_broken
class Twice(LosesItsClassOnClone, LooksAtItsValues):  # type: ignore[misc, valid-type]
    """Of several kinds."""


class Subclass(torch.Tensor):
    """A plain tensor's memory under another class."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(Tensor).bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return Wrapper.fsdp_post_all_gather(self, outputs, 1, param_dtype, out=out)  # type: ignore[arg-type]


REPORTED: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    **{name: (make, {}) for name, make in BROKEN.items()},
    "ReleasesWhatItNeeds": (BROKEN["ReleasesWhatItNeeds"], {"world_sizes": (1,)}),
    "FailsOnEmptyShards": (BROKEN["FailsOnEmptyShards"], {"shapes": [(1, 3)]}),
    "shape without the dim to cut is refused": (Wrapper, {"shapes": [(5, 3), (7,)], "dim": 1}),
    "plain tensor": (lambda full: full, {}),
    "make that changes the shape": (lambda full: Wrapper(full.t().contiguous()), {}),
    "class that DTensors lose": (lambda full: full.as_subclass(Subclass), {}),
    "values other than the expected ones": (Wrapper, {"value": lambda full: full + 1, "tolerance": 0.5}),
    "failures of several shapes are one line": (
        BROKEN["Leaks"],
        {"shapes": [(5, 3), (2, 2)], "world_sizes": (1, 2, 4)},
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_what_is_wrong_is_reported(name: str) -> None:
    """On one shape, and on two ranks."""
    make, options = REPORTED[name]
    given = {"shapes": [(5, 3)], "world_sizes": (2,), **options}
    TEXTS.check(name, error_of(lambda: check_all_gather_extension(make, **given)), among=REPORTED)


def test_class_that_checkpoints_cannot_write_is_reported() -> None:
    class OfAFunction(Wrapper):
        pass

    checked = partial(check_all_gather_extension, OfAFunction, shapes=[(5, 3)], world_sizes=(2,))
    report = error_of(checked).replace("\n", " ")
    assert "- save: torch.save cannot write a OfAFunction: AttributeError: " in report  # then the text of this Python
    assert "Define the class, and those of its attributes, at the top of a module." in report
