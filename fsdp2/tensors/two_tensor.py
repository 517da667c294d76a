"""``TwoTensor``: one tensor made of two. It is the reference for authors of all-gather hooks.

It has the three parts that the class of a sharded parameter needs: a wrapper that torch can take apart and reassemble
(``WrapperTensor``), an implementation of every op (``__torch_dispatch__``), and the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp2.core import MixedPrecisionPolicy, find_tensors, map_tensors
from fsdp2.tensors.wrapper import Tensors, WrapperTensor, as_strided, aten, written_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TwoTensor(WrapperTensor):
    """Combines ``a`` and ``b``, of equal shape, strides, dtype and device, into one tensor of that shape. An op runs
    once on all ``a``s and once on all ``b``s; plain tensors take part in both. So make all parameters ``TwoTensor``s.

    Raises:
        ValueError: ``a`` and ``b`` differ in shape, strides, dtype or device.
    """

    a: torch.Tensor
    b: torch.Tensor
    _INNER = ("a", "b")

    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> TwoTensor:
        if _facts(a) != _facts(b):
            raise ValueError(
                f"TwoTensor: a has {_facts(a)}, but b has {_facts(b)} (shape, strides, dtype, device). "
                "Pass tensors that agree in all four."
            )
        return cls._of(a, b)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(word in func.__name__ for word in ("_foreach_", "_fused_")):
            count = max((len(arg) for arg in args if isinstance(arg, (list, tuple))), default=0)
            if count > 1:
                return _run_by_position(func, args, kwargs, count)
        _refuse_what_cannot_be_two(func, args)
        if func is aten.as_strided.default:
            return as_strided(*args, **kwargs)

        def run(name: str) -> Any:
            def inner(tensor: torch.Tensor) -> torch.Tensor:
                return getattr(tensor, name) if isinstance(tensor, TwoTensor) else tensor

            return func(*map_tensors(inner, args), **map_tensors(inner, kwargs))

        inputs = {id(tensor.a): tensor for tensor in find_tensors([args, kwargs], []) if isinstance(tensor, TwoTensor)}
        return _paired(func, run("a"), run("b"), inputs)

    # The hooks. ``self`` is this rank's shard: a slice along dim 0, short or empty on the last ranks.

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[Tensors, None]:
        """The payload: plain contiguous tensors to send, and metadata for the other hook, which stays on this rank.

        A hook that needs only ``mesh`` has the short form ``fsdp_pre_all_gather(self, mesh)``. A cast here would
        send fewer bytes than a cast in the post-hook.
        """
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Tensors, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[TwoTensor, Tensors] | None:
        """The first call returns the unsharded parameter and the tensors, besides the outputs, to free with it.
        Later calls pass the parameter as ``out``, with new memory, to be written in place."""
        a, b = all_gather_outputs
        if out is not None:
            assert isinstance(out, TwoTensor)
            if a.dtype != out.dtype:
                out.a.copy_(a)
                out.b.copy_(b)
            return None  # otherwise out lies in the outputs, and the gather has written it
        if a.dtype == param_dtype:
            return TwoTensor(a, b), ()
        cast = TwoTensor(a.to(param_dtype), b.to(param_dtype))
        return cast, (cast.a, cast.b)


torch.serialization.add_safe_globals([TwoTensor])  # for torch.load(weights_only=True), which checkpoints use


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)


def _paired(func: Any, a: Any, b: Any, inputs: dict[int, TwoTensor]) -> Any:
    """Join the results of both runs. If a result is an inner tensor of an input, that input is returned: a write
    returns the written tensor. ``inputs`` has inputs by the id of their ``a``."""
    if isinstance(a, torch.Tensor):
        if id(a) in inputs:
            return inputs[id(a)]
        return a if a is b else TwoTensor(a, b)  # both runs returned the same plain tensor
    if isinstance(a, (list, tuple)):
        return type(a)(_paired(func, one, other, inputs) for one, other in zip(a, b, strict=True))
    if isinstance(a, bool):
        return a and b
    if a != b:
        raise ValueError(f"{func} of a TwoTensor is {a} for a and {b} for b, expected one result. Use .a or .b.")
    return a


def _refuse_what_cannot_be_two(func: Any, args: Any) -> None:
    if any(not isinstance(tensor, TwoTensor) for tensor in written_by(func, args, {})):
        raise TypeError(f"{func}: a plain tensor cannot hold the two results of a TwoTensor. Use .a or .b.")
    if torch.Tag.inplace_view in func.tags:  # it would change a and b, but not the shape of the wrapper
        raise NotImplementedError(
            f"{func} changes a tensor's shape in place. A TwoTensor does not support this. Use the out-of-place op."
        )


def _run_by_position(func: Any, args: Any, kwargs: Any, count: int) -> Any:
    """Run an optimizer's op on lists of ``count`` tensors once per position. The lists mix ``TwoTensor``s and plain
    tensors such as step counts. Plain tensors must be written once, not for ``a`` and again for ``b``."""
    results = []
    for position in range(count):
        one = [[arg[position]] if isinstance(arg, (list, tuple)) and len(arg) == count else arg for arg in args]
        results.append(func(*one, **kwargs))
    return None if results[0] is None else [item for result in results for item in result]
