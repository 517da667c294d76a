"""QLoRA: a frozen base model in 4 bits, trained through small adapters, sharded with ``fully_shard``.

    torchrun --nproc-per-node 2 docs/examples/train_lm.py                 # trains the base model
    torchrun --nproc-per-node 2 docs/examples/lora.py                     # trains adapters on it, saves only those

The recipe, in this order: freeze; quantise the weights (``wrap_parameters`` with ``NF4Tensor.quantise``); add adapters
(``add_lora``); ``fully_shard`` each block; give the optimizer the trainable parameters; save ``adapter_state``. Frozen
4-bit weights and trainable adapters share a group: the all-gather carries 0.5625 bytes per frozen weight, and only the
adapters have gradients to reduce and optimizer states. Source: Dettmers et al., "QLoRA", arXiv 2305.14314.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from lm_run import Config, Parser, latest_checkpoint
from lm_task import Transformer
from torch import Tensor, nn
from train_lm import Trainer, corpus_for, join_process_group, leave_process_group

from fsdp2.tensors import NF4Tensor, wrap_parameters


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable update of low rank: ``x W^T + b + alpha / rank * (x down^T) up^T``.

    Takes over weight and bias of ``linear`` under the same names, so that their state-dict keys stay. ``up`` starts at
    zero: at first, the layer computes what ``linear`` does.

    Args:
        linear: the layer to adapt; its parameters are frozen, and may be quantised.
        rank: rows of ``down`` and columns of ``up``.
        alpha: weight of the update, usually once or twice the rank.

    Source: Hu et al., "LoRA", arXiv 2106.09685.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"LoRALinear: rank is {rank}, expected 1 or more.")
        self.scale = alpha / rank
        linear.requires_grad_(False)
        self.weight = linear.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", linear.bias)
        dtype, device = linear.weight.dtype, linear.weight.device
        self.down = nn.Parameter(torch.empty(rank, linear.in_features, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as nn.Linear does

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.down), self.up)
        return F.linear(x, self.weight, self.bias) + self.scale * update


def every_linear(name: str, linear: nn.Linear) -> bool:
    return True


def add_lora(
    module: nn.Module, rank: int, alpha: float, select: Callable[[str, nn.Linear], bool] = every_linear
) -> list[str]:
    """Freeze ``module`` and replace its linear layers, in place, by ``LoRALinear``. Call it before ``fully_shard``.

    ``select`` gets the name and the layer, and says whether to adapt it. Only ``nn.Linear`` itself is considered:
    subclasses may read their weight elsewhere. Returns the names of the layers that were replaced.
    """
    module.requires_grad_(False)
    found = [(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Linear and name]
    made = {layer: LoRALinear(layer, rank, alpha) for name, layer in found if select(name, layer)}
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if child in made:
                setattr(owner, name, made[child])
    return [name for name, layer in found if layer in made]


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, for ``dcp.save``, and for ``dcp.load`` to fill: tensors on the same memory."""
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def load_base(model: Transformer, checkpoint: Path) -> None:
    """Fill the unsharded ``model`` from a checkpoint of ``train_lm.py``, whatever number of ranks wrote it."""
    dcp.load({"model": model.state_dict()}, checkpoint_id=checkpoint)


def quantise_and_adapt(model: Transformer, rank: int, alpha: float) -> None:
    """4-bit weights with adapters in the blocks; embedding, norms and head are frozen as they are."""
    model.requires_grad_(False)
    for block in model.blocks:
        wrap_parameters(block, NF4Tensor.quantise)
        add_lora(block, rank, alpha)


def parse(args: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("runs/train_lm"), help="folder of a run of train_lm.py")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the adapters")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--alpha", type=float, default=16.0, help="weight of the adapters, times the rank")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/lora"), help="folder for adapters; replaces those there"
    )
    options = parser.parse_args(args)
    if options.rank < 1:
        parser.error(f"--rank is {options.rank}, expected 1 or more.")
    options.checkpoint = latest_checkpoint(options.base)
    if options.checkpoint is None:
        parser.error(f"--base: {options.base} holds no complete checkpoint. Train one with train_lm.py first.")
    try:
        options.config = config_of_base(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def config_of_base(options: argparse.Namespace) -> Config:
    """The base run's model and data, with our own learning rate and number of steps."""
    found = json.loads((options.base / "config.json").read_text())
    known = {field.name for field in dataclasses.fields(Config)}
    ours = {"steps": options.steps, "lr": options.lr, "runtime": "fsdp2", "weights": "plain", "hsdp": False}
    return Config(**{name: value for name, value in found.items() if name in known} | ours)


def main() -> None:
    options = parse(sys.argv[1:])
    config, checkpoint = options.config, options.checkpoint
    corpus = corpus_for(config)
    device = join_process_group("lora")
    folder = options.output / "adapters"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)

    def show(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    def quantised(model: Transformer) -> None:
        load_base(model, checkpoint)
        quantise_and_adapt(model, options.rank, options.alpha)

    dense = Trainer(config, corpus, device, partial(load_base, checkpoint=checkpoint))
    show(f"base model, {options.base}: validation loss {dense.validate():.4f} nats/byte")
    del dense
    trainer = Trainer(config, corpus, device, quantised)
    show(f"quantised to 4 bits: {trainer.validate():.4f}")
    for step in range(config.steps):
        record = trainer.step(step)
        if (step + 1) % 10 == 0:
            show(f"step {step + 1}: loss {record['loss']:.3f}")
    state = adapter_state(trainer.model)
    dcp.save(state, checkpoint_id=folder)
    show(f"with adapters: {trainer.validate():.4f}")
    show(f"saved {sum(map(Tensor.numel, state.values())) / 1e6:.2f} M parameters of adapters in {folder}")
    leave_process_group()


if __name__ == "__main__":
    main()
