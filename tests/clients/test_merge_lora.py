"""``merge_lora`` gives what peft's own ``merge_and_unload`` leaves, or refuses."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from tests.clients.hugging_face import tiny
from tests.harness.messages import error_of

pytest.importorskip("peft", reason="not installed: peft; run `make clients`")

DIM = 8


class Model(nn.Module):
    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.embedding = nn.Embedding(16, DIM)
        self.up = nn.Linear(DIM, 12)
        self.down = Conv1D(DIM, 12)
        self.attention = nn.MultiheadAttention(DIM, 2)
        self.head = nn.Linear(DIM, 16)


def adapted(*configs: dict[str, Any], method: str = "LoraConfig") -> Any:
    """A model with an adapter for each of ``configs``, "default", "1", and so on, with random values."""
    import peft

    torch.manual_seed(0)
    made = [getattr(peft, method)(**{"target_modules": ["up"], **config}) for config in configs or ({},)]
    model = peft.get_peft_model(Model(), made[0])
    for index, config in enumerate(made[1:], 1):
        model.add_adapter(str(index), config)
    for index, (name, param) in enumerate(model.named_parameters()):
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(param, std=0.3, generator=torch.Generator().manual_seed(index))
    return model


def changed(change: Callable[[Any], Any], *configs: dict[str, Any]) -> Any:
    model = adapted(*configs)
    change(model)
    return model


def _like_older_peft(model: Any, *attributes: str) -> None:
    """Without what later versions say of an adapter: 0.14 has no ``lora_variant``."""
    for attribute in attributes:
        delattr(model.base_model.model.up, attribute)


def of_x_lora() -> Any:
    """Adapters that are plain, and that a classifier weighs for each token."""
    import peft

    made = tiny(use_cache=False)
    with tempfile.TemporaryDirectory() as folder:
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
        peft.get_peft_model(tiny(), config).save_pretrained(folder)
        weighed = peft.XLoraConfig("CAUSAL_LM", hidden_size=16, adapters={"a": folder, "b": folder})
        return peft.get_peft_model(made, weighed)


def streamed(model: nn.Module) -> dict[str, torch.Tensor]:
    merged = fsdp2.checkpoint.merge_lora(model)
    stream = fsdp2.checkpoint.stream_full_params(model, transform=merged.transform, rename=merged.rename)
    return {name: tensor.clone() for name, tensor in stream}


MERGED: dict[str, Callable[[], Any]] = {
    "linear": adapted,
    "rslora": lambda: adapted({"use_rslora": True, "r": 4}),
    "weights of Conv1D": lambda: adapted({"target_modules": ["down"], "fan_in_fan_out": True}),
    "ranks by module": lambda: adapted({"target_modules": ["up", "head"], "rank_pattern": {"head": 2}}),
    "trained biases": lambda: adapted({"bias": "all"}),
    "values from the base": lambda: adapted({"init_lora_weights": "pissa"}),
    "modules_to_save": lambda: adapted({"modules_to_save": ["head"]}),
    "two active": lambda: changed(lambda model: model.base_model.set_adapter(["default", "1"]), {}, {"r": 2}),
    "another active": lambda: changed(lambda model: model.set_adapter("1"), {}, {"r": 2}),
    "DoRA that is not active": lambda: adapted({}, {"use_dora": True}),
    "DoRA that is merged": lambda: changed(lambda model: model.merge_adapter(), {"use_dora": True}),
    "scaled": lambda: changed(lambda model: model.base_model.model.up.scale_layer(3.0)),
}


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
@pytest.mark.parametrize("kind", MERGED)
def test_weights_are_those_of_merge_and_unload(kind: str) -> None:
    model = MERGED[kind]()
    expected = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    found = streamed(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "DoRA": (lambda: adapted({"use_dora": True}), "has the variant DoraLinearVariant in 'default'"),
    "DoRA of peft 0.14": (
        lambda: changed(lambda model: _like_older_peft(model, "lora_variant"), {"use_dora": True}),
        "has use_dora in 'default'",
    ),
    "a variant that says nothing": (
        lambda: changed(lambda model: _like_older_peft(model, "lora_variant", "use_dora"), {"use_dora": True}),
        "'lora_magnitude_vector.default.weight', expected only 'lora_A.default.weight', 'lora_B.default.weight'",
    ),
    "two active, one DoRA": (
        lambda: changed(lambda model: model.base_model.set_adapter(["default", "1"]), {}, {"use_dora": True}),
        "has the variant DoraLinearVariant in '1'",
    ),
    "biases": (lambda: adapted({"lora_bias": True}), "has lora_bias in 'default'"),
    "embeddings": (lambda: adapted({"target_modules": ["embedding"]}), "is a peft.tuners.lora.layer.Embedding"),
    "attention": (
        lambda: adapted({"target_modules": ["attention"]}),
        "is a peft.tuners.lora.layer.MultiheadAttention",
    ),
    "tokens": (lambda: adapted({"trainable_token_indices": {"embedding": [1]}}), "TrainableTokensWrapper"),
    "AdaLoRA": (lambda: adapted({"total_step": 9}, method="AdaLoraConfig"), "is a peft.tuners.adalora.model"),
    "X-LoRA": (of_x_lora, "is a peft.tuners.xlora.model.XLoraModel"),
    "another method": (lambda: adapted(method="LoHaConfig"), "no module of this PeftModel is a LoRA layer"),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_more_than_two_matrices_is_refused(kind: str) -> None:
    make, found = REFUSED[kind]
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = " ".join(error_of(lambda: fsdp2.checkpoint.merge_lora(model)).split())
    assert said.startswith("ValueError: merge_lora: ")
    assert found in said
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
