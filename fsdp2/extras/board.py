"""Where ranks show each other where they stand: in the store of the process group.

The store ends with the process that hosts it: rank 0, if ranks were started without torchrun. Rule: a diagnosis fails
no step, and holds none up. So only the thread of ``stalls`` comes here, and a board whose store is gone shows nothing.
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
    """The board of all ranks that share ``store``.

    Attributes:
        rank: this process.
        is_gone: the store is.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self.rank = dist.PrefixStore("fsdp2/stalls", store), rank
        self.is_gone = False

    def show(self, standing: Standing | None) -> None:
        """Other ranks see ``standing`` from now on; None: this rank goes on."""
        self._do(self._store.set, str(self.rank), "" if standing is None else standing.to_text())

    def of(self, rank: int) -> Standing | None:
        """Where ``rank`` stands, if it has shown that."""
        key = str(rank)
        text = self._do(self._store.get, key) if self._do(self._store.check, [key]) else None
        return standing_from(text) if text else None

    def ask(self) -> None:
        """Let ranks without events that wait for nobody show where they stand, too."""
        self._do(self._store.set, _ASKED, "")

    def stop_asking(self) -> None:
        """This rank goes on. Others that wait ask again and again."""
        self._do(self._store.delete_key, _ASKED)

    def is_asked(self) -> bool:
        """Whether a rank has asked."""
        return bool(self._do(self._store.check, [_ASKED]))

    def leave(self, standing: Standing) -> None:
        """This process ends: ``standing`` is the last one."""
        self.show(standing)
        self._do(self._store.set, _left(self.rank), "")

    def have_left(self, ranks: Sequence[int]) -> bool:
        """Whether all ``ranks`` have, or nobody knows."""
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
