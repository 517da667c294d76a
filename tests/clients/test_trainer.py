"""transformers' ``Trainer`` with ``fsdp_config`` version 2, which shards through accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.clients.compare import files_in
from tests.clients.hugging_face import VOCAB, hf_client, state, tiny, training_options


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sentences."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, VOCAB, (32, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer(folder: Path, model: Any, fsdp: dict[str, Any], **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    config = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **fsdp}
    arguments = TrainingArguments(**training_options(folder, fsdp=True, fsdp_config=config, **options))
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def history(engine: Any) -> list[dict[str, float]]:
    """Losses and gradient norms of each step, without times."""
    kept = ("loss", "grad_norm", "step", "eval_loss", "learning_rate")
    return [{name: value for name, value in entry.items() if name in kept} for entry in engine.state.log_history]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@hf_client()
def test_training_saving_and_resuming_are_the_same(rank: int, folder: Path, kind: str) -> Any:
    fsdp = {"state_dict_type": kind}
    first = trainer(folder, tiny(), fsdp)
    first.train()
    expected = state(first.model)
    second = trainer(folder, tiny(), fsdp)
    second.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    found = state(second.model)
    for name, value in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], value), f"resuming did not bring {name} back"
    files = files_in(folder, contents=["model.safetensors", "pytorch_model_fsdp.bin", "config.json"])
    return {"history": history(first), "resumed": history(second), "files": files, **found}


@pytest.mark.parametrize(
    ("fsdp", "options"),
    [
        ({"reshard_after_forward": False}, {}),
        ({"cpu_ram_efficient_loading": True}, {}),
        ({"activation_checkpointing": True}, {}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({}, {"bf16": True}),
        ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ({}, {"name": "gpt2", "eval_strategy": "steps", "eval_steps": 2}),
        ({}, {"name": "mixtral", "eval_strategy": "steps", "eval_steps": 2}),
    ],
    ids=str,
)
@hf_client()
def test_options_and_other_models_train_the_same(
    rank: int, folder: Path, fsdp: dict[str, Any], options: dict[str, Any]
) -> Any:
    engine = trainer(folder, tiny(options.pop("name", "llama")), fsdp, save_strategy="no", **options)
    engine.train()
    engine.save_model(str(folder / "saved"))
    files = files_in(folder / "saved", contents=["*.safetensors"])
    return {"history": history(engine), "files": files, **state(engine.model)}
