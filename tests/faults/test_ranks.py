"""The harness of ranks that may be lost: a rank may be lost while it writes its answer, too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.faults.ranks import World
from tests.harness.distributed import RankContext


def _killed_while_it_answers(ctx: RankContext, mesh: DeviceMesh) -> str:
    def write_half(path: Path, data: bytes) -> int:
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return len(data)

    Path.write_bytes = write_half  # type: ignore[assignment,method-assign]  # in this rank's process only
    return "an answer"


def test_half_an_answer_is_none() -> None:
    (ended,) = World(_killed_while_it_answers, num_ranks=1).join()
    assert ended.exit_code == -signal.SIGKILL
    assert ended.value is None


def test_folder_is_removed_when_an_answer_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes) -> Any:
        raise EOFError(data)

    monkeypatch.setattr("tests.faults.ranks.pickle.loads", refuse)
    world = World(_killed_while_it_answers, num_ranks=1)
    (answer,) = world._answers
    answer.write_bytes(b"no answer")
    with pytest.raises(EOFError):
        world.join()
    assert not answer.parent.exists()
