"""What goes wrong in all-gather hooks, as text on every rank (``golden/hook_errors.txt``); mended, the model works."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from fsdp2.tensors.wrapper import WrapperTensor
from tests.distributed.changes import assert_step_is_that_of
from tests.distributed.support import Stack, seeded, shard, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Travelling
from tests.harness.golden import Check, golden_on_ranks
from tests.harness.messages import error_of, wrapped
from tests.harness.pool import shared_pool
from tests.unit.testing.test_check import BROKEN, Subclass

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
LATER_PRE, LATER_POST = "later_pre", "later_post"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

Outputs = tuple[Tensor, ...]


class Right(Travelling):
    """Sends its values as they are, so that a model with it trains like a plain one."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return (self.plain,), None

    def fsdp_post_all_gather(self, outputs: Outputs, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            out.copy_(outputs[0])
            return None
        made = outputs[0].clone()
        return made, (made,)


class Faulty(Right):
    """Hooks are bound at first use; what these two call may be replaced later."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return self.later_pre(mesh)

    def fsdp_post_all_gather(self, outputs: Outputs, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return self.later_post(outputs, metadata, param_dtype, out=out)

    later_pre = Right.fsdp_pre_all_gather
    later_post = Right.fsdp_post_all_gather


@contextmanager
def fault_in(hook: str, fault: object) -> Iterator[None]:
    """``Faulty`` has ``fault`` in the place of ``hook`` in this block."""
    right = getattr(Faulty, hook)
    setattr(Faulty, hook, fault)
    yield
    setattr(Faulty, hook, right)


def stack_of(make: Callable[[Tensor], Tensor]) -> Any:
    model = seeded(Stack)
    linear = model.blocks[1].linear
    linear.weight = nn.Parameter(make(linear.weight.detach()))
    return model


def assert_trains_like_a_plain_one(model: Any) -> None:
    """Two steps, so that the second one goes through ``out``."""
    model.zero_grad()
    for _ in range(2):
        assert_step_is_that_of(model, seeded(Stack))


class Fault(NamedTuple):
    """What stands in the place of ``hook``: on all ranks or on one, ``after`` so many steps."""

    hook: str
    fault: object
    on_rank: int | None = None
    is_of_one: bool = False  # the rank says what happened, and all others say where it did
    world_size: int = 2
    replicas: int = 1
    after: int = 0


class Packed(WrapperTensor):
    """Half as many inner elements as it shows."""

    plain: Tensor
    _INNER = ("plain",)

    def __new__(cls, plain: Tensor) -> Packed:
        return cls._of(plain, shape=(plain.size(0), 2 * plain.size(1)))


def _sends(payload: Callable[[Tensor], Any]) -> Callable[[Any, DeviceMesh], Any]:
    """A pre-hook whose payload is made of the shard."""
    return lambda self, mesh: (payload(self.plain), None)


def _pre_raises(self: Faulty, mesh: DeviceMesh) -> Any:
    raise ValueError("this shard is not to my liking")


_sends_halves = _sends(lambda plain: (plain.half(),))
_sends_fewer_columns = _sends(lambda plain: (plain[:, 1:].contiguous(),))


def _post(made: Callable[[Any, Outputs, Any], Any]) -> Callable[..., Any]:
    """A post-hook that returns what ``made`` makes of the shard, the outputs and ``out``."""

    def post(self: Faulty, outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return made(self, outputs, out)

    return post


def _made(make: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """Makes something of the first output, whatever ``out`` is, and lists it to be freed."""
    return _post(lambda self, outputs, out: ((made := make(outputs[0])), (made,)))


@_post
def _post_raises(self: Faulty, outputs: Outputs, out: Any) -> Any:
    raise ValueError("this tensor is not to my liking")


@_post
def _puts_other_memory_under_out(self: Faulty, outputs: Outputs, out: Any) -> Any:
    made = outputs[0].clone()
    if out is None:
        return made, (made,)
    out.data = made
    return None


@_post
def _frees_the_shard(self: Faulty, outputs: Outputs, out: Any) -> Any:
    made = Right.fsdp_post_all_gather(self, outputs, None, torch.float32, out=out)
    return None if out is not None else (made[0], (made[0], self))


def _raises_when_asked(self: Faulty) -> bool:
    raise ValueError("this question is not to my liking")


FAULTS = {
    "payload in a list": Fault(PRE, _sends(lambda plain: [plain])),
    "payload without metadata": Fault(PRE, lambda self, mesh: self.plain),
    "payload with a number": Fault(PRE, _sends(lambda plain: (plain, 3))),
    "payload of a tensor of all ranks": Fault(PRE, lambda self, mesh: ((DTensor.from_local(self.plain, mesh),), None)),
    "payload of a wrapper around another shape": Fault(PRE, _sends(lambda plain: (Packed(plain),))),
    "payload on another device": Fault(PRE, _sends(lambda plain: (plain.to("meta"),))),
    "payload that is not contiguous": Fault(PRE, _sends(lambda plain: (plain[:, ::2],))),
    "pre-hook that raises": Fault(PRE, _pre_raises),
    "pre-hook that raises on one rank": Fault(PRE, _pre_raises, 1, is_of_one=True),
    "pre-hook that raises on one replica": Fault(PRE, _pre_raises, 3, is_of_one=True, world_size=4, replicas=2),
    "more tensors on one rank": Fault(PRE, _sends(lambda plain: (plain, plain)), on_rank=1),
    "another dtype on one rank": Fault(PRE, _sends_halves, on_rank=2, world_size=4),
    "shape on one rank that does not fit": Fault(PRE, _sends_fewer_columns, on_rank=2, world_size=4),
    "other payload on one replica": Fault(PRE, _sends_halves, on_rank=3, world_size=4, replicas=2),
    "pre-hook with another signature": Fault(PRE, lambda self, mesh, rank: None),
    "missing pre-hook": Fault(PRE, None),
    "payload that changes in a later step": Fault(LATER_PRE, _sends_fewer_columns, after=2),
    "missing post-hook": Fault(POST, None),
    "post-hook that raises": Fault(POST, _post_raises),
    "post-hook that raises in a later step": Fault(LATER_POST, _post_raises, after=1),
    "post-hook that returns one tensor": Fault(POST, _post(lambda self, outputs, out: outputs[0].clone())),
    "post-hook that returns too few rows": Fault(POST, _made(lambda output: output[:1].clone())),
    "post-hook that puts other memory under out": Fault(LATER_POST, _puts_other_memory_under_out),
    "post-hook that writes its outputs": Fault(LATER_POST, _post(lambda _, outputs, out: (outputs[0].mul_(1.0), ()))),
    "tensor on outputs that are released": Fault(POST, _post(lambda _, outputs, out: (outputs[0], ()))),
    "shard listed to be freed": Fault(POST, _frees_the_shard),
    "integers of a trainable parameter": Fault(POST, _made(lambda output: output.int())),
    "answer that is no bool": Fault(RELEASE, lambda self: 1),
    "question for the outputs that raises": Fault(RELEASE, _raises_when_asked),
}


def _error_of_step(ctx: RankContext, name: str) -> str:
    """The error of a step with a fault, which comes after some steps without."""
    hook, fault, on_rank, _, _, replicas, after = FAULTS[name]
    mesh = ctx.mesh_1d() if replicas == 1 else ctx.mesh_2d(replicas, ctx.world_size // replicas)
    model = shard(ctx, stack_of(Faulty), mesh=mesh)
    for _ in range(after):
        step(model)
    with fault_in(hook, fault if on_rank in (None, ctx.rank) else getattr(Faulty, hook)):
        error = error_of(lambda: step(model))
    model.reset_iter_state()
    assert_trains_like_a_plain_one(model)
    return error


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_a_hook_is_an_error_on_all_ranks_and_the_model_works_without_it(name: str, golden: Check) -> None:
    fault = FAULTS[name]
    errors = shared_pool(fault.world_size).run(_error_of_step, name=name)
    mine = errors[fault.on_rank or 0]
    if fault.is_of_one:
        elsewhere = f"ExtensionError: on rank {fault.on_rank}: {mine.removeprefix('ExtensionError: ')}"
        expected = [mine if rank == fault.on_rank else elsewhere for rank in range(fault.world_size)]
    else:
        expected = [mine] * fault.world_size
    assert [error.split() for error in errors] == [error.split() for error in expected]
    golden(mine)


@distributed(2)
def test_post_hook_that_raises_on_one_rank_raises_there_only(ctx: RankContext) -> None:
    """As in torch. The ranks agree on what travels, not on what becomes of it. So they gather alike afterwards."""
    model = shard(ctx, stack_of(Faulty))
    block = model.blocks[1]
    with fault_in(POST, _post_raises if ctx.rank == 1 else Faulty.fsdp_post_all_gather):
        if ctx.rank == 1:
            assert "fsdp_post_all_gather raised ValueError" in " ".join(error_of(block.unshard).split())
        else:
            block.unshard()
            assert torch.equal(block.linear.weight, seeded(Stack).blocks[1].linear.weight)
    block.reshard()
    assert_trains_like_a_plain_one(model)


@distributed(2)
def test_post_hook_that_returns_a_new_object_for_out_is_warned_of_once(ctx: RankContext) -> None:
    """As in torch, the result is ignored."""

    @_post
    def also_fills_out(self: Faulty, outputs: Outputs, out: Any) -> Any:
        if out is not None:
            out.copy_(outputs[0])
        return ((made := outputs[0].clone()), (made,))

    model = shard(ctx, stack_of(Faulty))
    with fault_in(LATER_POST, also_fills_out), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trains_like_a_plain_one(model)
    (warning,) = caught
    assert str(warning.message) == (
        "parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a tuple of 2 in new memory although "
        "out was given. fsdp2 ignores this result. Fill out in place, because autograd has saved out."
    )


@distributed(2)
def test_post_hook_that_returns_aliases_of_the_outputs_whatever_out_is_trains(ctx: RankContext) -> None:
    aliases = _made(lambda output: output.view(32, 32))
    with fault_in(LATER_POST, aliases), fault_in(RELEASE, lambda self: False):
        assert_trains_like_a_plain_one(shard(ctx, stack_of(Faulty)))


class HasNoSplit(Right):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError("this class has no split")
        return super().__torch_dispatch__(func, types, args, kwargs)


class HookedParameter(nn.Parameter):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args: Any, out: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("cls", [BROKEN["CannotBeCut"], HasNoSplit, HookedParameter, Subclass])
@golden_on_ranks()
def test_class_is_refused_by_fully_shard(ctx: RankContext, cls: type) -> str:
    """Nothing has changed then: the same parameters are bound, and with a plain one in its place the model works."""
    model = seeded(Stack)
    linear = model.blocks[1].linear
    weight = linear.weight
    linear.weight = cls(weight.detach()) if issubclass(cls, nn.Parameter) else nn.Parameter(cls(weight.detach()))
    before = list(model.parameters())
    error = error_of(lambda: fully_shard(model, mesh=ctx.mesh_1d()))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert type(model) is Stack
    linear.weight = weight
    assert_trains_like_a_plain_one(shard(ctx, model))
    return error


class WithoutHooks(Right):
    fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]


IN_A_STEP = {
    "subclass without hooks": WithoutHooks,
    "gradient that nothing says how to reduce": BROKEN["SpreadsToItsGradient"],
}


@pytest.mark.parametrize("name", IN_A_STEP)
@golden_on_ranks()
def test_class_is_refused_in_a_step(ctx: RankContext, name: str) -> str:
    model = shard(ctx, stack_of(IN_A_STEP[name]))
    error = error_of(lambda: step(model))
    if IN_A_STEP[name] is WithoutHooks:
        model.reset_iter_state()
        model.blocks[1].linear.weight._local_tensor.__class__ = Right
        assert_trains_like_a_plain_one(model)
    return error


BOUND_AGAIN = {"raises": _pre_raises, "another dtype": _sends_halves}


@pytest.mark.parametrize("name", BOUND_AGAIN)
@golden_on_ranks()
def test_what_one_rank_alone_does_when_hooks_are_bound_again_is_an_error_on_all(ctx: RankContext, name: str) -> str:
    """No rank goes on to the gather: what is exchanged does not depend on what one rank alone has found."""
    model = shard(ctx, stack_of(Faulty))
    step(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with fault_in(LATER_PRE, BOUND_AGAIN[name] if ctx.rank == 1 else getattr(Faulty, LATER_PRE)):
        error = error_of(lambda: step(model))
    model.reset_iter_state()
    assert_trains_like_a_plain_one(model)
    return wrapped(" ".join(error.split()).replace("on rank 1: ", ""))
