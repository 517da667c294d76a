"""``fsdp2.install()``: whose names are where, before, meanwhile and after."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import fully_shard as held_by_this_file  # what install warns about
from torch.distributed.pipelining import stage

import fsdp2
from fsdp2 import fsdp1, installation
from fsdp2.__main__ import main
from tests.harness.selection import long

NAMES = sorted(set(theirs._fully_shard.__all__))
HOMES = [
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
]
BEFORE = {name: getattr(theirs, name) for name in NAMES}
HELD_BY_STAGE = {name: vars(stage)[name] for name in NAMES if name in vars(stage)}  # others in each version of torch


@contextmanager
def quietly_installed(also: str = "") -> Iterator[pytest.WarningsRecorder]:
    """This file holds one of torch's names, which is what the warning says. ``also``: what it says, too."""
    with pytest.warns(UserWarning, match=f"(?s)still hold them.*{also}|{also}.*still hold them") as seen:
        fsdp2.install()
    try:
        yield seen
    finally:
        fsdp2.uninstall()


@pytest.mark.parametrize("home", HOMES)
def test_importers_get_our_names_while_installed_and_torchs_after(home: str) -> None:
    module = importlib.import_module(home)
    names = [name for name in NAMES if hasattr(module, name)]
    assert names
    with quietly_installed():
        for name in names:
            assert getattr(module, name) is getattr(fsdp2, name), name
            scope: dict[str, object] = {}
            exec(f"from {home} import {name}", scope)
            assert scope[name] is getattr(fsdp2, name)
    for name in names:
        assert getattr(module, name) is BEFORE[name], name
    assert type(module) is ModuleType


def test_names_are_replaced_in_loaded_modules_of_torch_but_torchs_internals_keep_their_own() -> None:
    inner = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    assert "FSDPModule" in HELD_BY_STAGE
    with quietly_installed():
        for module, names in ((theirs, NAMES), (stage, HELD_BY_STAGE)):
            assert {name: getattr(module, name) for name in names} == {name: getattr(fsdp2, name) for name in names}
        assert theirs.FullyShardedDataParallel is fsdp1.FullyShardedDataParallel
        assert inner.FSDPModule is BEFORE["FSDPModule"]
        assert issubclass(inner.ReplicateModule, BEFORE["FSDPModule"])
        assert not issubclass(inner.ReplicateModule, theirs.FSDPModule)  # docs/clients.md says so
        # torch's function still reads torch's class from its own globals
        assert BEFORE["fully_shard"].__wrapped__.__globals__["FSDPModule"] is BEFORE["FSDPModule"]
    assert {name: getattr(stage, name) for name in HELD_BY_STAGE} == HELD_BY_STAGE


def test_install_twice_installs_once_and_uninstalls_after_an_exception() -> None:
    with quietly_installed():
        fsdp2.install()  # no second warning, which would be an error
        with installation.installed():
            pass
        assert theirs.fully_shard is fsdp2.fully_shard, "the inner block must not uninstall"
    fsdp2.uninstall()
    assert theirs.fully_shard is BEFORE["fully_shard"]
    with pytest.warns(UserWarning, match="still hold them"), pytest.raises(KeyError), installation.installed():
        raise KeyError
    assert theirs.fully_shard is BEFORE["fully_shard"]


def test_modules_that_hold_torchs_names_are_named_and_an_error_leaves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ModuleType("client_of_torch")
    client.shard = BEFORE["fully_shard"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "client_of_torch", client)
    with quietly_installed(r"client_of_torch \(shard\)") as warned:
        assert "fsdp2.fsdp1" not in str(warned[0].message)
    assert client.shard is BEFORE["fully_shard"]
    with pytest.raises(UserWarning, match="still hold them"):
        fsdp2.install()
    assert theirs.fully_shard is held_by_this_file
    assert {name: getattr(stage, name) for name in HELD_BY_STAGE} == HELD_BY_STAGE


def _names_of_torch() -> list[object]:
    loaded = [module for name, module in sys.modules.items() if name.startswith("torch.distributed")]
    values = [(module.__name__, key, id(value)) for module in loaded for key, value in list(vars(module).items())]
    return [*sorted(values), *(type(module) for module in loaded), sorted(vars(fsdp2.FSDPModule))]


@pytest.mark.parametrize("number", range(4))
def test_an_interrupted_install_or_uninstall_leaves_all_or_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of replacing, or restoring, names for the n-th time."""
    with quietly_installed():
        pass  # imports what it needs
    before, loaded, calls = _names_of_torch(), installation._loaded_modules, 0

    def interrupted() -> Iterator[ModuleType]:
        nonlocal calls
        calls += 1
        modules = list(loaded())
        yield from modules[: len(modules) // 2]
        if calls == number + 1:
            raise KeyboardInterrupt
        yield from modules[len(modules) // 2 :]

    monkeypatch.setattr(installation, "_loaded_modules", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fsdp2.install()
    monkeypatch.undo()
    assert _names_of_torch() == before
    with quietly_installed():
        calls = 0
        monkeypatch.setattr(installation, "_loaded_modules", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fsdp2.uninstall()
        monkeypatch.undo()
        fsdp2.uninstall()
        assert _names_of_torch() == before


def test_threads_that_install_at_the_same_time_install_once() -> None:
    before = BEFORE["fully_shard"]
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as threads:
        warnings.simplefilter("ignore")
        list(threads.map(lambda _: fsdp2.install(), range(8)))
        assert theirs.fully_shard is fsdp2.fully_shard
        fsdp2.uninstall()
    assert theirs.fully_shard is before


def test_names_that_torch_gains_later_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs._fully_shard, "__all__", [*NAMES, "brand_new"])
    monkeypatch.setattr(theirs._fully_shard, "brand_new", BEFORE, raising=False)
    with pytest.warns(UserWarning, match="still hold them"), pytest.warns(UserWarning, match="brand_new") as seen:
        fsdp2.install()
    assert theirs._fully_shard.brand_new is BEFORE  # type: ignore[attr-defined]
    fsdp2.uninstall()
    assert ["brand_new" in str(each.message) for each in seen] == [True, False]


def test_rank_0_says_what_was_replaced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING, "fsdp2"), quietly_installed():
        fsdp2.install()
    assert len(caplog.records) == 1
    assert all(name in caplog.text for name in (*NAMES, installation.TRIED_IN))
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    with installation.installed():  # nor does another rank warn
        pass
    assert caplog.text == ""


def test_policies_that_are_made_while_installed_are_pickled_by_ours() -> None:
    with quietly_installed():
        policy = theirs.MixedPrecisionPolicy()
        assert pickle.loads(pickle.dumps(policy)) == policy


SCRIPT = """
import sys
from torch.distributed.fsdp import fully_shard
import neighbour
if __name__ == "__main__":
    print("argv:", sys.argv[1:], "by:", fully_shard.__module__, neighbour.FSDPModule.__module__)
"""


@pytest.mark.ci
@pytest.mark.parametrize("script", [["script.py"], *long(["-m", "script"])], ids=["script", "module"])
def test_run_runs_a_script_with_our_names(tmp_path: Path, script: list[str]) -> None:
    (tmp_path / "neighbour.py").write_text("from torch.distributed.fsdp import FSDPModule")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fsdp2", "run", *script, "--steps", "3", "-m"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "argv: ['--steps', '3', '-m'] by: fsdp2.core.api.fully_shard fsdp2.core.api.module\n"
    assert "fsdp2.install: in torch.distributed.fsdp" in ran.stderr
    assert "still hold" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["not_there.py"], "found no script 'not_there.py'"),
        (["-m", "nowhere.at_all"], "found no module 'nowhere.at_all'. Write it as in an import statement.\n"),
    ],
)
def test_run_refuses_what_is_not_there(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", *arguments])
    assert f"error: {said}" in capsys.readouterr().err
    assert theirs.fully_shard is BEFORE["fully_shard"]
