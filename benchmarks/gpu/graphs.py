"""A whole step in a CUDA graph, though units reshard after forward: (8) of ``acceptance.py``.

Forward, backward, the optimizer's step and ``zero_grad`` are captured once and replayed, on other inputs each time.
Losses and parameters must be those of the same steps without a graph, bit for bit. Gathers, reductions and the memory
that comes and goes with them are on streams of their own, so the graph has to hold their order as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import fsdp2
from benchmarks.gpu.checks import BF16, NUM_LATE_RANKS, Values, collectives_of_one_rank, ensure_equal, local
from benchmarks.gpu.device import GATHER, REDUCE, Device, device
from benchmarks.gpu.groups import late_group, real_group
from benchmarks.gpu.subjects import Block, Shape
from benchmarks.gpu.verdicts import Report, attempt, ensure

NUM_BLOCKS, NUM_TOKENS, VOCABULARY = 4, 64, 256
NUM_REPLAYS = {"cuda": 100, "sim": 2}
NUM_WARM = 3  # steps before the capture: plans, lazy states, communicators
SHORT_DELAY = 1_000_000  # cycles: about 0.6 ms, longer than a kernel here


class Language(nn.Module):
    """A small Llama: embedding, blocks, norm and head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(Shape(dim, 4, 2, 3 * dim), has_gains=True) for _ in range(NUM_BLOCKS))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Trained:
    """A sharded model, its optimizer, and one step on inputs that stay in one place.

    Attributes:
        tokens: the inputs, ``[2, NUM_TOKENS]``. The caller writes them before each step.
        loss: of the last step, in memory that stays.
    """

    def __init__(self, on: Device, num_ranks: int) -> None:
        torch.manual_seed(0)
        self._model: Any = Language(on.dim).to(on.type)
        mesh = init_device_mesh(on.type, (num_ranks,))
        for module in (*self._model.layers, self._model):
            fsdp2.fully_shard(module, mesh=mesh, mp_policy=BF16, reshard_after_forward=True)
        # Its step count is on the device, and its kernels are those of lists of tensors.
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, foreach=True, capturable=True)
        self.tokens = torch.zeros(2, NUM_TOKENS, dtype=torch.int64, device=on.type)
        self.loss = torch.zeros((), device=on.type)

    def step(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):  # others add up in another order each time
            logits = self._model(self.tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.loss.copy_(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()

    def values(self) -> Values:
        return {name: local(parameter).detach().cpu() for name, parameter in self._model.named_parameters()}


def graph(report: Report, name: str, case: str) -> None:
    """One of ``CASES``, in a process of its own: a capture that fails may leave the device unusable."""
    on = device(name)
    text, surroundings, num_ranks = CASES[case]
    with surroundings(on):
        attempt(report, text, partial(_check, on, num_ranks))
    if case == "late" and name == "cuda":
        # This check comes last, because a capture that fails leaves its memory pool behind.
        attempt(report, "a stream that has only waited need not be joined", _check_join)


def _check(on: Device, num_ranks: int) -> str:
    num_replays = NUM_REPLAYS[on.type]
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_WARM + num_replays, 2, NUM_TOKENS)
    tokens = torch.randint(VOCABULARY, shape, generator=generator).to(on.type)
    module = torch.get_device_module(on.type)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    # Not the default stream, which cannot be captured; and one for all, as a capture may not wait for others' work.
    with module.stream(stream):
        expected = _losses(Trained(on, num_ranks), tokens, None)
        broken = [text for text, value in expected.items() if not value.isfinite().all()]
        ensure(not broken, f"not finite without a graph: {broken[:3]}")
        ensure(len({value.item() for value in expected.values() if value.dim() == 0}) > 1, "all losses are the same")
        actual = _losses(Trained(on, num_ranks), tokens, on)
        try:
            return f"{num_replays} replays, {ensure_equal(actual, expected)}"
        except AssertionError as error:  # is it the graph's doing?
            again = _losses(Trained(on, num_ranks), tokens, None)
            repeats = all(map(torch.equal, again.values(), expected.values()))
            text = f"{error}; two runs without a graph are {'' if repeats else 'not '}equal"
            raise AssertionError(text) from None


def _losses(trained: Trained, tokens: Tensor, captures: Device | None) -> Values:
    """The losses of all steps and the last parameters. ``captures``: the device on which the steps after those that
    warm up are replays."""
    losses = []
    step: Callable[[], object] = trained.step
    for index, each in enumerate(tokens):
        trained.tokens.copy_(each)
        if index == NUM_WARM and captures is not None:
            captures.finish()
            step = captures.captured(trained.step)
        step()
        losses.append(trained.loss.clone())
    return {f"loss of step {index}": loss.cpu() for index, loss in enumerate(losses)} | trained.values()


def _check_join() -> str:
    """What fsdp2 relies on: after its last gather, the stream of gathers waits for compute once more."""
    on = device("cuda")
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()

    def step() -> None:
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(torch.cuda.Stream()):
        on.captured(step)()
    on.finish()
    ensure(bool((x == 2).all()), f"expected 2, found {x[0].item()}")
    return "CUDA takes it out of the capture"


@contextmanager
def _one_rank(on: Device) -> Iterator[None]:
    with real_group(on), collectives_of_one_rank(on):
        yield


@contextmanager
def _late_ranks(on: Any) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(late_group(NUM_LATE_RANKS, on))
        if on.type == "cuda":
            on.CYCLES = SHORT_DELAY
        on.set_late({GATHER, REDUCE})
        stack.callback(on.set_late, ())
        yield


CASES: dict[str, tuple[str, Callable[[Device], Any], int]] = {
    "nccl": ("bf16, one rank, through the backend's collectives", _one_rank, 1),
    "late": (f"bf16, {NUM_LATE_RANKS} ranks whose data comes late", _late_ranks, NUM_LATE_RANKS),
}
