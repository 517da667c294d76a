"""A flattened optimizer steps, keeps, saves and loads as torch made it, bit for bit; what it steps as one tensor, and
what is refused, in ``golden/flat_optimizer.txt``."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2.optim.flat_optimizer import COPY_MAX_NBYTES, ELEMENTWISE, cut_runs, flat_buffers, spanned
from tests.distributed.support import InjectedError, Stack, seeded, shard, step as stack_step
from tests.harness.comms import direct_from
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.models import DIM, MLP, ParityModel, PartlyUsed, Uneven, freeze
from tests.harness.offload import shard_offloaded
from tests.harness.runtimes import Runtime, subject
from tests.harness.selection import long
from tests.harness.training import (
    EXACT,
    Step,
    Tolerance,
    one_backward,
    shard_units_and_root,
    sharded as shard_with,
    snapshot,
)
from tests.parity.setups import Setup

TEXTS = texts_beside(__file__)
Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": functools.partial(optim.SGD, lr=0.05),
    "SGD with momentum": functools.partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": functools.partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": functools.partial(optim.AdamW, lr=0.01, maximize=True),
    "AdamW with amsgrad": functools.partial(optim.AdamW, lr=0.01, amsgrad=True),
    "Adamax": functools.partial(optim.Adamax, weight_decay=0.1),
    "NAdam": functools.partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": functools.partial(optim.RAdam, lr=0.01),
    "Adagrad": functools.partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": functools.partial(optim.Adadelta, weight_decay=0.1),
    "RMSprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": functools.partial(optim.ASGD, t0=1),
}

adamw = functools.partial(optim.AdamW, lr=0.01)

Shards = Callable[..., Any]


class Mixed(PartlyUsed):
    """Blocks with a path that may go unused, a frozen parameter between others, uneven and empty shards."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(1))
            block.register_forward_hook(lambda block, args, output: output * block.scale)
        self.exit = nn.Linear(DIM, 7)
        freeze(self, "blocks.1.main.bias")

    def forward(self, x: Tensor, use_side: bool = True) -> Tensor:
        return self.exit(super().forward(x, use_side=use_side))


def sharded(ctx: RankContext, build: Callable[[], ParityModel], shard: Shards = shard_units_and_root) -> Any:
    return Setup(build, shard=shard).sharded(subject(), ctx)


class Twins:
    """Models ``plain`` and ``flat``, and their optimizers. ``step`` does the same with both and compares."""

    tolerance = EXACT

    def __init__(
        self, ctx: RankContext, build: Callable[[], ParityModel], make: Make, shard: Shards = shard_units_and_root
    ) -> None:
        self._rank = ctx.rank
        self.plain, self.flat = (sharded(ctx, build, shard) for _ in range(2))
        self.plain_optimizer = make(self.plain.parameters())
        self.flat_optimizer = fsdp2.optim.flatten_optimizer(make(self.flat.parameters()))
        self.index = 0

    @property
    def both(self) -> tuple[tuple[Any, optim.Optimizer], tuple[Any, optim.Optimizer]]:
        return (self.plain, self.plain_optimizer), (self.flat, self.flat_optimizer)

    def backward(self, micro: int = 0, **kwargs: Any) -> None:
        step = Step(self.index, self._rank, None)
        for model, _ in self.both:
            step.loss(model, micro, **kwargs).backward()

    def update(self) -> None:
        """Let the optimizers step, and compare what they made."""
        self.index += 1
        for _, optimizer in self.both:
            optimizer.step()
        self.compare()
        for _, optimizer in self.both:
            optimizer.zero_grad()

    def step(self, **kwargs: Any) -> None:
        self.backward(**kwargs)
        self.update()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def memory(self) -> list[int]:
        """Where states of the flat optimizer lie."""
        return [entry["exp_avg"].to_local().data_ptr() for entry in self.flat_optimizer.state.values()]

    def compare(self) -> None:
        plain, flat = (
            {"parameters": records(dict(model.named_parameters())), "optimizer": records(optimizer.state_dict())}
            for model, optimizer in self.both
        )
        compare_values(f"step {self.index}", flat, plain, self.tolerance)


def records(state: Any) -> Any:
    """``state`` with copies of its tensors and how they lie."""
    return pytree.tree_map_only(Tensor, snapshot, state)


class Seen(optim.Optimizer):
    """Adds ``lr`` to every element, and writes down how many elements the tensors have that it is given, and where
    their gradients lie."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.numels: list[int] = []
        self.grad_addresses: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.numels = [param.numel() for param in params]
        self.grad_addresses = [param.grad.data_ptr() for param in params]  # type: ignore[union-attr]
        for param in params:
            self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
            param.add_(self.param_groups[0]["lr"])


def seen_steps(model: nn.Module) -> Seen:
    return fsdp2.optim.flatten_optimizer(Seen(model.parameters()), is_elementwise=True)


# Values


SOME = "SGD with momentum", "AdamW with amsgrad", "Adagrad", "ASGD"


@pytest.mark.ci
@pytest.mark.parametrize("name", [*SOME, *long(*(name for name in OPTIMIZERS if name not in SOME))])
@distributed(2)
def test_every_known_optimizer_makes_the_same_values_and_states(ctx: RankContext, name: str) -> None:
    """With foreach; the loops, which are the default on the CPU, are what other tests run."""
    twins = Twins(ctx, Mixed, functools.partial(OPTIMIZERS[name], foreach=True))
    schedulers = [optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for _, optimizer in twins.both]
    twins.step()
    twins.step(use_side=False)  # from here on, states of neighbours differ
    twins.backward()
    twins.backward(micro=1)
    for model, _ in twins.both:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    twins.update()
    for scheduler in schedulers:
        scheduler.step()
    twins.step()


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@distributed(2)
def test_rprop_which_torch_cannot_step_dtensors_with(ctx: RankContext, foreach: bool) -> None:
    model = sharded(ctx, Mixed)
    copies = [param.to_local().detach().clone() for param in model.parameters()]
    flat = fsdp2.optim.flatten_optimizer(optim.Rprop(model.parameters(), foreach=foreach))
    plain = optim.Rprop(copies, foreach=foreach)
    for index in range(3):
        model(torch.randn(3, DIM)).square().mean().backward()
        for param, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = param.grad.to_local().clone() if param.grad is not None else None
        flat.step()
        plain.step()
        flat.zero_grad()
        for param, copied in zip(model.parameters(), copies, strict=True):
            mine = {name: getattr(each, "_local_tensor", each) for name, each in flat.state.get(param, {}).items()}
            found = {"value": param.to_local().detach(), **mine}
            compare_values(f"step {index}", found, {"value": copied, **plain.state.get(copied, {})})


def _shard_with_other_gradients(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
    for parameter in model.to(torch.bfloat16).parameters():
        parameter.grad_dtype = torch.float32
    shard_units_and_root(runtime, model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDED: dict[str, Any] = {
    "usual": shard_units_and_root,
    "mixed precision": shard_with(mp_policy=MIXED),
    "along last dims": shard_with(shard_placement_fn=lambda param: Shard(param.dim() - 1)),
    "gradients of another dtype": _shard_with_other_gradients,
    "offloaded": shard_offloaded,
    "ignored": lambda runtime, model, mesh: shard_units_and_root(
        runtime, model, mesh, ignored_params={model.blocks[0].up.weight, model.exit.bias}
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", list(SHARDED))
@distributed(2)
def test_same_values_however_the_model_is_sharded(ctx: RankContext, name: str) -> None:
    with direct_from(512):
        make = OPTIMIZERS["SGD with momentum"] if name == "gradients of another dtype" else adamw  # or torch raises
        Twins(ctx, MLP, make, SHARDED[name]).steps(3)


@distributed(2)
def test_fused_on_the_cpu_makes_the_same_values_to_rounding(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, functools.partial(optim.Adam, lr=0.01, fused=True))
    twins.tolerance = Tolerance(rtol=1e-5, atol=1e-6)
    twins.steps(3)


@distributed(2)
def test_param_groups_keep_their_own_hyperparameters(ctx: RankContext) -> None:
    def make(parameters: Any) -> optim.Optimizer:
        parameters = list(parameters)
        decayed = [param for param in parameters[:-2] if param.dim() > 1]
        others = [param for param in parameters[:-2] if param.dim() <= 1]
        return optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.1}], lr=0.01)

    twins = Twins(ctx, MLP, make)
    twins.step()
    for _, optimizer in twins.both:
        optimizer.param_groups[1]["betas"] = (0.5, 0.6)
        optimizer.param_groups[0]["lr"] = 0.2
    twins.step()
    for model, optimizer in twins.both:
        optimizer.add_param_group({"params": list(model.parameters())[-2:], "lr": 0.05})
    twins.step()


@pytest.mark.ci
@distributed(4)
def test_gradients_of_other_kinds_are_stepped_as_torch_does(ctx: RankContext) -> None:
    """One on no axis of the parameter's, one that is a pending sum, one elsewhere, one transposed in memory."""
    mesh = ctx.mesh_2d(2, 2)
    twins = Twins(ctx, MLP, adamw, lambda runtime, model, _: shard_units_and_root(runtime, model, mesh))
    for _ in range(2):
        twins.backward()
        for model, _ in twins.both:
            first, second, third, fourth, *_ = (param for param in model.parameters() if param.dim() == 2)
            first.grad = first.grad.redistribute(placements=[Replicate(), Replicate()])
            second.grad = DTensor.from_local(second.grad.to_local(), mesh, [Partial(), Shard(0)])
            third.grad = third.grad.clone()
            transposed = fourth.grad.to_local().t().contiguous().t()
            fourth.grad = DTensor.from_local(transposed, mesh, fourth.placements)
        twins.update()


@distributed(2)
def test_closures_hooks_and_returned_losses_are_torchs(ctx: RankContext) -> None:
    model = sharded(ctx, MLP)
    optimizer = fsdp2.optim.flatten_optimizer(adamw(model.parameters()))
    parameters = list(model.parameters())
    events: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    optimizer.register_step_post_hook(lambda found, *_: events.append(found.param_groups[0]["params"] == parameters))

    def closure() -> Tensor:
        events.append("closure")
        optimizer.zero_grad()
        return one_backward(Step(0, ctx.rank, None), model)[0]

    assert len({optimizer.step(closure).item() for _ in range(3)}) == 3
    assert events == ["pre", "closure", True] * 3


class Failing(Seen):
    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.fails:
            raise InjectedError


@distributed(2)
def test_a_step_that_raises_leaves_the_parameters_in_place(ctx: RankContext) -> None:
    model = sharded(ctx, MLP)
    optimizer = fsdp2.optim.flatten_optimizer(Failing(model.parameters()), is_elementwise=True)
    parameters = list(model.parameters())
    for optimizer.fails in (False, True, False):
        model(torch.ones(2, DIM)).sum().backward()
        with pytest.raises(InjectedError) if optimizer.fails else nullcontext():
            optimizer.step()
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, parameters))
        assert set(optimizer.state) == set(parameters)
        optimizer.zero_grad()


# States


@pytest.mark.parametrize("make", [adamw, *long(OPTIMIZERS["SGD with momentum"], OPTIMIZERS["Adagrad"])])
@distributed(2)
def test_state_dicts_load_into_each_other(ctx: RankContext, make: Any) -> None:
    twins = Twins(ctx, Mixed, make)
    twins.step()
    twins.step(use_side=False)
    for source, target in ((0, 1), (1, 0), (1, 1)):  # into the flat one, out of it, back into itself
        (_, saved), (_, loaded) = twins.both[source], twins.both[target]
        state = copy.deepcopy(saved.state_dict())
        twins.step()
        states = twins.flat_optimizer.state.values()
        held = [each for entry in states for each in entry.values() if isinstance(each, DTensor)]
        replaced = [weakref.ref(part) for each in held for part in (each, each.to_local())]
        del states, held
        for _, optimizer in twins.both:
            optimizer.load_state_dict(copy.deepcopy(state))
        gc.collect()
        assert loaded.state
        assert not any(ref() is not None for ref in replaced)  # what there was is freed
        twins.steps(2)


@distributed(2)
def test_parameters_may_move_be_swapped_or_given_hooks(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    twins.backward()
    for model, _ in twins.both:
        swapped = model.blocks[1].down.weight
        grad, swapped.grad = swapped.grad, None
        torch.utils.swap_tensors(swapped, nn.Parameter(swapped.detach() * 2))
        swapped.grad = grad
    twins.update()
    for model, _ in twins.both:
        state = copy.deepcopy(model.state_dict())
        model.to_empty(device=next(model.parameters()).device)
        model.load_state_dict(state)
    memory = twins.memory()
    twins.steps(2)
    assert twins.memory() == memory  # the states were not copied
    for model, _ in twins.both:
        for param in model.blocks[0].parameters():
            _give_hooks(param)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # after which hooks are looked for
    twins.step()


def _give_hooks(param: nn.Parameter) -> None:
    """Hooks that send the shard as it is."""
    local = param._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local.detach(),), None)
    local.fsdp_post_all_gather = lambda outputs, *_, out=None: None if out is not None else (outputs[0], outputs)


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda entry: entry["step"].add_(3),
    lambda entry: entry.update(exp_avg=entry["exp_avg"] * 2),
    lambda entry: entry["exp_avg_sq"].mul_(4),
    lambda entry: entry.clear(),
]


@distributed(2)
def test_states_that_the_user_changes_are_used(ctx: RankContext) -> None:
    twins = Twins(ctx, MLP, adamw)
    twins.step()
    for change in CHANGES:
        for model, optimizer in twins.both:
            change(optimizer.state[model.blocks[1].up.weight])
        twins.step()
        for _, optimizer in twins.both:  # so that states are alike again
            for entry in optimizer.state.values():
                entry["step"].fill_(9)
        twins.step()


# What is stepped as one


@distributed(2)
def test_a_group_is_stepped_as_one_tensor_where_its_gradients_are(ctx: RankContext) -> None:
    """Somebody holds them, so they are other tensors in every step."""
    model = shard(ctx, seeded(Stack))
    optimizer = seen_steps(model)
    held: list[DTensor] = []
    memory: list[list[int]] = []
    block = (32 * 32 + 32) // 2
    for _ in range(3):
        optimizer.zero_grad()
        stack_step(model)
        grads = [param.grad for param in model.parameters()]
        held += grads
        optimizer.step()
        assert sorted(optimizer.numels) == [block, block, block, 2 * block]
        assert set(optimizer.grad_addresses) <= {grad.to_local().data_ptr() for grad in grads}  # not copied
        memory.append([optimizer.state[param]["sum"].to_local().data_ptr() for param in model.parameters()])
        weight, bias = (optimizer.state[param]["sum"] for param in model.blocks[0].parameters())
        assert type(weight) is type(bias) is DTensor
        assert weight.to_local().data_ptr() + weight.to_local().nbytes == bias.to_local().data_ptr()
    assert len({grad.to_local().data_ptr() for grad in held}) == len(held)
    assert memory[0] == memory[1] == memory[2]


@distributed(2)
def test_runs_follow_the_gradients_there_are(ctx: RankContext) -> None:
    """One run per group; parts of it around a missing gradient; one again when it is there. States are not copied."""
    model = sharded(ctx, MLP, lambda runtime, model, mesh: runtime.fully_shard(model, mesh=mesh))
    optimizer = seen_steps(model)
    parameters = list(model.parameters())
    whole = sum(param.to_local().numel() for param in parameters)
    missing = model.blocks[1].up.weight
    sums = {param: torch.zeros_like(param) for param in parameters}

    def numels_of_step(change: Callable[[], object] = lambda: None) -> list[int]:
        model(torch.ones(2, DIM)).sum().backward()
        change()
        optimizer.step()
        for param in parameters:
            if param.grad is not None:
                sums[param] += param.grad
            assert torch.equal(optimizer.state[param]["sum"].to_local(), sums[param].to_local())
        optimizer.zero_grad()
        return optimizer.numels

    assert numels_of_step() == [whole]
    memory = [optimizer.state[param]["sum"].to_local().data_ptr() for param in parameters]
    parts = numels_of_step(lambda: setattr(missing, "grad", None))
    assert (len(parts), sum(parts)) == (2, whole - missing.to_local().numel())
    assert numels_of_step() == [whole]
    assert numels_of_step(lambda: setattr(missing, "grad", missing.grad * 2)) == [whole]
    assert [optimizer.state[param]["sum"].to_local().data_ptr() for param in parameters] == memory
    optimizer.state.clear()
    for value in sums.values():
        value.zero_()
    assert numels_of_step() == [whole]


@distributed(2)
def test_large_gradients_that_lie_apart_are_not_copied(ctx: RankContext) -> None:
    with direct_from(512 * 1024):  # the biases lie between the weights
        model = fsdp2.fully_shard(
            seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))), mesh=ctx.mesh_1d()
        )
    optimizer = seen_steps(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert sorted(optimizer.numels) == 3 * [128] + 3 * [256 * 128]


@distributed(4)
def test_padding_between_shards_stays_zero(ctx: RankContext) -> None:
    before = {id(flat) for flat in flat_buffers()}
    with direct_from(16):
        model = sharded(ctx, Uneven)
        optimizer = seen_steps(model)
        for _ in range(2):
            model.loss(model(torch.ones(2, 5)), ()).backward()
            optimizer.step()
    flats = [flat for flat in flat_buffers() if id(flat) not in before]
    assert sum(flat.numel() for flat in flats) > sum(param.to_local().numel() for param in model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not any(flat.any() for flat in flats)


# What is refused


class Mine(optim.AdamW):
    """What is derived from a known optimizer may do anything."""


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4))]


REFUSED: dict[str, Callable[[], Any]] = {
    "not known to be elementwise": lambda: optim.LBFGS(_params()),
    "derived from a known one": lambda: Mine(_params()),
    "with a scheduler made before": lambda: optim.lr_scheduler.ConstantLR(optim.SGD(_params(), lr=0.1)).optimizer,
    "differentiable": lambda: optim.SGD(_params(), lr=0.1, differentiable=True),
    "no optimizer": lambda: nn.Linear(1, 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_elementwise_or_no_plain_optimizer_is_refused(case: str) -> None:
    given = REFUSED[case]()
    kind = type(given)
    TEXTS.check(case, error_of(lambda: fsdp2.optim.flatten_optimizer(given)), among=REFUSED)
    assert type(given) is kind


def test_a_copy_or_what_was_pickled_is_flat_and_has_the_same_states() -> None:
    optimizer = fsdp2.optim.flatten_optimizer(optim.AdamW(_params()))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is type(optimizer)
        compare_values("the other", other.state_dict(), optimizer.state_dict())


def test_the_optimizer_stays_the_same_object_of_a_derived_class() -> None:
    optimizer = optim.AdamW(_params())
    flat = fsdp2.optim.flatten_optimizer(optimizer)
    assert flat is optimizer
    assert fsdp2.optim.flatten_optimizer(flat) is flat
    assert isinstance(flat, optim.AdamW)
    assert repr(flat).startswith("FlatAdamW (")
    assert type(optim.AdamW(_params())) is optim.AdamW
    assert type(fsdp2.optim.flatten_optimizer(Mine(_params()), is_elementwise=True)).__mro__[2] is Mine
    known = {value for value in vars(optim).values() if isinstance(value, type) and issubclass(value, optim.Optimizer)}
    others = {cls.__name__ for cls in known - {optim.Optimizer} - set(ELEMENTWISE)}
    assert others >= {"Adafactor", "LBFGS", "SparseAdam"}  # they need more than elements


def test_gradients_that_touch_are_one_view_within_one_storage_only() -> None:
    flat = torch.arange(6.0)
    view = spanned(flat[1:3], 5)
    assert view is not None
    assert view.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert view.data_ptr() == flat[1:].data_ptr()
    assert spanned(flat[1:3], 6) is None


LARGE, SMALL = COPY_MAX_NBYTES + 1, COPY_MAX_NBYTES // 3
YES, NO = [True] * 4, [False] * 4


@pytest.mark.parametrize(
    "case",
    [
        (["a"] * 4, YES, YES, [LARGE] * 4, [(0, 4)]),
        (["a"] * 4, [True, True, False, True], YES, [1] * 4, [(0, 2), (2, 4)]),
        (["a", "a", "b", "b"], YES, YES, [1] * 4, [(0, 2), (2, 4)]),
        (["a", None, "a", "a"], YES, [True, False, False, True], [1] * 4, [(0, 1), (2, 4)]),
        (["a"] * 4, YES, NO, [SMALL] * 4, [(0, 3), (3, 4)]),
        (["a"] * 4, YES, NO, [LARGE, 1, 1, LARGE], [(0, 1), (1, 3), (3, 4)]),
        (["a"] * 4, YES, [False, True, False, True], [LARGE, LARGE, 1, 1], [(0, 2), (2, 4)]),
        (["a"] * 4, YES, [False, False, True, True], [1, 1, 1, LARGE], [(0, 3), (3, 4)]),
        ([None] * 4, YES, NO, [1] * 4, []),
    ],
)
def test_runs_end_where_kinds_change_and_where_large_gradients_lie_apart(case: Any) -> None:
    kinds, follows, touch, nbytes, expected = case
    assert [(run.start, run.stop) for run in cut_runs(kinds, follows, touch, nbytes)] == expected
