"""What docs/clients.md shows and says."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp2.installation import TRIED_IN
from tests.clients.compare import files_in, parameters_of
from tests.clients.hugging_face import allow_fsdp_on_cpu, hf_client
from tests.clients.test_checkpoint import on_two_ranks as on_checkpoint_ranks
from tests.clients.test_fabric import on_ranks as on_fabric_ranks
from tests.clients.test_pipelining import on_four_ranks as on_pipeline_ranks
from tests.clients.test_torchao import on_two_ranks as on_ao_ranks
from tests.clients.test_torchtitan import adapt_to_cpu, on_ranks as on_titan_ranks
from tests.docs.launch import torchrun
from tests.docs.markdown import ROOT, programs

PAGE = ROOT / "docs" / "clients.md"
EXAMPLES = ROOT / "docs" / "examples" / "clients"
(BLOCK,) = [block for _, blocks in programs(PAGE) for block in blocks]


@hf_client()
def test_the_lines_of_accelerate_run_the_same(rank: int, folder: Path) -> Any:
    allow_fsdp_on_cpu()
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n" * (BLOCK.line - 1) + BLOCK.text, str(PAGE), "exec"), namespace)
    return parameters_of(namespace["model"])


@pytest.mark.parametrize("name", ["distributed_config", "peft", "trainer"])
@hf_client()
def test_the_example_runs_the_same(rank: int, folder: Path, name: str) -> Any:
    allow_fsdp_on_cpu()
    return parameters_of_example(name, folder)


def example(name: str, on_ranks: Any, prepare: Callable[[], object] = lambda: None) -> Any:
    """The test that it runs the same."""

    def body(rank: int, folder: Path) -> Any:
        prepare()
        return parameters_of_example(name, folder)

    body.__qualname__ = body.__name__ = f"test_the_example_of_{name}_runs_the_same"  # by which the ranks find it
    return on_ranks(body)


test_the_example_of_torchtitan_runs_the_same = example("torchtitan", on_titan_ranks(2), adapt_to_cpu)
test_the_example_of_torchao_runs_the_same = example("torchao", on_ao_ranks)
test_the_example_of_fabric_runs_the_same = example("fabric", on_fabric_ranks(2))
test_the_example_of_pipelining_runs_the_same = example("pipelining", on_pipeline_ranks)


@on_checkpoint_ranks("safetensors")
def test_the_example_of_checkpoints_runs_the_same(rank: int, folder: Path) -> Any:
    return parameters_of_example("checkpoints", folder), files_in(folder)


@hf_client("bitsandbytes")
def test_the_example_of_bitsandbytes_trains_the_same(rank: int, folder: Path) -> Any:
    """The base differs: its shards are blocks, and torch's are bytes."""
    return {name: each for name, each in parameters_of_example("bitsandbytes", folder).items() if "lora" in name}


def test_every_example_runs() -> None:
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    named = {name.removeprefix("test_the_example_of_").partition("_")[0] for name in globals() if "example_of" in name}
    assert found == {f"with_{name}" for name in {"distributed_config", "peft", "trainer", *named}}


def parameters_of_example(name: str, folder: Path) -> Any:
    """Run the example; its model's parameters. Reading them takes the process group, which the example destroys."""
    os.chdir(folder)
    with mock.patch.object(dist, "destroy_process_group"):
        return parameters_of(runpy.run_path(str(EXAMPLES / f"with_{name}.py"), run_name="__main__")["model"])


def test_a_script_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    example = (EXAMPLES / "with_distributed_config.py").read_text()
    # torch may abort where gloo still lets go of the last collective: see "A process that aborts" in docs/debugging.md
    end = "torch.distributed.destroy_process_group()"
    assert end in example
    example = example.replace(end, f"import time\n\ntime.sleep(0.5)\n{end}")
    script = tmp_path / "train.py"
    script.write_text(f'{example}print("made by", {{type(m).__mro__[1].__module__ for m in [model]}})\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = torchrun("fsdp2", ["run", str(script)], options=["-m"])
    assert ran.returncode == 0, ran.stderr
    # The lines of the two ranks may run into each other.
    assert (ran.stdout.count("made by"), ran.stdout.count("{'fsdp2.core.api.module'}")) == (2, 2)
    assert ran.stderr.count("fsdp2.install:") == 1  # rank 0 alone, and no warning
    assert list((tmp_path / "saved").glob("*.safetensors"))


@pytest.mark.parametrize(
    "name",
    ["accelerate", "transformers", "trl", "peft", "bitsandbytes", "torchtitan", "torchao", "lightning-fabric", "torch"],
)
def test_the_versions_are_those_that_were_run(name: str) -> None:
    pytest.importorskip(name.replace("-", "_"))
    if name == "torch" and not torch.__version__.startswith(f"{TRIED_IN}."):
        pytest.skip(f"the page is about runs with torch {TRIED_IN}, not {torch.__version__}")
    found = re.findall(rf"^\| {name} \| (\S+) \|", PAGE.read_text(), re.MULTILINE)
    assert set(found) == {version(name).partition("+")[0]}
