"""All-gather hooks: a tensor subclass decides what travels in its place, and what becomes of it.

The protocol is in ``types``. Hooks are looked up and their signature is inspected once, when a group is bound; every
call is checked, and what is wrong is an ``ExtensionError`` that names parameter, class and hook. This room knows no
collective: see ``hooked_params`` for how the ranks agree.

Source: the extension points of PyTorch's FSDP2 (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.types import ExtensionError, MixedPrecisionPolicy, PreResult

_PRE = "fsdp_pre_all_gather"
_POST = "fsdp_post_all_gather"
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_KEEP = "fsdp_keep_all_gather_inputs"

_Kind = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class HookContext:
    """What the hooks of one parameter are called with, and the name that errors give it. ``is_staged``: the shard lives
    on the host, and pre-hooks get a copy of it on ``device``."""

    name: str
    mesh: DeviceMesh
    outer_size: torch.Size
    outer_stride: tuple[int, ...]
    module: nn.Module
    policy: MixedPrecisionPolicy
    param_dtype: torch.dtype
    device: torch.device
    is_staged: bool = False


def has_hooks(local: torch.Tensor) -> bool:
    """Whether ``local``, or its class, defines one of the two hooks."""
    return hasattr(local, _PRE) or hasattr(local, _POST)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is its memory and nothing else: it can lie in a flat buffer."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not has_hooks(tensor)


class Hooks:
    """The hooks of one shard, bound.

    Attributes:
        keeps_inputs: payloads stay valid until the shard is written.
    """

    def __init__(self, local: torch.Tensor, context: HookContext) -> None:
        self._context = context
        self._class = type(local).__name__
        for name, other in ((_PRE, _POST), (_POST, _PRE)):
            if not callable(getattr(local, name, None)):
                found = f"it defines {other} only" if hasattr(local, other) else "sharding would lose what it adds"
                raise self.error(name, f"is not defined: {found}. Define both hooks, or list it in ignored_params")
        self._pre: Callable[[], object] = self._bind_pre(getattr(local, _PRE))
        self._post = getattr(local, _POST)
        self._expected: list[_Kind] | None = None
        self._release: Callable[[], object] = getattr(local, _RELEASE, lambda: False)
        self.keeps_inputs = bool(getattr(local, _KEEP, False))

    def error(self, hook: str, problem: str) -> ExtensionError:
        """An error that says where: ``problem`` continues the name of ``hook``."""
        return ExtensionError(f"parameter '{self._context.name}': {self._class}.{hook} {problem.rstrip('.')}.")

    def call_pre(self) -> PreResult:
        """This rank's payload and its metadata.

        Raises:
            ExtensionError: the hook raised or returned what cannot be gathered.
        """
        try:
            result = self._pre()
        except Exception as error:
            raise self.error(_PRE, f"raised {type(error).__name__}: {error}") from error
        if type(result) is not tuple or len(result) != 2:
            raise self.error(_PRE, f"returned {_described(result)}, expected (tuple of tensors, metadata)")
        tensors = result[0]
        if type(tensors) is not tuple:
            raise self.error(_PRE, f"returned {_described(tensors)} with its metadata, expected a tuple of tensors")
        if self._expected is None or len(tensors) != len(self._expected):
            self._check_payload(tensors)
        for tensor, (shape, dtype) in zip(tensors, self._expected or (), strict=True):
            is_expected = type(tensor) is torch.Tensor and tensor.shape == shape and tensor.dtype is dtype
            if not is_expected or not tensor.is_contiguous():
                self._check_payload(tensors)
        return result

    def releases_outputs(self) -> bool:
        """Whether the unsharded tensor does not alias the outputs. Asked after the first pre-hook, which may know.

        Raises:
            ExtensionError: the answer is no bool.
        """
        try:
            answer = self._release()
        except Exception as error:
            raise self.error(_RELEASE, f"raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise self.error(_RELEASE, f"returned {_described(answer)}, expected a bool")
        return answer

    def call_post(self, outputs: tuple[torch.Tensor, ...], metadata: Any, out: torch.Tensor) -> None:
        """Have ``out`` filled.

        Raises:
            ExtensionError: the hook raised, or returned a new object.
        """
        try:
            result = self._post(outputs, metadata, self._context.param_dtype, out=out)
        except Exception as error:
            raise self.error(_POST, f"(with out) raised {type(error).__name__}: {error}") from error
        if result is not None and result is not out and not (isinstance(result, tuple) and result and result[0] is out):
            raise self.error(
                _POST,
                f"returned {_described(result)} although out was given, expected None: fill out in place, "
                "because autograd has saved it",
            )

    def first_post(self, outputs: tuple[torch.Tensor, ...], metadata: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The unsharded tensor of the outer size, and the tensors to free with it.

        Raises:
            ExtensionError: the hook raised or returned what cannot be the parameter.
        """
        try:
            result = self._post(outputs, metadata, self._context.param_dtype)
        except Exception as error:
            raise self.error(_POST, f"raised {type(error).__name__}: {error}") from error
        expected = "expected (unsharded tensor, tuple of inner tensors to free)"
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.error(_POST, f"returned {_described(result)}, {expected}")
        tensor, inner = result
        if not isinstance(tensor, torch.Tensor):
            raise self.error(_POST, f"returned {_described(tensor)} as the unsharded tensor, {expected}")
        if not isinstance(inner, (tuple, list)) or not all(isinstance(item, torch.Tensor) for item in inner):
            raise self.error(_POST, f"returned {_described(inner)} as the inner tensors, {expected}")
        return self._cut(tensor), list(inner)

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` without the rows that the hooks padded it by."""
        size = self._context.outer_size
        if tensor.shape == size:
            return tensor
        is_flat = tensor.dim() == 1 and tensor.numel() >= size.numel()
        has_rows = tensor.dim() == len(size) and tensor.shape[1:] == size[1:] and tensor.shape[0] >= size[0]
        if not (is_flat or has_rows) or not tensor.is_contiguous():
            raise self.error(
                _POST,
                f"returned {_described(tensor)} with strides {tensor.stride()}, expected contiguous "
                f"{tuple(size)}, or more rows",
            )
        cut = torch.as_strided(tensor, size, self._context.outer_stride, tensor.storage_offset())
        if type(cut) is not type(tensor):
            raise self.error(
                _POST,
                f"returned a {type(tensor).__name__} of shape {tuple(tensor.shape)}, which becomes a "
                f"{type(cut).__name__} when it is cut to {tuple(size)}: let as_strided keep the class",
            )
        return cut

    def _check_payload(self, tensors: tuple[object, ...]) -> None:
        """Accept the first payload if it can be gathered. Refuse it otherwise, and every later one: it differs."""
        found = []
        for tensor in tensors:
            if type(tensor) is not torch.Tensor:
                raise self.error(_PRE, f"returned {_described(tensor)} to be gathered, expected plain tensors")
            if tensor.device != self._context.device:
                raise self.error(_PRE, f"returned a tensor on {tensor.device}, expected {self._context.device}")
            if not tensor.is_contiguous():
                problem = f"returned {_described(tensor)} with strides {tensor.stride()}"
                raise self.error(_PRE, f"{problem}, expected contiguous tensors: call .contiguous()")
            found.append((tensor.shape, tensor.dtype))
        if self._expected is not None:
            raise self.error(
                _PRE,
                f"returned {_payload(found)}, but {_payload(self._expected)} when its group was first gathered: "
                "shapes and dtypes must stay, because the plan is made once",
            )
        self._expected = found

    def _bind_pre(self, pre: Callable[..., object]) -> Callable[[], object]:
        signature = inspect.signature(pre)
        context = self._context
        arguments = (context.mesh, context.outer_size, context.outer_stride, context.module, context.policy)
        if len(signature.parameters) not in (1, len(arguments)):
            raise self.error(
                _PRE,
                f"has the signature {signature}, expected (self, mesh) or (self, mesh, outer_size, outer_stride, "
                "module, mp_policy)",
            )
        given = arguments[: len(signature.parameters)]
        local, method = getattr(pre, "__self__", None), getattr(pre, "__func__", None)
        if context.is_staged and method is not None and isinstance(local, torch.Tensor):
            return lambda: method(self._on_device(local), *given)
        return partial(pre, *given)

    def _on_device(self, local: torch.Tensor) -> torch.Tensor:
        """A copy of the shard on the device that gathers, enqueued on the current stream."""
        with torch.inference_mode(False):  # inside, subclasses are asked for another operation than _to_copy
            moved = local.to(self._context.device, non_blocking=True, copy=True)
        if type(moved) is not type(local):
            raise TypeError(
                f"to() made {_described(moved)} of the offloaded shard, expected a {self._class}: let "
                "__torch_dispatch__ keep the class for _to_copy"
            )
        return moved


def _payload(kinds: Sequence[_Kind]) -> str:
    return "(" + ", ".join(f"{dtype} {tuple(shape)}".removeprefix("torch.") for shape, dtype in kinds) + ")"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
