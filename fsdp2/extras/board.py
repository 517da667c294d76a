"""The board on which ranks report their standing to each other. It lives in the store of the process group.

The store ends with the process that hosts it: rank 0, if ranks were started without torchrun. Rule: a diagnosis must
not fail or delay a step. So only the thread of ``stalls`` uses the board, and a board without its store shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from fsdp2.extras.standings import Standing, standing_from

_P = ParamSpec("_P")
_T = TypeVar("_T")
_ASKED = "asked"


class Board:
    """The board of all ranks that share ``store``. This process is ``rank``."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self.rank = dist.PrefixStore("fsdp2/stalls", store), rank
        self.is_gone = False  # whether the store is

    def show(self, standing: Standing | None) -> None:
        """Let other ranks see ``standing`` from now on. None means that this rank makes progress again."""
        self._do(self._store.set, str(self.rank), "" if standing is None else standing.to_text())

    def of(self, rank: int) -> Standing | None:
        """The standing of ``rank``, if that rank has shown one."""
        key = str(rank)
        text = self._do(self._store.get, key) if self._do(self._store.check, [key]) else None
        return standing_from(text) if text else None

    def ask(self) -> None:
        """Ask ranks that have no events, but do not wait for other ranks either, to show their standing, too."""
        self._do(self._store.set, _ASKED, "")

    def stop_asking(self) -> None:
        """This rank makes progress again. Other ranks that still wait repeat their request."""
        self._do(self._store.delete_key, _ASKED)

    def is_asked(self) -> bool:
        """Whether a rank has asked."""
        return bool(self._do(self._store.check, [_ASKED]))

    def leave(self, standing: Standing) -> None:
        """Show ``standing`` as the last one before this process ends."""
        self.show(standing)
        self._do(self._store.set, _left(self.rank), "")

    def have_left(self, ranks: Sequence[int]) -> bool:
        """Whether all ``ranks`` have left. True also if the store is gone, so that this is not known."""
        return self._do(self._store.check, [_left(rank) for rank in ranks]) is not False

    def _do(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        if self.is_gone:  # torch logs each call that fails
            return None
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            self.is_gone = True
            return None


def _left(rank: int) -> str:
    return f"{rank} has left"
