"""peft: adapters on a model that accelerate shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.compare import files_in
from tests.clients.hugging_face import accelerator, adamw, hf_client, tiny, train


def adapter_config(kind: str) -> Any:
    import peft

    targets = ["q_proj", "v_proj", "down_proj"]
    return {
        "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True, task_type="CAUSAL_LM"),
        "ia3": lambda: peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    }[kind]()


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@hf_client()
def test_adapters_train_and_save_the_same(rank: int, folder: Path, kind: str) -> Any:
    from peft import get_peft_model

    engine = accelerator(transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    model = get_peft_model(tiny(), adapter_config(kind))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = engine.prepare(model, adamw(trained))
    seen = train(engine, model, optimizer, rank)
    states = engine.get_state_dict(model)
    engine.unwrap_model(model).save_pretrained(
        folder / "adapter", state_dict=states, is_main_process=engine.is_main_process
    )
    engine.wait_for_everyone()
    return {**seen, "files": files_in(folder, contents=["*.safetensors"])}


@hf_client()
def test_a_second_adapter_trains_the_same(rank: int, folder: Path) -> Any:
    from peft import get_peft_model

    engine = accelerator(transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    model = get_peft_model(tiny(), adapter_config("lora"))
    model.add_adapter("second", adapter_config("lora"))
    model.set_adapter("second")
    model, optimizer = engine.prepare(model, adamw(model.parameters()))
    first = train(engine, model, optimizer, rank, range(2))
    model.set_adapter("default")
    second = train(engine, model, optimizer, rank, range(2, 4))
    return [first, second]


@pytest.mark.parametrize("kind", ["lora", "ia3"])
@hf_client()
def test_a_checkpoint_of_adapters_goes_on_the_same(rank: int, folder: Path, kind: str) -> Any:
    from peft import get_peft_model

    engine = accelerator(transformer_cls_names_to_wrap=["LlamaDecoderLayer"], state_dict_type="SHARDED_STATE_DICT")
    model = get_peft_model(tiny(), adapter_config(kind))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = engine.prepare(model, adamw(trained))
    train(engine, model, optimizer, rank, range(2))
    engine.save_state(str(folder / "state"))
    train(engine, model, optimizer, rank, range(2, 3))
    engine.load_state(str(folder / "state"))
    return train(engine, model, optimizer, rank, range(2, 4))
