"""Checks numbers, flags, dtypes, devices, paths and choices that users pass, at the call and before anything changes.

An annotation says what an argument is: ``checked`` reads those of a function by their text, once, so nothing is
imported for types that are not checked here. Limits of numbers stand next to the signature. An argument of any other
type is the function's own, and ``sizes`` reads bytes. Where ranks agree on errors, ``check`` is called inside.

Programs that were written for torch may pass what it takes for granted. A flag may be 0, 1 or a numpy bool, as
settings and comparisons give them, and a number may be numpy's. Other objects that Python counts as true, such as
"no", are refused. Where torch takes a tensor with one element, so do we, without reading it: the host would wait for
the device.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature, unwrap
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import torch

from fsdp2.core import expect

_F = TypeVar("_F", bound=Callable[..., Any])


class Limit(NamedTuple):
    """The numbers that an argument may be: from ``low`` to ``high``, without ``low`` if ``above``, and without ``high``
    if ``below``. NaN is always refused, and so is infinity, unless ``or_inf``."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    or_inf: bool = False

    def holds(self, value: float) -> bool:
        from_low = value > self.low if self.above else value >= self.low
        to_high = value < self.high if self.below else value <= self.high
        return from_low and to_high and (self.or_inf or not math.isinf(value))

    def text(self, noun: str) -> str:
        """Such as "a finite number above 0"."""
        low, high = math.isfinite(self.low), math.isfinite(self.high)
        if low and high and not self.above and not self.below:
            return f"{noun} from {self.low:g} to {self.high:g}"
        from_low = f" {'above' if self.above else 'of at least'} {self.low:g}" if low else ""
        to_high = f"{' and' * low} {'below' if self.below else 'of at most'} {self.high:g}" if high else ""
        is_finite = noun == "a number" and not (high or self.or_inf)
        return f"{'a finite number' if is_finite else noun}{from_low}{to_high}"


ANY = Limit()
NOT_NEGATIVE = Limit(0)
POSITIVE = Limit(0, above=True)
POSITIVE_OR_INF = Limit(0, above=True, or_inf=True)
AT_LEAST_1 = Limit(1)


class _Kind(NamedTuple):
    """What one part of an annotation allows: whether a value has the type, and if so, whether it is right."""

    expected: str
    has_type: Callable[[Any], bool]
    is_right: Callable[[Any], bool] = lambda _: True


def checked(**limits: Limit) -> Callable[[_F], _F]:
    """Decorate a function, or a class for its constructor: each call first checks its arguments by their annotations,
    and numbers also by the limit of that name.

    The decorated function raises:
        TypeError: an argument is of the wrong type.
        ValueError: it is of the right type, but its value is not allowed.
    """

    def decorate(subject: Any) -> Any:
        if isinstance(subject, type):
            subject.__init__ = decorate(subject.__init__)  # type: ignore[misc]
            return subject

        @wraps(subject)
        def call(*args: Any, **kwargs: Any) -> Any:
            check_call(subject, args, kwargs, tuple(limits.items()))
            return subject(*args, **kwargs)

        return call

    return decorate


def check_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    limits: tuple[tuple[str, Limit], ...] = (),
) -> None:
    """Check the arguments of ``function``, which is about to be called. Errors are those of :func:`checked`."""
    name, positions, kinds = _read(function, limits)
    last = positions[-1:] * max(0, len(args) - len(positions))  # ``*sizes``
    for argument, value in (*zip((*positions, *last), args, strict=False), *kwargs.items()):
        if argument in kinds:
            _check(f"{name}: {argument}", value, kinds[argument])


def check_method(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a method of ``FSDPModule``, as the core asks for it."""
    check_call(method, args, kwargs, _OF_METHODS)


def check(where: str, value: object, annotation: str, limit: Limit = ANY) -> None:
    """Check the argument named ``where``. ``annotation`` is text such as ``"float | None"``. Errors are those of
    :func:`checked`."""
    _check(where, value, _kinds(annotation, limit))


def _check(where: str, value: object, kinds: Sequence[_Kind]) -> None:
    alike = [kind for kind in kinds if kind.has_type(value)]
    if not any(kind.is_right(value) for kind in alike):
        expect(False, where, value, " or ".join(kind.expected for kind in kinds), by_value=bool(alike))


@cache
def _read(
    function: Callable[..., Any], limits: tuple[tuple[str, Limit], ...]
) -> tuple[str, list[str], dict[str, tuple[_Kind, ...]]]:
    """The name of ``function`` in errors, its positional arguments, and what the arguments that are checked may be."""
    limit_of, parameters = dict(limits), signature(function).parameters.values()
    choices = getattr(unwrap(function), "__globals__", {})
    found = {each.name: _kinds(str(each.annotation), limit_of.get(each.name, ANY), choices) for each in parameters}
    keyword = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__").removeprefix("FSDPModule.")
    positions = [each.name for each in parameters if each.kind not in keyword]
    return name, positions, {argument: kinds for argument, kinds in found.items() if kinds}


def _kinds(annotation: str, limit: Limit, names: Mapping[str, Any] | None = None) -> tuple[_Kind, ...]:
    """What ``annotation`` allows; nothing if a part of it is not checked here. ``names``: where aliases are found."""
    for parts, joint in _JOINT.items():
        annotation = annotation.replace(parts, joint)
    found = [_kind(part, limit, names or {}) for part in annotation.split(" | ")]
    return tuple(each for each in found if each is not None) if None not in found else ()


def _kind(part: str, limit: Limit, names: Mapping[str, Any]) -> _Kind | None:
    if part in _NUMBERS:
        noun, cls = _NUMBERS[part]
        return _Kind(limit.text(noun), lambda x: isinstance(x, cls) and not isinstance(x, bool), limit.holds)
    several = re.fullmatch(r"(?:Sequence|tuple)\[(.+?)(?:, \.\.\.)?\]", part)
    if several is not None and part not in _PLAIN:
        return _several(_kinds(several[1], limit, names))
    if part.startswith("Literal["):
        choices = tuple(re.findall(r"['\"](.*?)['\"]", part))
    else:
        hint = names.get(part)
        choices = get_args(hint) if get_origin(hint) is Literal else ()
    if choices:
        return _Kind(" or ".join(map(repr, choices)), lambda value: isinstance(value, str), lambda v: v in choices)
    return _PLAIN.get(part)


def _several(kinds: Sequence[_Kind]) -> _Kind | None:
    def are_right(values: Sequence[Any]) -> bool:
        return all(any(kind.has_type(value) and kind.is_right(value) for kind in kinds) for value in values)

    expected = "a sequence, each item " + " or ".join(kind.expected for kind in kinds)
    return _Kind(expected, lambda x: isinstance(x, Sequence) and not isinstance(x, str), are_right) if kinds else None


def _is_flag(value: object) -> bool:
    return isinstance(value, numbers.Integral) or type(value).__name__ in ("bool_", "bool")  # numpy's


def _is_device(value: torch.device | str) -> bool:
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


def _is_path(value: str | os.PathLike[str]) -> bool:
    text = os.fspath(value)
    return isinstance(text, str) and bool(text) and "\0" not in text


def _are_decays(value: Sequence[Any]) -> bool:
    return all(isinstance(each, (int, float)) and 0 <= each < 1 for each in value)


_OF_METHODS = (("factor", POSITIVE), ("max_input_buffers", AT_LEAST_1), ("reshard_after_backward", AT_LEAST_1))
_JOINT = {  # parts of an annotation that mean one thing together
    "str | os.PathLike[str]": "path",
    "torch.device | str": "device",
    "float | torch.Tensor": "float | element",
    "float | Tensor": "float | element",
}
_NUMBERS: dict[str, tuple[str, type]] = {"float": ("a number", numbers.Real), "int": ("an int", numbers.Integral)}
_PLAIN = {
    "None": _Kind("None", lambda value: value is None),
    "bool": _Kind("True or False", _is_flag, lambda value: value in (0, 1)),
    "str": _Kind("a str", lambda value: isinstance(value, str)),
    "torch.dtype": _Kind("a torch.dtype", lambda value: isinstance(value, torch.dtype)),
    "device": _Kind("a device, such as 'cpu'", lambda value: isinstance(value, (str, torch.device)), _is_device),
    "path": _Kind("a path", lambda value: isinstance(value, (str, os.PathLike)), _is_path),
    "element": _Kind("a tensor with one element", lambda x: isinstance(x, torch.Tensor), lambda x: x.numel() == 1),
    "tuple[float, float]": _Kind(
        "two numbers, at least 0 and below 1", lambda x: isinstance(x, (tuple, list)) and len(x) == 2, _are_decays
    ),
}
