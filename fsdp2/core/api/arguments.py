"""Refuses wrong arguments with uniform messages: where, found, expected, and the remedy."""

from __future__ import annotations

from reprlib import repr as shortened


def expect(
    is_right: bool, where: str, found: object, expected: str, remedy: str = "", *, by_value: bool = False
) -> None:
    """Refuse the argument named ``where``, whose value is ``found``, unless it ``is_right``.

    Raises:
        TypeError: the argument is wrong; with ``by_value``, a ValueError instead.
    """
    if not is_right:
        name = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
        kind, error = ("", ValueError) if by_value else (f", of type {name}", TypeError)
        raise error(f"{where} is {shortened(found)}{kind}, expected {expected}. {remedy}".rstrip())
