"""The script that ``test_launch.py`` starts with ``accelerate launch``: a training loop as accelerate's users write it.

It says nothing of FSDP, which is what the configuration file is for, and nothing of fsdp2: ``accelerate launch -m fsdp2
run`` starts it with our runtime. Its argument is an empty folder, where each rank writes what it has seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.hugging_face import VOCAB, allow_fsdp_on_cpu

# All-gathers and reduce-scatters. On two ranks of gloo, fsdp2 sends either as one message to the other rank.
TRANSFERS = {"c10d::allgather_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::recv_"}


def main(folder: Path) -> None:
    allow_fsdp_on_cpu()
    engine = Accelerator(cpu=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes))
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    batches = DataLoader(torch.randint(VOCAB, (24, 8), generator=torch.Generator().manual_seed(1)), batch_size=2)
    model, optimizer, batches, scheduler = engine.prepare(model, optimizer, batches, scheduler)
    units = [module for module in model.modules() if isinstance(module, FSDPModule | FullyShardedDataParallel)]
    seen: dict[str, Any] = {
        "classes": sorted({made_by(type(unit)) for unit in units}),
        "units": len(units),
        "elements": num_elements,
        "elements_here": sum(local(parameter).numel() for parameter in model.parameters()),
        "losses": [],
        "norms": [],
        "rates": [],
    }

    def train(num_steps: int) -> None:
        for _, ids in zip(range(num_steps), batches, strict=False):
            loss = model(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            norm = engine.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen["losses"].append(float(loss))
            seen["norms"].append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            seen["rates"].append(scheduler.get_last_lr())

    train(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(1)
    names = [event.name for event in profiled.events()]
    seen["transfers"] = sum(name in TRANSFERS for name in names)
    train(2)
    engine.save_state(str(folder / "state"))
    train(3)
    engine.load_state(str(folder / "state"))
    train(3)
    engine.wait_for_everyone()
    (folder / f"seen.{engine.process_index}.json").write_text(json.dumps(seen))
    engine.end_training()


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def made_by(unit: type[nn.Module]) -> str:
    """The class that made a module a unit, by its module and name."""
    own = ("FSDPModule", "FullyShardedDataParallel")
    (found,) = [base for base in unit.__mro__ if base.__name__ in own]
    return f"{found.__module__}.{found.__name__}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
