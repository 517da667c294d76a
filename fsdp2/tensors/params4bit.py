"""Frozen 4-bit weights of bitsandbytes (``Params4bit``), as QLoRA keeps its base model (Dettmers et al., arXiv
2305.14314). ``fully_shard`` turns each into a ``Shard4bit``.

bitsandbytes cuts a flattened weight into blocks. For each block, it keeps packed codes and one scale (``absmax``). A
row of ``Shard4bit`` is a block, so each cut along dim 0 is exact. Codes and scales are sent. All ranks hold the small
parts: the table of codes, and the statistics of the scales if these are quantised, too (4 bytes for 256 blocks).

Rule: only bitsandbytes quantises and dequantises, so all bytes are those that it would make from the whole weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdp2.core import Slot, seams
from fsdp2.tensors.in_files import DenseWeight, FileTensor
from fsdp2.tensors.packed import PackedTensor
from fsdp2.tensors.wrapper import Tensors

# bitsandbytes' choices: the number of codes, and how it quantises scales.
_NUM_CODES, _NUM_NESTED_CODES, _NESTED_BLOCKSIZE = 16, 256, 256
_TEXT = "quant_state.bitsandbytes__"  # key in files of a state's other values; the type follows it
_OFFSET = "nested_offset"


class Shard4bit(PackedTensor):
    """Blocks of a 4-bit weight: bytes of shape ``(blocks, blocksize / 2)``. The last block of a weight may be padded.

    It is uint8, whatever dtype bitsandbytes stores the bytes in, so that no cast to a floating-point dtype changes it.
    It can be copied, moved, saved, and cut along dim 0. Other operations read its bytes.
    """

    _packed: torch.Tensor
    _absmax: torch.Tensor
    _code: torch.Tensor
    _nested_absmax: torch.Tensor
    _nested_code: torch.Tensor
    _nested_offset: torch.Tensor
    blocksize: int
    compress_statistics: bool
    quant_type: str
    quant_storage: torch.dtype
    _weight_shape: tuple[int, ...]
    _weight_dtype: torch.dtype
    _nested_blocksize: int
    _INNER = ("_packed", "_absmax", "_code", "_nested_absmax", "_nested_code", "_nested_offset")
    # Public options have the same names as in bitsandbytes' class.
    _option_names = (
        *("blocksize", "compress_statistics", "quant_type", "quant_storage"),
        *("_weight_shape", "_weight_dtype", "_nested_blocksize"),
    )

    @classmethod
    def of(cls, param: Any) -> Shard4bit:
        """All blocks of ``param``, a quantised ``Params4bit``. Shares its memory if the last block needs no padding."""
        state = param.quant_state
        flat = param.data.detach().as_subclass(torch.Tensor).reshape(-1).view(torch.uint8)
        padded_nbytes = state.absmax.numel() * state.blocksize // 2
        nested, absmax = state.state2, state.absmax
        return cls(
            F.pad(flat, (0, padded_nbytes - flat.numel())).view(-1, state.blocksize // 2),
            absmax.reshape(-1),
            state.code,
            absmax.new_empty(0) if nested is None else nested.absmax,
            absmax.new_empty(0) if nested is None else nested.code,
            absmax.new_empty(0) if nested is None else state.offset.reshape(()),
            blocksize=state.blocksize,
            compress_statistics=nested is not None,
            quant_type=state.quant_type,
            quant_storage=param.data.dtype,
            _weight_shape=tuple(state.shape),
            _weight_dtype=state.dtype,
            _nested_blocksize=0 if nested is None else nested.blocksize,
        )

    @classmethod
    def on_meta(cls, param: Any) -> Shard4bit:
        """All blocks of ``param``, which is on the meta device and will be quantised when it is loaded."""
        num_blocks, is_nested = -(-param.numel() // param.blocksize), param.compress_statistics

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        return cls(
            empty(num_blocks, param.blocksize // 2, dtype=torch.uint8),
            empty(num_blocks, dtype=torch.uint8 if is_nested else torch.float32),
            empty(_NUM_CODES),
            empty(-(-num_blocks // _NESTED_BLOCKSIZE) if is_nested else 0),
            empty(_NUM_NESTED_CODES if is_nested else 0),
            empty() if is_nested else empty(0),
            blocksize=param.blocksize,
            compress_statistics=is_nested,
            quant_type=param.quant_type,
            quant_storage=param.quant_storage,
            _weight_shape=tuple(param.shape),
            _weight_dtype=param.dtype,
            _nested_blocksize=_NESTED_BLOCKSIZE if is_nested else 0,
        )

    @property
    def dense_like(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the whole weight when it is dequantised."""
        return self._weight_shape, self._weight_dtype

    @property
    def _num_blocks(self) -> int:
        """The number of blocks of the whole weight."""
        return -(-math.prod(self._weight_shape) // self.blocksize)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"<{type(self).__name__} of {self.size(0)} of {self._num_blocks} blocks of {self.blocksize} "
            f"{self.quant_type} weights, on {self.device}>"
        )

    def _plain(self) -> torch.Tensor:
        return self._packed

    def _can_have(self, dtype: torch.dtype, size: Sequence[int] | None = None) -> bool:
        return dtype is torch.uint8 and (size is None or (len(size) == 2 and size[1] == self.size(1)))

    def _check_cut(self, dim: int) -> None:
        if dim % 2 != 0:
            raise ValueError(
                f"4-bit weights of bitsandbytes were to be cut along dim {dim}, but a row is a block with one scale, "
                "so only cuts along dim 0 are exact. Use Shard(0)."
            )

    def _packed_from(self, source: torch.Tensor) -> Tensors:
        if not isinstance(source, Shard4bit) or source._options != self._options or source.shape != self.shape:
            raise TypeError(
                f"copy_ into {self!r}: expected as many blocks of a 4-bit weight with the same options "
                f"{self._options}, found {_described(source)}."
            )
        return source._inner

    def fsdp2_whole(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> Params4bit:
        """Gather all blocks into their own memory."""
        return Params4bit(*map(gather, self._cut), *(inner.clone() for inner in self._shared), **self._options)

    def _state(self) -> Any:
        """A new ``QuantState`` of bitsandbytes for these blocks. Its tensors are those of the wrapper."""
        from bitsandbytes.functional import QuantState

        nested = None
        if self.compress_statistics:
            nested = QuantState(
                absmax=self._nested_absmax,
                blocksize=self._nested_blocksize,
                code=self._nested_code,
                dtype=torch.float32,
            )
        return QuantState(
            absmax=self._absmax,
            shape=torch.Size(self._weight_shape),
            code=self._code,
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=self._weight_dtype,
            offset=None if nested is None else self._nested_offset,
            state2=nested,
        )

    def fsdp2_in_files(self) -> dict[str, FileTensor]:
        """The tensors that bitsandbytes writes for such a weight, by the suffix that it appends to the name."""
        shape = (-(-math.prod(self._weight_shape) // 2) // self.quant_storage.itemsize, 1)
        finish = self._quantise_scales if self.compress_statistics else None
        dense = DenseWeight(self._weight_shape, self.blocksize, self._quantise, finish)
        absmax = self._absmax
        shared = {".quant_map": self._code}
        if self.compress_statistics:
            shared |= {".nested_absmax": self._nested_absmax, ".nested_quant_map": self._nested_code}
        text = self._state().as_dict(packed=True)[_TEXT + self.quant_type]
        return {
            "": FileTensor(self._packed, shape, self.quant_storage, is_cut=True, dense=dense),
            ".absmax": FileTensor(absmax, (self._num_blocks,), absmax.dtype, is_cut=True),
            **{suffix: FileTensor(each, tuple(each.shape), each.dtype) for suffix, each in shared.items()},
            f".{_TEXT}{self.quant_type}": FileTensor(
                text, tuple(text.shape), text.dtype, check=self._check_text, write=self._write_text
            ),
        }

    def _check_text(self, values: torch.Tensor) -> str:
        """Check the JSON that bitsandbytes writes for a state in addition to its tensors."""
        own = _parsed(self._state().as_dict(packed=True)[_TEXT + self.quant_type])
        try:
            found = _parsed(values)
        except ValueError as error:
            return f"it is no JSON: {error}"
        keys = [key for key in own if key != _OFFSET and found.get(key) != own[key]]
        return "; ".join(f"{key} is {found.get(key)!r}, expected {own[key]!r} as in the model" for key in keys)

    def _write_text(self, values: torch.Tensor) -> None:
        if self.compress_statistics:
            self._nested_offset.fill_(_parsed(values)[_OFFSET])

    def _quantise(self, values: torch.Tensor) -> torch.Tensor:
        """Fill these blocks with ``values``, quantised by bitsandbytes; returns their scales in float32."""
        from bitsandbytes.functional import get_4bit_type, quantize_4bit

        device = self._packed.device
        self._code.copy_(get_4bit_type(self.quant_type, device=device))
        if not values.numel():
            return self._absmax.new_empty(0, dtype=torch.float32)
        values = values.to(device, self._weight_dtype)
        packed, state = quantize_4bit(values, blocksize=self.blocksize, quant_type=self.quant_type)
        self._packed.view(-1)[: packed.numel()].copy_(packed.view(-1))
        if not self.compress_statistics:
            self._absmax.copy_(state.absmax)
        scales: torch.Tensor = state.absmax
        return scales

    def _quantise_scales(self, scales: torch.Tensor, start: int) -> None:
        """Quantise ``scales`` of all blocks as bitsandbytes does. Those of this rank begin at ``start``."""
        from bitsandbytes.functional import quantize_blockwise

        offset = scales.mean()
        absmax, state = quantize_blockwise(scales - offset, blocksize=self._nested_blocksize)
        self._absmax.copy_(absmax[start : start + self._absmax.numel()])
        self._nested_absmax.copy_(state.absmax)
        self._nested_code.copy_(state.code)
        self._nested_offset.copy_(offset)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Tensors, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tensors] | None:
        """The weight that bitsandbytes computes with. It lies in the outputs, which each gather fills again."""
        if out is not None:
            return None
        packed, absmax = (output[: self._num_blocks] for output in all_gather_outputs)
        return Params4bit(packed, absmax, *self._shared, **self._options), ()


class Params4bit(Shard4bit):
    """A whole weight during a pass. It has what bitsandbytes' layers read from a ``Params4bit``: the state, and bytes
    of shape ``(n, 1)``. The class has this name because other libraries recognise 4-bit weights by it."""

    @property
    def quant_state(self) -> Any:
        """A new ``QuantState`` of bitsandbytes. Its tensors are those of the parameter."""
        return self._state()

    def dequantise(self) -> torch.Tensor:
        """The weight as bitsandbytes dequantises it, in the dtype that it was quantised from."""
        from bitsandbytes.functional import dequantize_4bit

        weight: torch.Tensor = dequantize_4bit(self._plain(), self._state())
        return weight

    def _like(self, *inner: torch.Tensor, **changes: Any) -> torch.Tensor:
        """Parts of it are ``Shard4bit`` tensors."""
        cls = Params4bit if inner[0].size(0) == self._num_blocks else Shard4bit
        return cls._of(*inner, **{**self._options, **changes})

    def _plain(self) -> torch.Tensor:
        """The bytes without padding."""
        nbytes = -(-math.prod(self._weight_shape) // 2)
        return self._packed.view(-1)[:nbytes].view(-1, 1)


# For torch.load(weights_only=True), which checkpoints use.
torch.serialization.add_safe_globals([Shard4bit, Params4bit])


# The adapter


def adapt(name: str, param: nn.Parameter, slots: Sequence[Slot]) -> seams.Adapted:
    """Make the tensor to shard in place of ``param``, a ``Params4bit`` of bitsandbytes.

    Raises:
        ValueError: it is trainable, was not quantised, or has lost its state.
    """
    _check(name, param)

    def commit() -> None:
        module: Any
        for module, _ in slots:
            module.quant_state = None  # all of the state, on each rank
            # On some CPUs, a forward in eval mode would repack the weight into memory that no gather fills.
            module.support_avx512bf16_for_cpu = False

    with torch.no_grad():
        is_empty = param.is_meta and param.quant_state is None  # type: ignore[attr-defined]
        return seams.Adapted(Shard4bit.on_meta(param) if is_empty else Shard4bit.of(param), commit)


def _check(name: str, param: Any) -> None:
    state = param.quant_state
    if param.requires_grad:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a Params4bit of bitsandbytes that requires gradients, but 4-bit codes "
            "cannot be trained. Call requires_grad_(False) on it, and train an adapter."
        )
    if state is None and param.is_meta:
        return  # it is quantised when it is loaded
    if state is None:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a Params4bit of bitsandbytes that is not quantised, or has lost its "
            "quant_state. Move the model to a device before fully_shard, which quantises it: model.to(device)."
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"fully_shard: parameter '{name}' was repacked for the CPU by a forward of bitsandbytes in eval mode. Call "
            "fully_shard before such a forward, or call model.state_dict(), with which bitsandbytes undoes it."
        )
    nbytes, expected = param.data.nbytes, -(-math.prod(state.shape) // 2)
    num_blocks = -(-math.prod(state.shape) // state.blocksize)
    if nbytes != expected or state.absmax.numel() != num_blocks:
        raise ValueError(
            f"fully_shard: parameter '{name}' has {nbytes} bytes and {state.absmax.numel()} blocks, but its "
            f"quant_state is of a weight of {expected} bytes and {num_blocks} blocks. If something has cut it before, "
            "quantise the whole weight."
        )


def _parsed(text: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(text.tolist()))
    return found


def _described(source: torch.Tensor) -> str:
    own = f" with {source._options}" if isinstance(source, Shard4bit) else ""
    return f"a {type(source).__name__} of shape {tuple(source.shape)}{own}"
