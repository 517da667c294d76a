"""Clients of FSDP1: accelerate with ``fsdp_version=1``, and transformers' ``Trainer`` with ``fsdp="full_shard"``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.clients.compare import files_in
from tests.clients.hugging_face import accelerator, adamw, hf_client, loop, tiny, training_options
from tests.clients.test_trainer import Tokens, history
from tests.harness.selection import long
from tests.harness.training import Tolerance

# Norms of gradients are sums in the order of shards, which lie elsewhere in torch's flat parameter.
fsdp1_client = functools.partial(hf_client, tolerance=Tolerance(rtol=1e-6, atol=1e-7))
NO_LOADING = {"cpu_ram_efficient_loading": False, "sync_module_states": False}  # these need an accelerator


def prepared(*, has_optimizer_first: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """The engine, the model and its optimizer, which may be made before the model is wrapped."""
    of_plugin = {"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD", "cpu_ram_efficient_loading": False}
    engine, model = on_the_cpu(accelerator(**{**of_plugin, **options})), tiny()
    if has_optimizer_first:
        return engine, *engine.prepare(model, adamw(model.parameters()))
    model = engine.prepare(model)
    return engine, model, engine.prepare(adamw(model.parameters()))


def on_the_cpu(engine: Any) -> Any:
    """The device that accelerate gives to FSDP1 is ``cpu:0``, which torch's class does not take for the CPU."""
    type(engine).device = property(lambda self: torch.device("cpu"))
    return engine


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


train = functools.partial(loop, max_norm=10.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_orig_params": False},
        {"reshard_after_forward": "SHARD_GRAD_OP"},
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 2},
        {"activation_checkpointing": True},
    ],
    ids=str,
)
@fsdp1_client()
def test_accelerate_trains_the_same(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    return train(*prepared(**options), rank, range(4))


def saved_and_loaded(rank: int, folder: Path, kind: str, use_orig_params: bool) -> Any:
    """Most scripts make the optimizer before the model is wrapped, which flat parameters do not allow."""
    options = {"state_dict_type": kind, "use_orig_params": use_orig_params}
    engine, model, optimizer = prepared(has_optimizer_first=use_orig_params, **options)
    seen = train(engine, model, optimizer, rank, range(3))
    engine.save_state(str(folder / "state"))
    files = files_in(folder)
    after = train(engine, model, optimizer, rank, range(3, 5))
    engine.load_state(str(folder / "state"))
    assert str(after) == str(train(engine, model, optimizer, rank, range(3, 5)))
    return {"seen": seen, "after": after, "files": list(files), "full": full_parameters(model)}


@pytest.mark.every_case  # the first one is how most scripts come to FSDP1; test_launch.py does it from the shell
@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@fsdp1_client()
def test_accelerate_saves_and_loads_shards_the_same(rank: int, folder: Path, use_orig_params: bool) -> Any:
    return saved_and_loaded(rank, folder, "SHARDED_STATE_DICT", use_orig_params)


# On the CPU, torch's class reads freed memory where it moves whole values to the CPU.
@pytest.mark.parametrize("use_orig_params", [True, False])
@fsdp1_client(fails=("", "no error"))
def test_accelerate_saves_and_loads_whole_values(rank: int, folder: Path, use_orig_params: bool) -> Any:
    return saved_and_loaded(rank, folder, "FULL_STATE_DICT", use_orig_params)


def trainer(folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    own = {"max_grad_norm": 10.0, "weight_decay": 0.5}
    arguments = TrainingArguments(**training_options(folder, **{**own, **options}))
    made = Trainer(tiny(), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    on_the_cpu(made.accelerator)
    return made


def resumed(folder: Path, kind: str, **of_fsdp: Any) -> Any:
    config = {"version": 1, "state_dict_type": kind, **NO_LOADING, **of_fsdp}
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    first = trainer(folder, **options)
    first.train()
    expected = full_parameters(first.model_wrapped)
    second = trainer(folder, **options)
    second.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    losses = [[entry["loss"] for entry in history(engine) if "loss" in entry] for engine in (first, second)]
    return {"losses": losses, "parameters": expected, "resumed": full_parameters(second.model_wrapped)}


@pytest.mark.parametrize("options", [{}, {"use_orig_params": False, "activation_checkpointing": True}], ids=str)
@fsdp1_client()
def test_the_trainer_trains_saves_and_resumes_shards_the_same(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    return resumed(folder, "SHARDED_STATE_DICT", **options)


@fsdp1_client(fails=("", "no error"))
def test_the_trainer_trains_saves_and_resumes_whole_values(rank: int, folder: Path) -> Any:
    return resumed(folder, "FULL_STATE_DICT")
