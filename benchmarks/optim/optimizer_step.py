"""Claim: over 1,500 small parameters, a flattened optimizer's step takes at most a third of the CPU time that the same
optimizer takes over the DTensors of torch's ``fully_shard``.

Rank 0 of 8 with a fake process group; one thread; CPU time of the process, for steps alone. Each group has 15
parameters of 64 x 64 and 64 elements, of which a rank has an eighth, so nearly all time is Python and dispatch.

Beside the peer: the same optimizer over as many plain tensors of the same sizes, which shows what DTensor costs; and
over one plain tensor per group, which is what the flat step cannot get below.

In the second table, one parameter of each group has a gradient in every other step only. So the runs are cut anew in
every step, which is the worst that can happen to the flat one.

    python benchmarks/optim/optimizer_step.py [--params 150 1500] [--profile]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Ratios, Table, medians_in_turns, print_profile, publish, seconds_per_call

NUM_RANKS = 8
WIDTH = 64
PARAMS_PER_GROUP = 15
WARM_UP, STEPS = 3, 3

Make = Callable[[Iterable[Tensor]], optim.Optimizer]


@dataclass(frozen=True)
class Case:
    name: str
    make: Make


CASES = (
    Case("AdamW, foreach", partial(optim.AdamW, foreach=True)),
    Case("AdamW, for-loop", partial(optim.AdamW, foreach=False)),
    Case("AdamW, fused", partial(optim.AdamW, fused=True)),
    Case("SGD with momentum, foreach", partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
)


class Block(nn.Module):
    """Seven matrices with biases, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@contextmanager
def fake_process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(runtime: object, num_params: int) -> nn.Sequential:
    """A model with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(num_params // PARAMS_PER_GROUP)))
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in [*model, model]:
        runtime.fully_shard(module, mesh=mesh)  # type: ignore[attr-defined]
    model(torch.randn(2, WIDTH)).sum().backward()
    return model


def plain(model: nn.Module) -> list[Tensor]:
    """Tensors like the shards of ``model``."""
    return with_gradients([param.to_local().detach().clone() for param in model.parameters()])  # type: ignore[operator]


def one_per_group(model: nn.Sequential) -> list[Tensor]:
    return with_gradients([torch.cat([tensor.view(-1) for tensor in plain(block)]) for block in model])


def with_gradients(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    return tensors


def warm(step: Callable[[], None]) -> Callable[[], float]:
    """CPU seconds per call."""
    for _ in range(WARM_UP):
        step()
    return seconds_per_call(step, STEPS, time.process_time)


@dataclass(frozen=True)
class Models:
    """The same under both runtimes."""

    num_params: int
    ours: nn.Sequential
    theirs: nn.Sequential

    def flat(self, case: Case) -> optim.Optimizer:
        return fsdp2.optim.flatten_optimizer(case.make(self.ours.parameters()))

    def row(self, case: Case, measures: dict[str, Callable[[], float]], rounds: int) -> list[object]:
        seconds = medians_in_turns(measures, rounds)
        ratio = seconds["flat"] / seconds["torch"]
        return [f"{case.name}, {self.num_params} parameters", *(value * 1e3 for value in seconds.values()), ratio]


def steady_row(case: Case, models: Models, rounds: int) -> list[object]:
    optimizers = {
        "flat": models.flat(case),
        "torch": case.make(models.theirs.parameters()),
        "plain": case.make(plain(models.ours)),
        "one per group": case.make(one_per_group(models.ours)),
    }
    return models.row(case, {name: warm(each.step) for name, each in optimizers.items()}, rounds)


def changing_row(case: Case, models: Models, rounds: int) -> list[object]:
    optimizers = {"flat": models.flat(case), "torch": case.make(models.theirs.parameters())}
    measures = {}
    for model, (name, optimizer) in zip((models.ours, models.theirs), optimizers.items(), strict=True):
        toggled = [(block.layers[3].weight, block.layers[3].weight.grad) for block in model]
        measures[name] = warm(partial(changing_step, optimizer, toggled))
    return models.row(case, measures, rounds)


def changing_step(optimizer: optim.Optimizer, toggled: list[tuple[Tensor, Tensor]]) -> None:
    for param, grad in toggled:
        param.grad = grad if param.grad is None else None
    optimizer.step()


def profile(case: Case, num_params: int) -> None:
    """Where the Python of the flat step goes."""
    step = fsdp2.optim.flatten_optimizer(case.make(sharded(fsdp2, num_params).parameters())).step
    warm(step)
    print_profile(step, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, nargs="+", default=[150, 1500])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where our Python goes in the first case instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_process_group():
        if options.profile:
            profile(CASES[0], options.params[-1])
            return
        models = [Models(number, sharded(fsdp2, number), sharded(peer, number)) for number in options.params]
        steady = [steady_row(case, each, options.rounds) for case in CASES for each in models]
        changing = [changing_row(CASES[0], each, options.rounds) for each in models]
    columns = ["", "fsdp2 flat ms", "torch FSDP2 ms", "plain tensors ms", "one per group ms", "ratio"]
    tables = [
        Table("steady", "CPU time of a step", columns, steady, noise=0.15, plot=Ratios(aim=0.2)),
        Table("changing", "One gradient per group comes and goes", [*columns[:3], "ratio"], changing, noise=0.2),
    ]
    publish("optim/optimizer_step", f"Optimizer steps in groups of {PARAMS_PER_GROUP} parameters, rank 0 of 8", tables)


if __name__ == "__main__":
    main()
