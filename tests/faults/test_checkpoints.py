"""A run is killed while it writes a checkpoint, or the disk is full: a complete checkpoint is there, and is found."""

from __future__ import annotations

import json
import os
import random
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.checkpoint import async_save
from tests.distributed.support import InjectedError
from tests.docs.launch import ROOT
from tests.faults.ranks import Ended, World
from tests.harness.distributed import RankContext
from tests.harness.selection import long

_EXAMPLE = ROOT / "docs" / "examples" / "train_lm.py"
_TINY = {"dim": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 24}
_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
NEVER = 10**9

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a reader is no rank


def _example() -> dict[str, Any]:
    with mock.patch.object(sys, "path", [str(_EXAMPLE.parent), *sys.path]):
        return runpy.run_path(str(_EXAMPLE))


def _trainer(example: dict[str, Any]) -> Any:
    corpus = torch.zeros(1)  # no step reads it
    return example["Trainer"](example["Config"](**_TINY), corpus, torch.device("cpu"))


def _save(trainer: Any, folder: Path, step: int) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(step)
    trainer.save(folder, step)


def _save_twice(
    ctx: RankContext,
    mesh: DeviceMesh,
    folder: Path,
    operation: int = NEVER,
    after_s: float = -1,
    killed: tuple[int, ...] = (0,),
) -> tuple[int, float]:
    """The ranks ``killed`` are killed in the second save, before their file operation of that number or after some
    time. Returns how many operations there are, and how long they take."""
    trainer = _trainer(_example())
    _save(trainer, folder, step=1)
    count = 0

    def kill_at_operation(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in _FILE_EVENTS and str(folder) in str(arguments[0]):
            count += 1
            if count > operation and ctx.rank in killed:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at_operation)
    if after_s >= 0 and ctx.rank in killed:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started = time.perf_counter()
    _save(trainer, folder, step=2)
    return count, time.perf_counter() - started


def _assert_latest_is_complete(folder: Path) -> int:
    """All that a reader finds in it was written by the step of its name."""
    example = _example()
    path = example["latest_checkpoint"](folder)
    assert path is not None, sorted(folder.rglob("*"))
    step = int(path.name.removeprefix("step_"))
    described = FileSystemReader(path).read_metadata().state_dict_metadata
    shown = {name: each for name, each in described.items() if name.startswith("model.")}
    state: dict[str, Any] = {n: torch.empty(each.size, dtype=each.properties.dtype) for n, each in shown.items()}
    assert len(state) > 5
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(value, torch.full_like(value, step)) for value in state.values())
    assert step in (1, 2)
    return step


def _assert_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next run says which folder it ignores, and why."""
    example = _example()
    with mock.patch.object(sys, "path", [str(_EXAMPLE.parent), *sys.path]):
        import lm_run
    left = lm_run.unfinished_checkpoints(folder)
    (folder / "config.json").write_text(json.dumps(_TINY))
    (folder / "losses.jsonl").write_text("")
    lm_run.Journal(example["Config"](**_TINY, output=folder, resume=folder), first_step=1, facts={}).bar.close()
    said = capsys.readouterr().out
    for path in left:
        assert f"note: {path} was not written to its end" in said
    assert not lm_run.unfinished_checkpoints(folder)


@pytest.mark.ci
@pytest.mark.parametrize("num_ranks", [1, *long(2)])
def test_a_kill_before_each_file_operation_leaves_a_complete_checkpoint(
    num_ranks: int, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of them in the short suite: while the files are written, and before the new checkpoint has its name."""
    (first, *_) = World(_save_twice, num_ranks, 60.0, folder=tmp_path / "counted").join()
    assert first.exit_code == 0, first.trace
    count, _ = first.value
    assert count > 5
    found = set()
    for operation in range(count) if num_ranks > 1 else (2, count - 4):
        folder = tmp_path / str(operation)
        ended = World(_save_twice, num_ranks, 60.0, folder=folder, operation=operation).join()
        assert ended[0].exit_code == -signal.SIGKILL
        assert all(each.exit_code == 1 for each in ended[1:])
        found.add(_assert_latest_is_complete(folder))
        _assert_goes_on(folder, capsys)
    assert found == {1, 2}


@pytest.mark.in_turns
@pytest.mark.parametrize("killed", long((0,), (1,), (0, 1)))
def test_a_kill_at_a_random_time_leaves_a_complete_checkpoint(
    killed: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """34 moments for each rank, and for both at once: 102. The next run names what is half written."""
    ended = World(_save_twice, 2, 60.0, folder=tmp_path / "timed").join()
    _, duration_s = ended[0].value
    times = random.Random(str(killed))
    num_half_written, num_killed = 0, 0
    for number in range(34):
        folder = tmp_path / str(number)
        after_s = times.uniform(0, 1.1 * duration_s)
        ended = World(_save_twice, 2, 60.0, folder=folder, after_s=after_s, killed=killed).join()
        num_killed += any(each.exit_code == -signal.SIGKILL for each in ended)
        num_half_written += bool(list(folder.glob("checkpoints/writing_*")))
        _assert_latest_is_complete(folder)
        _assert_goes_on(folder, capsys)
    assert num_killed > 10
    assert num_half_written > 5  # the moments are those of writing


def test_a_file_of_a_run_replaces_nothing_but_the_one_of_its_name(tmp_path: Path) -> None:
    """It is written under a name that nobody can know, so a link there is not followed."""
    with mock.patch.object(sys, "path", [str(_EXAMPLE.parent), *sys.path]):
        import lm_run
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "writing_config.json").symlink_to(victim)
    lm_run.write_whole(tmp_path / "config.json", "new")
    assert (victim.read_text(), (tmp_path / "config.json").read_text()) == ("mine", "new")
    assert len(list(tmp_path.iterdir())) == 3


def _full_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))


def _no_folder(folder: Path) -> None:
    unwritable = folder / "checkpoints" / "writing_step_00000002"
    unwritable.touch()  # a file in its place: no permissions keep the superuser out


def _no_rename(folder: Path) -> None:
    (folder / "checkpoints" / "step_00000002").touch()


def _save_with_fault(
    ctx: RankContext, mesh: DeviceMesh, folder: Path, fault: Callable[[Path], None], on_rank: int
) -> str:
    trainer = _trainer(_example())
    _save(trainer, folder, step=1)
    if ctx.rank == on_rank:
        fault(folder)
    torch.distributed.barrier()
    try:
        _save(trainer, folder, step=2)
    except RuntimeError as error:
        found = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.distributed.barrier()  # all ranks are here
    return found


FAULTS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "full disk": (_full_disk, 1, "rank 1: "),
    "full disk on rank 0": (_full_disk, 0, "rank 0: "),
    "no folder": (_no_folder, 0, "Error: "),
    "no rename": (_no_rename, 0, "rank 0: NotADirectoryError: "),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["full disk", *long(*list(FAULTS)[1:])])
def test_all_ranks_name_the_checkpoint_that_one_rank_cannot_write(name: str, tmp_path: Path) -> None:
    fault, on_rank, reason = FAULTS[name]
    ended: list[Ended] = World(_save_with_fault, 2, 60.0, folder=tmp_path, fault=fault, on_rank=on_rank).join()
    for each in ended:
        assert each.exit_code == 0, each.trace
        assert each.value.startswith(f"checkpoint {tmp_path / 'checkpoints' / 'step_00000002'} could not be written (")
        assert reason in each.value
        assert f"The last complete checkpoint is {tmp_path / 'checkpoints' / 'step_00000001'}." in each.value
    assert _assert_latest_is_complete(tmp_path) == 1


def _save_in_background(ctx: RankContext, mesh: DeviceMesh, folder: Path, step: int, killed: int = -1) -> str:
    """The rank ``killed`` is killed while it writes. Returns the name of the checkpoint."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    state = {"model.weight": torch.full((4,), float(step)), "step": step}
    with mock.patch.object(FileSystemWriter, "write_data", die) if ctx.rank == killed else nullcontext():
        return async_save(state, folder / f"step_{step}").result().name


@pytest.mark.parametrize("killed", [1, *long(0)])
def test_a_kill_during_a_save_in_the_background_leaves_the_checkpoint_before_it(killed: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    assert [each.value for each in World(_save_in_background, folder=folder, step=1).join()] == ["step_1"] * 2
    ended = World(_save_in_background, folder=folder, step=2, killed=killed).join()
    assert ended[killed].exit_code == -signal.SIGKILL
    assert ended[1 - killed].error_type == "CommunicationError", ended
    assert sorted(path.name for path in folder.iterdir()) == [".unfinished_step_2", "step_1"]
    assert [each.value for each in World(_save_in_background, folder=folder, step=2).join()] == ["step_2"] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


def _end_during_a_save(ctx: RankContext, mesh: DeviceMesh, folder: Path) -> str:
    def write_late(*given: Any, _write: Any = FileSystemWriter.write_data) -> Any:
        time.sleep(0.5)
        return _write(*given)

    with mock.patch.object(FileSystemWriter, "write_data", write_late):
        async_save({"step": 1, "weight": torch.ones(4)}, folder / "step_1")
        time.sleep(0.2)
    return "ended"


def _wait_for_one_another(ctx: RankContext, mesh: DeviceMesh, folder: Path) -> None:
    """Rank 2 is lost in a save when only rank 0 waits for it. The thread of rank 1 waits for rank 0, whose training
    waits for rank 1, which ends."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(torch.distributed.distributed_c10d, "gather", die) if ctx.rank == 2 else nullcontext():
        async_save({"weight": torch.ones(4)}, folder / "step_1")
        if ctx.rank == 1:
            time.sleep(1.0)
            raise InjectedError
        torch.distributed.recv(torch.zeros(1), src=1)


def test_a_rank_that_ends_without_an_error_waits_for_its_save(tmp_path: Path) -> None:
    ended = World(_end_during_a_save, folder=tmp_path).join()
    assert [(each.exit_code, each.value) for each in ended] == [(0, "ended")] * 2, [each.trace for each in ended]
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_rank_that_ends_with_an_error_waits_for_no_save(tmp_path: Path) -> None:
    """They waited until a timeout."""
    ended = World(_wait_for_one_another, 3, folder=tmp_path).join()
    assert ended[2].exit_code == -signal.SIGKILL
    assert None not in [each.exit_code for each in ended], "a rank hangs"
    assert ended[1].error_type == "InjectedError"
