"""trl's trainers: supervised fine-tuning, preferences, rewards and reinforcement learning, through accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.compare import files_in
from tests.clients.hugging_face import CONFIGS, VOCAB, hf_client, saved, state, tiny, training_options

NUM_ROWS = 32
_VARYING = ("runtime", "per_second", "time")


def tokenizer() -> Any:
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(VOCAB - len(special)))]
    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, **special)


def texts(**lengths: int) -> Any:
    """Rows with a text of so many random words for each name."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(0, VOCAB - 3, (length,), generator=generator).tolist())

    return Dataset.from_list([{name: text(length) for name, length in lengths.items()} for _ in range(NUM_ROWS)])


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """trl's own defaults are bf16 and checkpointing."""
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    own = {"max_steps": 3, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False}
    return training_options(folder, **{**fsdp, **own, **more})


def trained(engine: Any) -> Any:
    """What the trainer has logged, without times, and the model."""
    engine.train()
    logged = [
        {name: value for name, value in entry.items() if not any(part in name for part in _VARYING)}
        for entry in engine.state.log_history
    ]
    return {"logged": logged, **state(engine.model)}


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"packing": True, "max_length": 16},
        {"completion_only_loss": True, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
@hf_client("trl")
def test_supervised_fine_tuning_is_the_same(rank: int, folder: Path, more: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = texts(prompt=3, completion=5)
    engine = SFTTrainer(tiny(), SFTConfig(**options(folder, **more)), train_dataset=rows, processing_class=tokenizer())
    result = trained(engine)
    engine.save_model(str(folder / "saved"))
    return {"files": files_in(folder / "saved", contents=["*.safetensors"]), **result}


@pytest.mark.parametrize("is_adapter", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("more", [{"gradient_checkpointing": True}, {"loss_type": ["sigmoid", "sft"]}], ids=str)
@hf_client("trl")
def test_preferences_are_learned_the_same(rank: int, folder: Path, more: dict[str, Any], is_adapter: bool) -> Any:
    """The model runs on both texts, and so does a frozen one: a second sharded model, or the same without adapter,
    whose gradients ``test_peft`` looks at."""
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    adapter = LoraConfig(r=2, target_modules=["q_proj"]) if is_adapter else None
    given = {"processing_class": tokenizer(), "peft_config": adapter}
    given["train_dataset"] = texts(prompt=3, chosen=5, rejected=4)
    return trained(DPOTrainer(tiny(), None if is_adapter else tiny(), DPOConfig(**options(folder, **more)), **given))


@hf_client("trl")
def test_rewards_are_learned_the_same(rank: int, folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**CONFIGS["llama"][2], num_labels=1, pad_token_id=0))
    arguments, rows = RewardConfig(**options(folder)), texts(prompt=3, chosen=5, rejected=4)
    return trained(RewardTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer()))


@pytest.mark.parametrize("more", [{"beta": 0.1}, {"num_iterations": 2}], ids=str)
@hf_client("trl")
def test_reinforcement_learning_is_the_same(rank: int, folder: Path, more: dict[str, Any]) -> Any:
    """The sharded model generates, and then learns from that. With ``beta``, a frozen one is loaded from a folder."""
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    def num_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    arguments = GRPOConfig(**options(folder, num_generations=2, max_completion_length=5, **more))
    model = AutoModelForCausalLM.from_pretrained(str(saved(tiny(), folder, rank)))
    return trained(
        GRPOTrainer(model, num_words, arguments, train_dataset=texts(prompt=3), processing_class=tokenizer())
    )
