"""torchtitan's Trainer on a tiny Llama: data loader, chunked loss, ``parallelize_llama``, optimizer, checkpoints.

What the Trainer needs to run without an accelerator is in ``adapt_to_cpu``; it is the same for both runtimes, but for
one line, which torch's runtime needs on gloo.
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.clients.compare import client, files_in, layout_of, parameters_of
from tests.harness.selection import long

VOCAB, DIM, SEQ = 64, 32, 16
LAYERS: dict[str, Any] = {"n_layers": 2, "dim": DIM, "n_heads": 4, "attn_backend": "flex"}
PACKAGES = ("torchtitan", "torchao", "triton", "datasets", "tensorboard", "torchdata", "tokenizers")
PRELOADED = ("torchtitan.trainer", "torchtitan.models.llama3", "torchtitan.models.qwen3", "torch._dynamo")


def on_ranks(num_ranks: int) -> Any:
    return client(*PACKAGES, num_ranks=num_ranks, preload=PRELOADED)


# A tiny configuration


def _llama(is_tied: bool) -> Any:
    """Two layers."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

    rope = ComplexRoPE.Config(dim=DIM // 4, max_seq_len=SEQ, theta=10000)
    embedding_init = llama3._EMBEDDING_SKIP_INIT if is_tied else llama3._EMBEDDING_INIT
    return llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        enable_weight_tying=is_tied,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=embedding_init),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=llama3._output_linear_init(DIM)),
        layers=_without_flex_attention(llama3._build_llama3_layers(**LAYERS, hidden_dim=64, rope=rope)),
    )


def _qwen3_moe() -> Any:
    """Two layers with four experts each."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear

    experts: dict[str, Any] = {"moe_hidden_dim": 48, "num_experts": 4, "top_k": 2, "moe_comm_backend": "standard"}
    rope = CosSinRoPE.Config(dim=16, max_seq_len=SEQ, theta=10000)
    layers = qwen3._build_qwen3_moe_layers(**LAYERS, **experts, n_kv_heads=2, head_dim=16, rope=rope)
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCAB,
        dim=DIM,
        norm=qwen3._qwen3_norm(DIM),
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=qwen3._LINEAR_INIT),
        layers=_without_flex_attention(layers),
    )


def _without_flex_attention(layers: list[Any]) -> list[Any]:
    """torchtitan's language models want flex attention, whose backward does not exist on the CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return layers


def _spec(name: str) -> Any:
    from torchtitan.models import llama3, qwen3
    from torchtitan.protocols.model_spec import ModelSpec

    is_llama = name != "qwen3_moe"
    return ModelSpec(
        name="llama3" if is_llama else "qwen3",
        flavor="tiny",
        model=_llama(is_tied=name == "tied_llama") if is_llama else _qwen3_moe(),
        parallelize_fn=llama3.parallelize_llama if is_llama else qwen3.parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=llama3.Llama3StateDictAdapter if is_llama else qwen3.Qwen3StateDictAdapter,
    )


def _components() -> tuple[type, type]:
    """A data loader of random tokens, and a tokenizer that nobody asks."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
            self.rank, self.shape, self.step = dp_rank, (local_batch_size, seq_len + 1), 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
                self.step += 1
                tokens = torch.randint(0, VOCAB, self.shape, generator=generator)
                positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1).contiguous()
                yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.step = state_dict["step"]

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any = None, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = lambda self, *_, **__: VOCAB

    return Tokens, NoTokenizer


def adapt_to_cpu() -> None:
    from torchtitan import trainer
    from torchtitan.components import metrics
    from torchtitan.distributed import fsdp

    logging.disable(logging.WARNING)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", torch.cpu  # type: ignore[attr-defined]
    monitor = types.SimpleNamespace(
        device_name="cpu",
        get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    metrics.build_device_memory_monitor = lambda: monitor
    trainer.dist_utils.init_distributed = lambda *_, **__: dist.get_world_size()
    trainer.dist_utils.set_pg_timeouts = lambda **_: None  # it passes device ids to a barrier of gloo
    trainer.time = types.SimpleNamespace(perf_counter=trainer.time.perf_counter, sleep=lambda _: None)
    undivided = fsdp.disable_fsdp_gradient_division
    if fsdp.FSDPModule.__module__.startswith("torch."):

        def undivided_on_gloo(model: Any) -> None:
            """torch's runtime asks for a reduction that gloo does not have, unless it is told to sum."""
            undivided(model)
            for module in model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

        fsdp.disable_fsdp_gradient_division = undivided_on_gloo


# One run


def _train(
    folder: Path,
    *,
    chunks: int = 4,
    steps: int = 3,
    model: str = "llama",
    recompute: str = "",
    compiles: bool = False,
    training: dict[str, Any] | None = None,
    parallelism: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    optimizer: Any = None,
    checks_types: bool = False,
) -> dict[str, Any]:
    """What the Trainer logs in each step (loss, largest loss of a rank, gradient norm), and the trained parameters."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.trainer import Trainer

    adapt_to_cpu()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallelism = {"spmd_backend": "partial_dtensor", **(parallelism or {})}
    if parallelism["spmd_backend"] == "default":
        parallelism["spmd_backend"] = _default_backend()
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    tokens, no_tokenizer = _components()
    options = {"local_batch_size": 2, "seq_len": SEQ, "steps": steps, "disable_cuda_graphs": True}
    config = Trainer.Config(
        model_spec=_spec(model),
        dump_folder=str(folder),
        hf_assets_path=str(folder),
        loss=ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss) if chunks else loss,
        optimizer=optimizer or default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(**{"mixed_precision_param": "float32", **options, **(training or {})}),
        dataloader=tokens.Config(),
        tokenizer=no_tokenizer.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(**parallelism),
        compile=CompileConfig(enable=compiles, backend="aot_eager"),
        activation_checkpoint=getattr(activation_checkpoint, recompute).Config() if recompute else None,
        checkpoint=CheckpointManager.Config(**(checkpoint or {})),
        debug=DebugConfig(seed=0, spmd_typechecking=checks_types and parallelism["spmd_backend"] == "spmd_types"),
    )
    trainer = Trainer(config)
    logged = []
    trainer.metrics_processor.log = lambda step, *values, **_: logged.append((step, *values))
    trainer.train()
    (part,) = trainer.model_parts
    found = {"logged": [list(entry) for entry in logged], "layout": layout_of(part), "trained": parameters_of(part)}
    trainer.close()
    return found


def _default_backend() -> str:
    """torchtitan's: plain parameters with types of spmd_types. torch's own runtime knows them since 2.14; before, its
    backend of DTensors gives the same numbers."""
    from torchtitan.distributed import fsdp

    is_ours = not fsdp.FSDPModule.__module__.startswith("torch.")
    return "spmd_types" if is_ours or hasattr(dist, "_spmd_no_typecheck") else "partial_dtensor"


REPLICAS, TENSORS = {"data_parallel_replicate_degree": 2}, {"tensor_parallel_degree": 2}
EXPERTS, FULL, DEFAULT = {"expert_parallel_degree": 2}, {"spmd_backend": "full_dtensor"}, {"spmd_backend": "default"}
BF16 = {"mixed_precision_param": "bfloat16"}
EVERY_SECOND = {"enable": True, "interval": 2, "last_save_model_only": False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": 0},
        {"model": "tied_llama"},
        {"model": "qwen3_moe"},
        {"training": BF16, "recompute": "SelectiveAC"},
        {"training": {"global_batch_size": 8}, "recompute": "FullAC"},
        {"compiles": True, "recompute": "SelectiveAC"},
        *long({"parallelism": {"fsdp_reshard_after_forward": "never"}}),
        {"parallelism": FULL},
        {"parallelism": DEFAULT},
        {"parallelism": DEFAULT, "checks_types": True},
        *long(
            {"parallelism": DEFAULT, "model": "tied_llama", "training": {"global_batch_size": 8}, "checks_types": True},
            {"parallelism": DEFAULT, "training": BF16, "recompute": "FullAC"},
            {"parallelism": DEFAULT, "compiles": True, "recompute": "SelectiveAC"},
        ),
    ],
    ids=str,
)
@on_ranks(2)
def test_the_trainer_trains_the_same(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    return _train(folder, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism": {**REPLICAS, "data_parallel_shard_degree": 2}},
        {"parallelism": TENSORS},
        {"parallelism": REPLICAS | TENSORS},
        {"parallelism": TENSORS | FULL},
        *long({"parallelism": REPLICAS | FULL}),
        {"parallelism": TENSORS, "compiles": True},
        {"model": "qwen3_moe", "parallelism": EXPERTS},
        *long({"model": "qwen3_moe", "parallelism": {**TENSORS, "expert_parallel_degree": 4}}),
        {"model": "qwen3_moe", "parallelism": EXPERTS | FULL},
        {"model": "qwen3_moe", "parallelism": EXPERTS | TENSORS | FULL},
    ],
    ids=str,
)
@on_ranks(4)
def test_replicas_tensor_and_expert_parallelism_train_the_same(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    return _train(folder, **options)


@pytest.mark.parametrize("degrees", [{}, *long(REPLICAS)], ids=str)
@on_ranks(4)
def test_the_default_backend_with_tensor_parallelism_has_the_same_losses(
    rank: int, folder: Path, degrees: dict[str, int]
) -> Any:
    """To the last digits: DTensor sums the norms of gradients in another order."""
    found = _train(folder, parallelism={**DEFAULT, **TENSORS, **degrees}, checks_types=True)
    return [[step, *(round(value, 4) for value in values[:3])] for step, *values in found["logged"]], found["layout"]


@pytest.mark.long
@on_ranks(8)
def test_hsdp_with_tensor_parallelism_trains_the_same(rank: int, folder: Path) -> Any:
    return _train(folder, parallelism=REPLICAS | TENSORS)


# Muon by Moonlight's recipe, as torchtitan configures it for Kimi: matrices at the scale of AdamW's updates, AdamW for
# the rest. torchtitan's own Muon needs CUDA.


def _moonlight(muon: Any) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Container(OptimizersContainer):
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            pass

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return muon if name == "Muon" else OptimizersContainer._resolve_optimizer_factory(name)

    options = {"lr": 1e-2, "weight_decay": 0.1}
    groups = [
        (r"attention\.(qkv_linear\.wqkv|wo)|feed_forward\.w[123]", "Muon", {"adjust_lr_fn": "match_rms_adamw"}),
        (".*", "AdamW", {"betas": (0.9, 0.95), "eps": 1e-8}),
    ]
    return Container.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={**options, **more})
            for pattern, name, more in groups
        ],
    )


@on_ranks(2)
def test_muon_by_moonlights_recipe_trains_as_torchs_and_goes_on_from_a_checkpoint(rank: int, folder: Path) -> Any:
    import fsdp2

    theirs = _train(folder, steps=4, optimizer=_moonlight(torch.optim.Muon))
    ours = _train(folder, steps=4, optimizer=_moonlight(fsdp2.optim.Muon), checkpoint=EVERY_SECOND)
    for name, value in theirs["trained"].items():  # Newton-Schulz is in bf16, in both
        torch.testing.assert_close(ours["trained"][name], value, rtol=0.0, atol=2e-3)
    goes_on = _train(
        folder, steps=6, optimizer=_moonlight(fsdp2.optim.Muon), checkpoint={**EVERY_SECOND, "load_step": 2}
    )
    assert goes_on["logged"][1] == ours["logged"][3]
    return theirs, ours, goes_on


@on_ranks(2)
def test_the_exported_safetensors_are_equal(rank: int, folder: Path) -> Any:
    _train(folder, steps=2, checkpoint={"enable": True, "last_save_in_hf": True})
    files = files_in(folder)
    assert any(name.endswith(".safetensors") for name in files), files
    return files


@on_ranks(2)
def test_the_default_backend_and_that_of_dtensors_read_each_others_checkpoints(rank: int, folder: Path) -> Any:
    found: list[Any] = []
    there = ("partial_dtensor", "default")
    for name, backends in (("there", there), ("back", there[::-1])):
        options = {**EVERY_SECOND, "folder": name}
        before, after = ({"spmd_backend": backend} for backend in backends)
        whole = _train(folder, steps=4, checkpoint=options, parallelism=before)
        goes_on = _train(folder, steps=6, checkpoint={**options, "load_step": 2}, parallelism=after)
        assert goes_on["logged"][:2] == whole["logged"][2:4]  # what is equal is also right
        found += [whole, goes_on]
    return [*found, files_in(folder)]
