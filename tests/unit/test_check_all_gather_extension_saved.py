"""The conformance check names classes that a checkpoint cannot write, cannot read, or changes."""

from __future__ import annotations

from typing import Any

from expecttest import assert_expected_inline

from fsdp2.testing import check_all_gather_extension
from tests.harness.messages import error_of
from tests.unit.checked_wrapper import Wrapper


def _report(cls: type[Wrapper]) -> str:
    return error_of(lambda: check_all_gather_extension(cls, shapes=[(5, 3)], world_sizes=(2,)))


class IsNotSafeToRead(Wrapper):
    def __init_subclass__(cls) -> None:
        pass


class CannotBeRead(IsNotSafeToRead):
    pass


def test_class_that_checkpoints_cannot_read_is_reported() -> None:
    assert_expected_inline(
        _report(CannotBeRead),
        """\
ExtensionError: check_all_gather_extension: CannotBeRead fails 1 check.
- save: torch.load(weights_only=True), with which checkpoints are read, refuses a CannotBeRead.
Below the class, write torch.serialization.add_safe_globals([CannotBeRead]), with the classes of its
attributes in the list, too. (First seen with shape (5, 3) on 2 ranks.)""",
    )


def test_class_that_checkpoints_cannot_write_is_reported() -> None:
    class OfAFunction(Wrapper):
        pass

    report = _report(OfAFunction).replace("\n", " ")
    assert "- save: torch.save cannot write a OfAFunction: AttributeError: " in report  # then the text of this Python
    assert "Define the class, and those of its attributes, at the top of a module." in report


class LosesItsFactor(Wrapper):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.inner.clone() * 2,)


def test_class_that_a_checkpoint_changes_is_reported() -> None:
    assert_expected_inline(
        _report(LosesItsFactor),
        """\
ExtensionError: check_all_gather_extension: LosesItsFactor fails 1 check.
- save: a gather of shards that were saved, read and copied in gives other values than a gather of
the originals: 15 of 15 values differ, the first one at (0, 0): found 3.08199, expected 1.541. Let
torch.save write all that the hooks read. (First seen with shape (5, 3) on 2 ranks.)""",
    )
