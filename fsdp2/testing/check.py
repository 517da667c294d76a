"""``check_all_gather_extension``: what authors of tensor subclasses call in their own tests.

Cases are shapes on numbers of ranks. A case first does what a training step does to a sharded parameter, then what
optimizers and checkpoints do to its shards (``handling``). Rule: a check that cannot be made because an earlier one of
its case has failed is left out, so that one mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from fsdp2 import _torch
from fsdp2.group.extensions import is_plain
from fsdp2.plan.dtypes import param_dtypes
from fsdp2.testing.findings import Findings, check_equal, values_of
from fsdp2.testing.handling import check_handling
from fsdp2.testing.subject import Case, Subject, gradient_names
from fsdp2.testing.world import Rank, Setting, World
from fsdp2.types import ExtensionError, MixedPrecisionPolicy

SHAPES: tuple[tuple[int, ...], ...] = ((8, 4), (5, 3), (1, 4), (3, 2, 2), (7,))
"""Evenly cut, unevenly, fewer rows than ranks, three dims, and one."""

Make = Callable[[torch.Tensor], torch.Tensor]


def check_all_gather_extension(
    make: Make,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    dim: int = 0,
    dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    device: torch.device | str = "cpu",
    value: Make | None = None,
    tolerance: float = 0.0,
    trainable: bool = True,
    prepare: Callable[[list[torch.Tensor]], object] | None = None,
) -> None:
    """Check that a tensor subclass with all-gather hooks does as ``fully_shard`` expects; no process group is needed.

    The ranks are played one after the other, on small tensors. Memory that the runtime frees, or does not fill, holds
    garbage meanwhile. Checked is: the hooks, their signatures and what they return, on every rank; that the unsharded
    parameter is the same on all ranks, and however many there are; that it can be released, with everything that the
    class has not declared, and filled again under autograd's feet; its gradient; and that shards can be copied, cast,
    loaded, initialised on the meta device and stepped by optimizers::

        def test_my_tensor_can_be_sharded():
            check_all_gather_extension(MyTensor, value=lambda full: full.bfloat16().float())

    Args:
        make: makes the tensor to be sharded of a plain tensor of random values. On the meta device, too.
        shapes: of the plain tensors. Leave out of ``SHAPES`` what the class refuses.
        world_sizes: how many ranks share a tensor. One rank is always tried.
        dim: along which it is cut.
        dtype: of the plain tensors.
        mp_policy, device: as they would be given to ``fully_shard``; the device, of its mesh.
        value: what the unsharded parameter of a plain tensor holds, plain or of its class. Default: what it holds if
            there is one rank.
        tolerance: by how much values may differ from that. Exact by default; a format whose rounding depends on the cut
            needs more. Ranks must always agree exactly, and so must all gathers of the same shards.
        trainable: False for frozen parameters: no gradients, no optimizers.
        prepare: called with the shards of all ranks, in rank order, before every gather. For hooks that would else
            communicate: there is no process group.

    Raises:
        ExtensionError: one line for each kind of failure: which checks, what was found, what was expected, and where.
        ValueError: a shape has no such dim to cut.
    """
    for shape in shapes:
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"check_all_gather_extension: shape {shape} has no dim {dim} to cut; leave it out of shapes."
            )
    target = torch.device(device)
    setting = Setting(mp_policy, param_dtypes(dtype, mp_policy).param, target, trainable, prepare)
    subject = Subject(make, dtype, dim, tolerance, setting)
    findings = Findings()
    for shape in shapes:
        if findings.passes("make", f"shape {shape}", partial(_check_make, subject, shape, findings)):
            _check_shape(subject, shape, world_sizes, value, findings)
    findings.raise_if_any()


def _check_make(subject: Subject, shape: tuple[int, ...], findings: Findings) -> None:
    made = subject.make(subject.plain(shape))
    findings.class_name = type(made).__name__
    if not isinstance(made, torch.Tensor) or made.shape != shape:
        found = f" of shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else ""
        raise ExtensionError(f"make returned a {type(made).__name__}{found}, expected a tensor of shape {shape}.")
    if is_plain(made):
        raise ExtensionError("make returned a plain tensor without hooks, expected a tensor subclass with them.")
    nn.Parameter(made, requires_grad=subject.setting.trainable)  # raises if detach() loses the class


def _check_shape(
    subject: Subject, shape: tuple[int, ...], world_sizes: Sequence[int], value: Make | None, findings: Findings
) -> None:
    expected: list[torch.Tensor] | None = None
    if value is not None:
        expected = values_of(value(subject.plain(shape)))
    for size in [1, *(size for size in world_sizes if size != 1)]:
        case = Case(subject, shape, size)
        world = _first_gather(case, findings)
        if world is None:
            continue
        found = values_of(_unsharded(world.ranks[0]))
        checks = {
            "values": partial(_check_values, world, expected, subject.tolerance),
            "memory": partial(_check_memory, world),
            "refill": partial(_check_refill, world),
            "autograd": partial(_check_autograd, world),
        }
        passed = all(findings.passes(name, case.where, check) for name, check in checks.items())
        expected = found if expected is None else expected
        if passed and size == max(world_sizes):
            check_handling(case, world, findings)


def _first_gather(case: Case, findings: Findings) -> World | None:
    """The ranks after their first gather; None if that failed."""
    worlds: list[World] = []

    def cut() -> None:
        case.shards()

    def bind() -> None:
        worlds.append(case.world(case.shards()))

    passes = partial(findings.passes, where=case.where)
    if not passes("cut", act=cut) or not passes("hooks", act=bind):
        return None
    world = worlds[0]
    if not passes("payload", act=world.send) or not passes("unsharded", act=world.receive):
        return None
    return world if passes("release", act=partial(_check_release, world)) else None


def _unsharded(rank: Rank) -> torch.Tensor:
    assert rank.unsharded is not None
    return rank.unsharded


def _check_release(world: World) -> None:
    rank = world.ranks[0]
    before = values_of(_unsharded(rank))
    world.drop_outputs()
    problem = "the unsharded parameter changes when the outputs are freed, which the class says they may be"
    remedy = "Copy from them, or return False from fsdp_should_release_all_gather_outputs_after_post_all_gather."
    check_equal(values_of(_unsharded(rank)), before, problem, remedy)


def _check_values(world: World, expected: Sequence[torch.Tensor] | None, tolerance: float) -> None:
    first, *others = [values_of(_unsharded(rank)) for rank in world.ranks]
    for index, other in enumerate(others, start=1):
        problem = f"the unsharded parameter on rank {index} is not that of rank 0"
        check_equal(other, first, problem, "Make it of the outputs, and of metadata that is the same on all ranks.")
    if expected is not None:
        problem = "the unsharded parameter does not have the expected values"
        remedy = (
            "The outputs are the ranks' payloads one after the other: let what is sent not depend on where the tensor "
            "was cut, or allow for a tolerance."
        )
        check_equal(first, expected, problem, remedy, tolerance)


def _check_memory(world: World) -> None:
    """Every byte of the unsharded parameter is one that the runtime frees. Single elements, such as a scale, may
    stay."""
    rank = world.ranks[0]
    unsharded = _unsharded(rank)
    hook = "fsdp_post_all_gather"
    for leaf in _torch.leaves(unsharded):
        storage = leaf.untyped_storage()
        is_freed = rank.inner_memory.holds(storage) or rank.outputs_memory.holds(storage)
        if leaf.numel() > 1 and not is_freed:
            problem = (
                f"made an unsharded parameter with {storage.nbytes()} bytes that are neither an output nor among the "
                "tensors listed to be freed: they would stay allocated when it is resharded. Return them as the second "
                "value"
            )
            raise rank.hooks.error(hook, problem)


def _check_refill(world: World) -> None:
    before = [values_of(_unsharded(rank)) for rank in world.ranks]
    world.release()
    world.gather()
    for rank, values in zip(world.ranks, before, strict=True):
        problem = "out is not filled with what the first call made of the same shards"
        remedy = "Its memory and that of the outputs is new whenever out is given: write all of it, from the outputs."
        check_equal(values_of(_unsharded(rank)), values, problem, remedy)


def _check_autograd(world: World) -> None:
    """What autograd saved is read after a reshard and another gather, as if nothing had happened."""
    rank = world.ranks[0]
    undisturbed = _gradients(rank, lambda: None)

    def reshard_and_unshard() -> None:
        world.release()
        world.gather()

    disturbed = _gradients(rank, reshard_and_unshard)
    for found, expected in zip(disturbed, undisturbed, strict=True):
        if found is not None and expected is not None:
            problem = "backward after a reshard and an unshard gives other gradients"
            check_equal(values_of(found), values_of(expected), problem, "Write out in place, through its own tensors.")
    unsharded, grad = _unsharded(rank), disturbed[1]
    if unsharded.requires_grad:
        _check_gradient(rank, unsharded, grad)


def _gradients(rank: Rank, between: Callable[[], None]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of an input and of the unsharded parameter, with a call of ``between`` forward and backward."""
    unsharded = _unsharded(rank)
    is_floating = unsharded.dtype.is_floating_point
    shape = (2, unsharded.size(1)) if unsharded.dim() == 2 else tuple(unsharded.shape)
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    x = x.to(unsharded.device, unsharded.dtype if is_floating else torch.float32).requires_grad_()
    unsharded.grad = None
    y = F.linear(x, unsharded) if unsharded.dim() == 2 and is_floating else unsharded * x
    loss = y.sum()
    between()
    loss.backward()
    return x.grad, unsharded.grad


def _check_gradient(rank: Rank, unsharded: torch.Tensor, grad: torch.Tensor | None) -> None:
    cls = type(unsharded).__name__
    if grad is None:
        raise ExtensionError(f"the unsharded {cls} got no gradient. Let operations on it be differentiable.")
    if grad.shape != unsharded.shape or grad.dtype is not unsharded.dtype:
        raise ExtensionError(
            f"the gradient of the unsharded {cls} has shape {tuple(grad.shape)} and {grad.dtype}, expected "
            f"{tuple(unsharded.shape)} and {unsharded.dtype}."
        )
    names = gradient_names(rank.shard, unsharded)
    inner = [getattr(grad, name, grad) for name in names] if type(grad) is not torch.Tensor else []
    if type(grad) is not torch.Tensor and not (names and all(type(tensor) is torch.Tensor for tensor in inner)):
        raise ExtensionError(
            f"the gradient of the unsharded {cls} is a {type(grad).__name__}, expected a plain tensor. It may be of a "
            "subclass only if shard and unsharded parameter are wrappers with the same inner tensors, each of the "
            "parameter's shape and dtype."
        )
