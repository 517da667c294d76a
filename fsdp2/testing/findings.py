"""Collects the findings of a conformance check, and compares values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from fsdp2.core import ExtensionError, _torch
from fsdp2.testing.world import PARAMETER

Values = list[torch.Tensor]

_WARNING = f"parameter '{PARAMETER}': "


class Findings:
    """The failed checks of one class. Failures of one check on several shapes become a single line of the report, which
    names its ``caller``."""

    def __init__(self, caller: str = "check_all_gather_extension") -> None:
        self.class_name = ""
        self._caller = caller
        self._failures: dict[str, list[tuple[str, Exception]]] = {}  # places and exceptions, by check

    def passes(self, where: str, checks: Mapping[str, Callable[[], object]]) -> bool:
        """Run ``checks`` up to the first one that raises; its exception is reported at the end."""
        for name, check in checks.items():
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=_WARNING)  # training would continue, but a check fails
                    check()
            except Exception as error:
                self._failures.setdefault(name, []).append((where, error))
                return False
        return True

    def raise_if_any(self) -> None:
        """Raise an ``ExtensionError`` with one line for each check that failed."""
        by_text: dict[str, list[str]] = {}
        for check, failures in self._failures.items():
            where, error = failures[0]
            more = f", and {_counted(len(failures) - 1, 'other case')}" if len(failures) > 1 else ""
            by_text.setdefault(f"{_text(error)} (First seen with {where}{more}.)", []).append(check)
        if by_text:
            lines = [f"{self._caller}: {self.class_name} fails {_counted(len(self._failures), 'check')}."]
            lines += [f"- {', '.join(checks)}: {text}" for text, checks in by_text.items()]
            raise ExtensionError("\n".join(lines)) from next(iter(self._failures.values()))[0][1]


def _text(error: Exception) -> str:
    is_ours = isinstance(error, ExtensionError) or str(error).startswith(_WARNING)
    text = str(error) if is_ours else f"raised {type(error).__name__}: {error}"
    line = " ".join(text.removeprefix(f"parameter '{PARAMETER}': ").split("\n"))
    return line if line.endswith(".") else f"{line}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def values_of(tensor: torch.Tensor) -> Values:
    """The values that compute reads from ``tensor``, in plain fp64: for a subclass, its product with one."""
    with torch.no_grad():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            try:
                tensor = tensor.detach() * 1
            except Exception as error:
                found = f"{type(tensor).__name__} * 1 raised {type(error).__name__}: {error}"
                raise ExtensionError(f"{found}. Let operations read the unsharded parameter.") from error
        plain = [leaf.detach().as_subclass(torch.Tensor) for leaf in _torch.leaves(tensor)]
        return [leaf.to(torch.complex128 if leaf.is_complex() else torch.float64, copy=True) for leaf in plain]


def check_equal(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], problem: str, remedy: str, tolerance: float = 0.0
) -> None:
    """Raise with ``problem`` and ``remedy`` if shapes differ, or if values differ by more than ``tolerance``."""
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (found, expected)]
    if shapes[0] != shapes[1]:
        raise ExtensionError(f"{problem}: its values have shapes {shapes[0]}, expected {shapes[1]}. {remedy}")
    for mine, other in zip(found, expected, strict=True):
        is_close = torch.isclose(mine, other, rtol=0.0, atol=tolerance, equal_nan=True)
        if not is_close.all():
            index = tuple((~is_close).nonzero()[0].tolist())
            raise ExtensionError(
                f"{problem}: {int((~is_close).sum())} of {is_close.numel()} values differ, the first one at {index}: "
                f"found {mine[index].item():g}, expected {other[index].item():g}. {remedy}"
            )


def are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
