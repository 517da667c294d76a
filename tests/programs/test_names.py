"""Every public name is in a program, or a table says why not."""

from __future__ import annotations

from tests.programs.names import NOT_IN_PROGRAMS, public_names, used_names


def test_every_public_name_is_in_a_program_or_says_why_not() -> None:
    used, public = used_names(), public_names()
    missing = public - used - NOT_IN_PROGRAMS.keys()
    assert not missing, f"{sorted(missing)}: give features.py a value or an operation, or names.py a reason"
    assert NOT_IN_PROGRAMS.keys() <= public, f"{sorted(NOT_IN_PROGRAMS.keys() - public)} are gone"


def test_a_name_that_a_program_uses_needs_no_reason() -> None:
    in_both = NOT_IN_PROGRAMS.keys() & used_names()
    assert not in_both, f"{sorted(in_both)}: programs use them"
