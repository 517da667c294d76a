"""peft: adapters on a model that accelerate shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.compare import files_in, shard_each, whole
from tests.clients.hugging_face import accelerator, adamw, batch, hf_client, tiny, train


def adapter_config(kind: str) -> Any:
    import peft

    targets = ["q_proj", "v_proj", "down_proj"]
    return {
        "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True, task_type="CAUSAL_LM"),
        "ia3": lambda: peft.IA3Config(target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    }[kind]()


def prepared(model: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The engine, the model and the optimizer of what is trained."""
    engine = accelerator(transformer_cls_names_to_wrap=["LlamaDecoderLayer"], **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return engine, *engine.prepare(model, adamw(trained))


def adapted(kind: str, *more: str) -> Any:
    """A model with adapters: "default", and ``more``."""
    from peft import get_peft_model

    model = get_peft_model(tiny(), adapter_config(kind))
    for name in more:
        model.add_adapter(name, adapter_config(kind))
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@hf_client()
def test_adapters_train_and_save_the_same(rank: int, folder: Path, kind: str) -> Any:
    engine, model, optimizer = prepared(adapted(kind))
    seen = train(engine, model, optimizer, rank)
    states = engine.get_state_dict(model)
    engine.unwrap_model(model).save_pretrained(
        folder / "adapter", state_dict=states, is_main_process=engine.is_main_process
    )
    engine.wait_for_everyone()
    return {**seen, "files": files_in(folder, contents=["*.safetensors"])}


@pytest.mark.parametrize("kind", ["lora", "ia3"])
@hf_client()
def test_a_checkpoint_of_adapters_goes_on_the_same(rank: int, folder: Path, kind: str) -> Any:
    engine, model, optimizer = prepared(adapted(kind), state_dict_type="SHARDED_STATE_DICT")
    train(engine, model, optimizer, rank, range(2))
    engine.save_state(str(folder / "state"))
    train(engine, model, optimizer, rank, range(2, 3))
    engine.load_state(str(folder / "state"))
    return train(engine, model, optimizer, rank, range(2, 4))


@pytest.mark.parametrize("reshard", [True, False])
@hf_client()
def test_reference_forward_without_adapters_keeps_the_policys_gradients(rank: int, folder: Path, reshard: bool) -> Any:
    """As trl's trainers of preferences do it, without a second model. Gradients are those of the plain model."""
    plain = adapted("lora", "second")
    _, model, _ = prepared(copy.deepcopy(plain), reshard_after_forward=reshard)
    far = []
    for step, adapter in enumerate(("default", "default", "second", "default")):
        for each in (model, plain):
            each.set_adapter(adapter)
            policy = each(**batch("llama", rank, step)).logits
            with torch.no_grad(), each.disable_adapter():
                reference = each(**batch("llama", rank, step)).logits
            ((policy - reference).square().mean() + policy.mean()).backward()
        for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
            gradients = [None if param.grad is None else whole(param.grad) for param in (mine, expected)]
            if gradients[1] is not None:
                dist.all_reduce(gradients[1])
                gradients[1] /= dist.get_world_size()
            is_equal = gradients[0] is gradients[1] or torch.allclose(*gradients, rtol=1e-4, atol=1e-6)
            far += [] if is_equal else [f"step {step}: {gradients}"]
        model.zero_grad()
        plain.zero_grad()
    assert far == []
    return far


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@hf_client()
def test_adapters_are_merged_while_their_model_is_streamed(rank: int, folder: Path, dtype: torch.dtype) -> Any:
    """To the names and values of ``merge_and_unload``; the model that trains stays as it is. One layer is checkpointed,
    as accelerate does it, the other one compiled."""
    import peft
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    import fsdp2

    def made() -> Any:
        given = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
        config = peft.LoraConfig(r=4, lora_alpha=8, **given)
        model = peft.get_peft_model(tiny().to(dtype), config, autocast_adapter_dtype=False)
        model.add_adapter("second", config)
        for name, param in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(len(name)))
        return model

    model = made()
    expected = dict(made().merge_and_unload().named_parameters())
    layers = model.base_model.model.model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), torch.compile(layers[1])
    shard_each(*layers, model)
    before = {name: whole(param) for name, param in model.named_parameters()}
    found = {}
    for to_rank in (None, 1):
        merged = fsdp2.checkpoint.merge_lora(model)
        how = {"transform": merged.transform, "rename": merged.rename, "bucket_nbytes": "4KiB", "to_rank": to_rank}
        stream = fsdp2.checkpoint.stream_full_params(model, **how)
        found = {name: tensor.clone() for name, tensor in stream}
        assert (list(found) == list(expected)) is (to_rank in (None, rank)), (list(found), list(expected))
        for name, tensor in found.items():
            assert tensor.dtype is dtype
            rtol = 1e-6 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(tensor, expected[name].detach(), rtol=rtol, atol=rtol, msg=name)
    assert all(torch.equal(whole(param), before[name]) for name, param in model.named_parameters())
    return found


@pytest.mark.parametrize(
    ("targets", "copied"),
    [(["q_proj", "lm_head"], []), (["q_proj"], ["embed_tokens"]), (["q_proj"], ["embed_tokens", "lm_head"])],
)
@hf_client()
def test_both_names_of_a_tie_that_an_adapter_breaks_are_streamed(
    rank: int, folder: Path, targets: list[str], copied: list[str]
) -> Any:
    """With what the trainer computes with: the logits of the merged model are those of the adapted one."""
    import peft

    import fsdp2

    config = peft.LoraConfig(target_modules=targets, modules_to_save=copied, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(tie_word_embeddings=True), config)
    for index, param in enumerate(model.parameters()):
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(index))
    ids = torch.arange(8).view(1, 8)
    expected = model(ids).logits.detach()
    shard_each(model)
    merged = fsdp2.checkpoint.merge_lora(model)
    stream = fsdp2.checkpoint.stream_full_params(model, transform=merged.transform, rename=merged.rename)
    found = {name: tensor.clone() for name, tensor in stream}
    plain = tiny()
    plain.load_state_dict(found)
    torch.testing.assert_close(plain(ids).logits.detach(), expected, rtol=1e-4, atol=1e-5)
    return found
