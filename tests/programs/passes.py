"""Programs of passes, with changes between a forward and its backward: the sharded model beside the plain one.

``python -m tests.programs --passes`` runs them. Losses and ``requires_grad`` are compared after each operation,
gradients at each step. Torch's runtime does not follow most of these changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2
from tests.harness.distributed import RankContext
from tests.harness.models import MLP
from tests.harness.runtimes import quietly_installed

DIM = 6
UNITS = "fully_shard"
INSTALLED = "install"
WAYS = (UNITS, UNITS, UNITS, INSTALLED, "FSDP1 SHARD_GRAD_OP", "FSDP1 FULL_SHARD", "FSDP1 FULL_SHARD, one wrapper")


OPTIMIZERS = (
    *("SGD", "SGD", "AdamW, flat", "HostAdamW", "HostAdamW, overlap", "HostAdamW, clipped"),
    *("Muon", "Muon, in backward"),
)
ADAMW = {"lr": 1e-2, "eps": 1e-3}  # eps is well above the rounding noise of a gradient
MAX_NORM = 0.05
NEAR, NEAR_OF_OTHERS = 1e-5, 1e-3  # others than SGD divide by what a gradient was; a step of theirs is 1e-2


class Block(nn.Module):
    """A layer with two adapters, one of which is active; ``train()`` adds a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.adapters = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.in_training = nn.Linear(DIM, DIM, bias=False)
        self.gain = nn.Parameter(torch.full((DIM,), 1.1))
        self.active: int | None = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.active is not None:
            y = y + self.adapters[self.active](x)
        if self.training:
            y = y + self.in_training(x)
        return x + torch.tanh(y * self.gain)


def _model(num_blocks: int) -> MLP:
    model = MLP(0, DIM)
    model.blocks.extend(Block() for _ in range(num_blocks))
    return model


class Head(nn.Module):
    """A root around the model."""

    def __init__(self, trunk: MLP) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(trunk.exit.out_features, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


# What a change is about: the parameters whose names contain one of these.
PARTS = {
    "everything": ("",),
    "all but the exit": ("entry", "blocks"),
    "the root's": ("entry", "exit"),
    "a unit": ("blocks.0.",),
    "adapters": ("adapters",),
    "one adapter": ("adapters.1",),
    "base": ("base", "gain", "entry", "exit"),
    "a parameter": ("blocks.0.gain",),
}


@dataclass(frozen=True)
class Passes:
    """A program."""

    way: str
    reshards: tuple[bool | str | None, ...]  # reshard_after_forward of each block; "no unit" if it belongs to the root
    root: bool | None  # reshard_after_forward of the root
    by_hand: bool  # flags are set on the parameters that were listed before the first pass, not on those bound
    operations: tuple[tuple[Any, ...], ...]  # each the name of a method of Side, and its arguments
    optimizer: str = "SGD"  # one of OPTIMIZERS
    roots: str = "one"  # or "nested": the model and a head around it; or "heads": two, as an actor's and a critic's


def draw(seed: int) -> Passes:
    pick = random.Random(seed)
    operations: list[tuple[Any, ...]] = []

    def change() -> tuple[Any, ...]:
        part = pick.choice(list(PARTS))
        return pick.choice(
            [
                *[("freeze", part), ("thaw", part)] * 2,
                *[("reference", part)] * 3,
                ("evaluate", "no_grad"),
                ("evaluate", "inference_mode"),
                ("there_and_back", part),
                ("use_adapter", pick.choice([0, 1, None]), pick.random() < 0.5),
                ("train", pick.random() < 0.5),
                ("forward_in_vain",),
                ("control", pick.choice(["reshard", "unshard"])),
            ]
        )

    def changes(most: int) -> None:
        operations.extend(change() for _ in range(pick.randint(0, most)))

    for _ in range(pick.randint(1, 3)):
        for _ in range(pick.randint(1, 3)):
            num_forwards = pick.choice([1, 1, 1, 2])
            for _ in range(num_forwards):
                changes(2)
                operations.append(("forward",))
            for _ in range(num_forwards):
                changes(4)
                operations.append(("backward", pick.random() < 0.75))
        changes(1)
        # A step needs a backward that communicates.
        operations += [("thaw", "everything"), ("forward",), ("backward", True), ("step",)]
    program = Passes(
        way=pick.choice(WAYS),
        reshards=tuple(pick.choice([None, True, False, False, "no unit"]) for _ in range(pick.randint(1, 3))),
        root=pick.choice([None, None, True, False]),
        by_hand=pick.random() < 0.3,
        operations=tuple(operations),
    )
    if program.way == UNITS:
        program = _with_optimizer(program, pick)
        return _of_two_roots(program, pick) if pick.random() < 0.5 else program
    return program


def _with_optimizer(program: Passes, pick: random.Random) -> Passes:
    """A step and the last backward before it are one operation: some optimizers begin in backward."""
    operations: list[tuple[Any, ...]] = []
    for operation in program.operations:
        if operation[0] == "step":
            del operations[-2:]  # a forward and its backward
            operation = ("step_after", 0)
        operations.append(operation)
    return replace(program, optimizer=pick.choice(OPTIMIZERS), operations=(*operations, ("values",)))


def _of_two_roots(program: Passes, pick: random.Random) -> Passes:
    """Both take part by turns, and raise now and then. Whether backwards reduce is set apart from them, so that the
    other root may run in between."""
    operations: list[tuple[Any, ...]] = []
    for operation in program.operations:
        operations += [("reduces", pick.random() < 0.5)] * (pick.random() < 0.2)
        operations += [("turn_to", pick.randrange(2))] * (pick.random() < 0.4)
        operations += [("forward_raises",)] * (pick.random() < 0.05)
        if operation[0] == "step_after":
            operation = ("step_after", *pick.sample([0, 1], 2))
        operations.append(("backward", True) if operation[0] == "backward" else operation)
    # An optimizer that begins in backward would begin in that of the first root.
    optimizer = "SGD" if _begins_in_backward(program.optimizer) else program.optimizer
    roots = pick.choice(["nested", "heads"])
    return replace(program, roots=roots, optimizer=optimizer, operations=tuple(operations))


def _begins_in_backward(optimizer: str) -> bool:
    return optimizer.startswith("HostAdamW") or optimizer == "Muon, in backward"


class Side:
    """The plain model and what a program does with it."""

    def __init__(self, program: Passes, rank: int) -> None:
        torch.manual_seed(0)
        trunk = self.sharded(_model(len(program.reshards)), program)
        heads = [self.sharded_head(Head(trunk)) for _ in range({"one": 0, "nested": 1, "heads": 2}[program.roots])]
        self.model: Any = nn.ModuleList(heads) if heads else trunk
        self.roots: list[Any] = heads if len(heads) == 2 else [trunk, *heads]
        self.root = self.roots[-1]
        self.blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        self.listed = dict(_named(self.model))
        self._by_hand, self._rank = program.by_hand, rank
        self._kind = program.optimizer
        self._optimizer = self.optimizer(list(self.model.parameters()))
        self._losses: list[Tensor] = []
        self._num_batches = 0

    def sharded(self, model: MLP, program: Passes) -> nn.Module:
        return model

    def sharded_head(self, head: Head) -> Head:
        return head

    @contextmanager
    def accumulating(self, communicates: bool) -> Iterator[None]:
        yield

    def gradients(self) -> dict[str, Tensor | None]:
        """Averaged over the ranks."""
        for param in self.listed.values():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        return {name: None if param.grad is None else param.grad.clone() for name, param in self.listed.items()}

    def values(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.listed.items()}

    def optimizer(self, params: list[nn.Parameter]) -> Any:
        if self._kind == "SGD":
            return torch.optim.SGD(params, lr=0.1)
        if not self._kind.startswith("Muon"):
            return torch.optim.AdamW(params, **ADAMW)
        matrices, others = (
            [param for param in params if (param.ndim == 2) is is_matrix] for is_matrix in (True, False)
        )
        return _Both(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, **ADAMW))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the last backward before a step."""
        yield

    def control(self, method: str) -> None:
        """Only a sharded model has it."""

    def reduces(self, enabled: bool) -> None:
        """Whether backwards from now on communicate."""

    # Operations. What they return is compared.

    def forward(self) -> Tensor:
        self._losses.append(self._output().square().mean())
        return self._losses[-1].detach().clone()

    def forward_in_vain(self) -> Tensor:
        return self._output().detach().clone()

    def forward_raises(self) -> None:
        def fail(*_: object) -> None:
            raise InterruptedError

        handle = self.blocks[-1].register_forward_hook(fail)
        with suppress(InterruptedError):
            self._output()
        handle.remove()

    def turn_to(self, root: int) -> None:
        """What comes next is about this root."""
        self.root = self.roots[root]

    def evaluate(self, mode: str) -> list[float]:
        with getattr(torch, mode)():
            return self._output().flatten().tolist()

    def backward(self, communicates: bool) -> bool:
        loss = self._losses.pop()
        if loss.requires_grad:
            with self.accumulating(communicates):
                loss.backward()
        return loss.requires_grad

    def step(self) -> dict[str, Tensor | None]:
        gradients = self.gradients()
        self.apply()
        return gradients

    def apply(self) -> None:
        if "clipped" in self._kind:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):  # torch's Muon rounds what the other one need not
            self._optimizer.step()
        self._optimizer.zero_grad()

    def step_after(self, *roots: int) -> Mapping[str, Tensor | None] | None:
        """A forward and a backward that reduces of each of ``roots``, and a step."""
        self.reduces(True)
        for index, root in enumerate(roots):
            self.turn_to(root)
            self.forward()
            with self.stepping() if index == len(roots) - 1 else nullcontext():
                self.backward(True)
        if self._kind == "SGD":
            return self.step()
        self.gradients()
        self.apply()
        return None if "overlap" in self._kind else self.values()

    def freeze(self, part: str) -> None:
        for param in self._of(part).values():
            param.requires_grad_(False)

    def thaw(self, part: str) -> None:
        for param in self._of(part).values():
            param.requires_grad_(True)

    def reference(self, part: str) -> list[float]:
        """What peft's ``disable_adapter()`` does around a reference forward."""
        with self._restored(part):
            self.freeze(part)
            return self.evaluate("no_grad")

    def there_and_back(self, part: str) -> None:
        with self._restored(part):
            self.freeze(part)
            self.thaw(part)

    def use_adapter(self, index: int | None, trains_only_it: bool) -> None:
        for block in self.blocks:
            block.active = index
        if trains_only_it and index is not None:
            self.freeze("adapters")
            for name, param in self._of("adapters").items():
                param.requires_grad_(f"adapters.{index}" in name)

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def flags(self) -> dict[str, bool]:
        return {name: param.requires_grad for name, param in _named(self.model)}

    def _output(self) -> Tensor:
        self._num_batches += 1
        generator = torch.Generator().manual_seed(1000 * self._num_batches + self._rank)
        return self.root(torch.randn(5, DIM, generator=generator))

    def _of(self, part: str) -> dict[str, nn.Parameter]:
        named = self.listed if self._by_hand else dict(_named(self.model))
        return {name: param for name, param in named.items() if any(each in name for each in PARTS[part])}

    @contextmanager
    def _restored(self, part: str) -> Iterator[None]:
        before = {name: param.requires_grad for name, param in self._of(part).items()}
        yield
        for name, param in self._of(part).items():
            param.requires_grad_(before[name])


class _Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()


class ShardedSide(Side):
    """The sharded model."""

    def sharded(self, model: MLP, program: Passes) -> nn.Module:
        self._is_fsdp1 = program.way.startswith("FSDP1")
        if self._is_fsdp1:
            return _wrapped(model, program.way)
        with _fully_shard(program.way) as fully_shard:
            for block, reshard in zip(model.blocks, program.reshards, strict=True):
                if reshard != "no unit":
                    fully_shard(block, reshard_after_forward=reshard)
            return fully_shard(model, reshard_after_forward=program.root)

    def sharded_head(self, head: Head) -> Head:
        return fsdp2.fully_shard(head)

    @contextmanager
    def accumulating(self, communicates: bool) -> Iterator[None]:
        if communicates:
            yield
        elif self._is_fsdp1:
            with self.model.no_sync():
                yield
        else:
            self.reduces(False)
            yield
            self.reduces(True)

    def reduces(self, enabled: bool) -> None:
        for root in self.roots:
            root.set_requires_gradient_sync(enabled)

    def gradients(self) -> dict[str, Tensor | None]:
        whole = {n: None if p.grad is None else p.grad.full_tensor() for n, p in self.listed.items()}
        if self._is_fsdp1:  # a wrapper has gradients for all of its parameters, or for none
            return {n: None if value is None or not value.any() else value for n, value in whole.items()}
        return whole

    def values(self) -> dict[str, Tensor]:
        if "overlap" in self._kind:
            self._optimizer.wait()
        return {name: param.detach().full_tensor() for name, param in self.listed.items()}

    def optimizer(self, params: list[nn.Parameter]) -> Any:
        if _begins_in_backward(self._kind):
            self.model.set_is_last_backward(False)
        if self._kind == "AdamW, flat":
            return fsdp2.optim.flatten_optimizer(super().optimizer(params))
        if self._kind.startswith("HostAdamW"):
            max_norm = MAX_NORM if "clipped" in self._kind else None
            return fsdp2.optim.HostAdamW(params, **ADAMW, max_norm=max_norm, overlap_forward="overlap" in self._kind)
        if self._kind.startswith("Muon"):
            matrices, others = ([each for each in params if (each.ndim == 2) is flag] for flag in (True, False))
            groups = [{"params": matrices, "lr": 1e-2}, {"params": others, "use_muon": False, **ADAMW}]
            return fsdp2.optim.Muon(groups, ns_dtype=torch.float32)
        return super().optimizer(params)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        if not _begins_in_backward(self._kind):
            yield
            return
        self.model.set_is_last_backward(True)
        with self._optimizer.overlap_backward() if self._kind == "Muon, in backward" else nullcontext():
            yield
        self.model.set_is_last_backward(False)

    def apply(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def control(self, method: str) -> None:
        if not self._is_fsdp1:
            getattr(self.root, method)()


def _wrapped(model: MLP, way: str) -> nn.Module:
    strategy = ShardingStrategy.SHARD_GRAD_OP if "SHARD_GRAD_OP" in way else ShardingStrategy.FULL_SHARD
    policy = None if "one wrapper" in way else ModuleWrapPolicy({Block})
    return fsdp2.FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=torch.get_default_device(),
    )


@contextmanager
def _fully_shard(way: str) -> Iterator[Callable[..., Any]]:
    """The function by the name that a program uses: ours, or torch's where ours was installed."""
    if way == UNITS:
        yield fsdp2.fully_shard
        return
    with quietly_installed():
        yield torch.distributed.fsdp.fully_shard


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in model.named_parameters():
        yield name.replace("_fsdp_wrapped_module.", ""), param


def difference(program: Passes, rank: int) -> str | None:
    """The first difference between the sharded and the plain model; None if there is none. Collective."""
    plain, sharded = Side(program, rank), ShardedSide(program, rank)
    for index, (name, *given) in enumerate(program.operations):
        expected, found = getattr(plain, name)(*given), getattr(sharded, name)(*given)
        what = _unequal(found, expected, NEAR if program.optimizer == "SGD" else NEAR_OF_OTHERS)
        # Parameters that were listed before, and those that are bound, agree when a forward comes.
        agree = program.roots == "one" and name in ("forward", "evaluate")
        if what is None and (agree or not program.by_hand):
            what = _unequal(sharded.flags(), plain.flags(), NEAR)
        if what is not None:
            return f"after operation {index}, {name}{tuple(given)}: {what}"
    return None


def _unequal(found: Any, expected: Any, near: float) -> str | None:
    if isinstance(expected, dict):
        said = {name: _unequal(found[name], expected[name], near) for name in expected}
        return next((f"{name}: {what}" for name, what in said.items() if what is not None), None)
    if isinstance(expected, (Tensor, list)) and found is not None:
        far = (torch.as_tensor(found) - torch.as_tensor(expected)).abs().max().item()
        return None if far < near else f"{far} apart"
    return None if found is expected else f"{_brief(found)}, expected {_brief(expected)}"


def _brief(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def check(ctx: RankContext, seeds: range) -> dict[int, str]:
    """What a pool of ranks runs: the seeds whose programs differ, how, and the shortest such program."""
    found = {}
    for seed in seeds:
        if difference(draw(seed), ctx.rank) is not None:
            program = shortened(draw(seed), ctx.rank)
            found[seed] = f"{difference(program, ctx.rank)}\n    {program}"
    return found


def shortened(program: Passes, rank: int) -> Passes:
    """The program without the operations that it does not need to differ. Collective."""
    for index in reversed(range(len(program.operations))):
        operations = program.operations[:index] + program.operations[index + 1 :]
        shorter = replace(program, operations=operations)
        try:
            differs = difference(shorter, rank) is not None
        except (IndexError, RuntimeError):  # a backward without its forward
            differs = False
        if differs:
            program = shorter
    return program
