"""Training a compiled model beside its references, while the compiler's counters are watched.

``aot_eager`` compiles as Inductor does, without generating code: graphs, guards and breaks are the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp2 import FSDPModule
from tests.distributed.support import DIM, Block, batch

BACKEND = "aot_eager"
NUM_STEPS = 5
WARM_UP = 2  # the first step compiles; the second has gradients, momentum and a recorded order of units


class Unrolled(nn.Module):
    """Blocks that are called one by one: in a loop, the compiler gives up on the frame at its first break."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.first, self.second, self.third = block(), block(), block()
        self.exit = nn.Linear(DIM, DIM)

    @property
    def blocks(self) -> list[Any]:
        return [self.first, self.second, self.third]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.entry(x))
        x = self.first(x)
        x = self.second(x)
        x = self.third(x)
        return self.exit(torch.relu(x))


def start_compiling() -> None:
    """Forget what other tests have compiled. For the rest of this test, let torch's own compiler warn of itself."""
    for message in (
        r"The \.grad attribute of a Tensor that is not a leaf",  # it looks at .grad of every tensor it meets
        r"`torch\.jit\.script_method` is deprecated",  # Inductor's imports
        r"<class 'torch\.autograd\.function\.Function'> should not be instantiated",  # it does so, to trace one
    ):
        warnings.filterwarnings("ignore", message=message)
    torch.compiler.reset()
    counters.clear()


def num_graphs() -> int:
    """How many graphs were compiled since ``start_compiling``."""
    return int(counters["stats"]["unique_graphs"])


def breaks() -> list[str]:
    """Why graphs were broken, the first line of each reason."""
    return sorted({reason.partition("\n")[0] for reason in counters["graph_break"]})


def unsupported() -> list[str]:
    """What the compiler could not trace, the first line of each reason; it leaves such frames to Python, or breaks."""
    return sorted({reason.partition("\n")[0] for reason in counters["unimplemented"]})


def train(model: Any, called: Any = None) -> list[Tensor]:
    """Steps of two micro-batches and an evaluation; after the warm-up, compiling anything is an error. Returns all
    outputs. ``called`` is what is run, if that is not ``model``."""
    called = model if called is None else called
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs = []
    for index in range(NUM_STEPS):
        with torch.compiler.set_stance("default" if index < WARM_UP else "fail_on_recompile"):
            for micro in range(2):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(micro == 1)
                output = called(batch(2 * index + micro))
                output.float().square().mean().backward()
                outputs.append(output.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            model.eval()
            with torch.no_grad():
                outputs.append(called(batch(100 + index)))
            model.train()
    return outputs


def assert_alike(outputs: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-5) -> None:
    for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.allclose(ours.float(), theirs.float(), atol=atol, rtol=1e-4), f"output {index}"
