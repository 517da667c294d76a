"""An exponential moving average (EMA) of the weights, kept over the shards: no rank ever has more than its part of it.

    torchrun --nproc-per-node 2 docs/examples/ema.py

``copy.deepcopy`` of a sharded model is a sharded model of its own: the average is one, so it is saved and loaded like
any other. ``fsdp2.weights_of`` lends its weights to the model for an evaluation. An update is local arithmetic on the
shards, without communication. ``AveragedModel`` of ``torch.optim.swa_utils`` works as well, and does the same.

Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import fully_shard

WIDTH = 32


class ShardedEMA:
    """``weights <- decay * weights + (1 - decay) * those of the model``, after each step of the optimizer.

    Args:
        model: sharded; its values are where the average starts.
        decay: the share of the average that stays, between 0 and 1.

    Attributes:
        model: a sharded copy with the averaged weights; its parameters are frozen.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights that ``model`` has now. Buffers are copied as they are."""
        for mine, new in zip(self.model.parameters(), model.parameters(), strict=True):
            _local(mine).lerp_(_local(new), 1 - self._decay)
        for buffer, new_buffer in zip(self.model.buffers(), model.buffers(), strict=True):
            buffer.copy_(new_buffer)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter; the parameter itself where ``fully_shard`` has ignored it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build() -> nn.Sequential:
    """A small network, the same on every rank, each layer a unit."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def loss_of(model: nn.Module, generator: torch.Generator, batch_size: int, noise: float) -> Tensor:
    x = torch.randn(batch_size, 8, generator=generator)
    target = x[:, :2].sum(1, keepdim=True).sin() + noise * torch.randn(batch_size, 1, generator=generator)
    return (model(x) - target).square().mean()


def run(num_steps: int = 300, decay: float = 0.97) -> tuple[float, float]:
    """Train on noisy targets; the losses on clean ones, of the weights and of their average."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    average = ShardedEMA(model, decay)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(num_steps):
        loss_of(model, generator, batch_size=8, noise=1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)

    @torch.no_grad()
    def evaluate() -> float:
        return loss_of(model, torch.Generator().manual_seed(1), batch_size=1024, noise=0.0).item()

    model.eval()
    of_weights = evaluate()
    with fsdp2.weights_of(model, average.model):
        return of_weights, evaluate()


def main() -> None:
    dist.init_process_group("gloo")
    of_weights, of_average = run()
    if dist.get_rank() == 0:
        print(f"loss without noise: weights {of_weights:.4f}, their average {of_average:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
