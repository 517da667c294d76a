"""``check_all_gather_extension``, which authors of tensor subclasses call in their own tests.

A case is a shape on a number of ranks. Each case repeats what a training step does to a sharded parameter. The case
with most ranks also repeats what optimizers and checkpoints do to shards. A case ends at its first failure.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fsdp2.core import ExtensionError, MixedPrecisionPolicy, _torch, is_plain
from fsdp2.extras.checked import AT_LEAST_1, NOT_NEGATIVE, checked
from fsdp2.testing.findings import Findings, Values, are_equal, check_equal, values_of
from fsdp2.testing.world import Case, Rank, StandInDTensor, World, local_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    f"{cls.__name__}(foreach={foreach})": partial(cls, lr=0.5, foreach=foreach)
    for cls in (torch.optim.SGD, torch.optim.AdamW)
    for foreach in (True, False)
}

SHAPES: tuple[tuple[int, ...], ...] = ((8, 4), (5, 3), (1, 4), (3, 2, 2), (7,))
"""Evenly cut, unevenly, fewer rows than ranks, three dims, and one."""

Make = Callable[[torch.Tensor], torch.Tensor]


@checked(tolerance=NOT_NEGATIVE, world_sizes=AT_LEAST_1)
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
    """Check that a tensor subclass with all-gather hooks works with ``fully_shard``; no process group is needed.

    It checks the hooks and their results; that the unsharded parameter is the same on all ranks, for any number of
    ranks; that it can be released and filled again; its gradient; and that shards can be copied, cast, loaded, saved in
    checkpoints, initialised on the meta device and stepped by optimizers::

        def test_my_tensor_can_be_sharded():
            check_all_gather_extension(MyTensor, value=lambda full: full.bfloat16().float())

    Args:
        make: makes the tensor to shard from a plain tensor of random values, also on the meta device.
        shapes: shapes of the plain tensors. Leave out the ``SHAPES`` that the class refuses.
        world_sizes: how many ranks share a tensor. One rank is always tried.
        dim: the dimension to cut.
        dtype: dtype of the plain tensors.
        mp_policy, device: the policy for ``fully_shard``, and the device of its mesh.
        value: the expected unsharded values for a plain tensor. Default: the values with one rank.
        tolerance: how much values may differ from those, for formats whose rounding depends on the cut. Ranks must
            always agree exactly.
        trainable: False for frozen parameters: no gradients, no optimizers.
        prepare: called with the shards of all ranks before every gather, for hooks that otherwise communicate.

    Raises:
        ExtensionError: has one line for each kind of failure: the check, what was found and expected, and where.
        ValueError: a shape has no such dim to cut.
    """
    for shape in shapes:
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"check_all_gather_extension: shape {shape} has no dim {dim} to cut. Leave this shape out of shapes."
            )
    findings = Findings()
    for shape in shapes:
        case = Case(make, dtype, dim, mp_policy, torch.device(device), trainable, prepare, shape)
        if findings.passes(f"shape {shape}", {"make": partial(_check_make, case, findings)}):
            expected = None if value is None else values_of(value(case.plain()))
            for size in [1, *(size for size in world_sizes if size != 1)]:
                shared = replace(case, size=size)
                expected = _check_size(shared, expected, tolerance, size == max(world_sizes), findings)
    findings.raise_if_any()


def _check_make(case: Case, findings: Findings) -> None:
    made = case.make(case.plain())
    findings.class_name = type(made).__name__
    if not isinstance(made, torch.Tensor) or made.shape != case.shape:
        found = f" of shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else ""
        raise ExtensionError(f"make returned a {type(made).__name__}{found}, expected a tensor of shape {case.shape}.")
    if is_plain(made):
        raise ExtensionError("make returned a plain tensor without hooks, expected a tensor subclass with hooks.")
    nn.Parameter(made, requires_grad=case.trainable)  # raises if detach() loses the class


def _check_size(
    case: Case, expected: Values | None, tolerance: float, is_handled: bool, findings: Findings
) -> Values | None:
    """All checks of one case. Returns the values expected for other numbers of ranks, once they are known."""
    worlds: list[World] = []
    gather: dict[str, Callable[[], object]] = {
        "cut": case.shards,
        "hooks": lambda: worlds.append(World(case, case.params(case.shards()))),
        "payload": lambda: worlds[0].send(),
        "unsharded": lambda: worlds[0].receive(),
        "release": lambda: _check_release(worlds[0]),
    }
    if not findings.passes(case.where, gather):
        return expected
    world = worlds[0]
    found = _values(world)
    step = {
        "values": partial(_check_values, world, expected, tolerance),
        "memory": partial(_check_memory, world.ranks[0]),
        "refill": partial(_check_refill, world),
        "autograd": partial(_check_autograd, world),
    }
    if findings.passes(case.where, step) and is_handled:
        for name, check in _handling(case, _values(world), world.ranks[0]).items():
            findings.passes(case.where, {name: check})
    return found if expected is None else expected


def _values(world: World) -> Values:
    return values_of(world.ranks[0].unsharded)


# What a training step does


def _check_release(world: World) -> None:
    before = _values(world)
    for rank in world.ranks:
        rank.drop_outputs()
    problem = "the unsharded parameter changes when the outputs are freed, but the class says that they may be freed"
    remedy = "Copy the outputs, or return False from fsdp_should_release_all_gather_outputs_after_post_all_gather."
    check_equal(_values(world), before, problem, remedy)


def _check_values(world: World, expected: Values | None, tolerance: float) -> None:
    first, *others = [values_of(rank.unsharded) for rank in world.ranks]
    for index, other in enumerate(others, start=1):
        problem = f"the unsharded parameter on rank {index} differs from the unsharded parameter on rank 0"
        remedy = "Make the parameter only from the outputs, and from metadata that is the same on all ranks."
        check_equal(other, first, problem, remedy)
    if expected is not None:
        problem = "the unsharded parameter does not have the expected values"
        remedy = (
            "The outputs are the payloads of all ranks in rank order. Send payloads that do not depend on the cut, or "
            "pass a tolerance."
        )
        check_equal(first, expected, problem, remedy, tolerance)


def _check_memory(rank: Rank) -> None:
    """The runtime must free every byte of the unsharded parameter. Single elements, such as a scale, may stay."""
    for leaf in _torch.leaves(rank.unsharded):
        storage = leaf.untyped_storage()
        if leaf.numel() > 1 and not rank.frees(storage):
            problem = (
                f"made an unsharded parameter with {storage.nbytes()} bytes that belong neither to an output nor to a "
                "tensor listed to be freed. This memory would stay allocated after a reshard. Return the tensor in the "
                "second value"
            )
            raise rank.hooks.error("fsdp_post_all_gather", problem)


def _check_refill(world: World) -> None:
    before = [values_of(rank.unsharded) for rank in world.ranks]
    world.release()
    world.gather()
    for rank, values in zip(world.ranks, before, strict=True):
        problem = "out differs from the result of the first call for the same shards"
        remedy = "Whenever out is given, out and the outputs have new memory. Write all of out, from the outputs."
        check_equal(values_of(rank.unsharded), values, problem, remedy)


def _check_autograd(world: World) -> None:
    """Tensors that autograd saved must be readable after a reshard and another gather, as if nothing had happened."""
    unsharded = world.ranks[0].unsharded
    undisturbed = _gradients(unsharded, lambda: None)

    def reshard_and_unshard() -> None:
        world.release()
        world.gather()

    disturbed = _gradients(unsharded, reshard_and_unshard)
    for found, expected in zip(disturbed, undisturbed, strict=True):
        if found is not None and expected is not None:
            problem = "backward after a reshard and an unshard gives other gradients"
            check_equal(values_of(found), values_of(expected), problem, "Write into the tensors of out, in place.")
    if unsharded.requires_grad:
        _check_gradient(world.ranks[0], disturbed[1])


def _gradients(unsharded: nn.Parameter, between: Callable[[], None]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of an input and of the unsharded parameter; ``between`` is called between forward and backward."""
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


def _check_gradient(rank: Rank, grad: torch.Tensor | None) -> None:
    unsharded, cls = rank.unsharded, type(rank.unsharded).__name__
    if grad is None:
        raise ExtensionError(f"the unsharded {cls} got no gradient. Make operations on this class differentiable.")
    if grad.shape != unsharded.shape or grad.dtype is not unsharded.dtype:
        raise ExtensionError(
            f"the gradient of the unsharded {cls} has shape {tuple(grad.shape)} and {grad.dtype}, expected "
            f"{tuple(unsharded.shape)} and {unsharded.dtype}."
        )
    parts = [getattr(grad, name, grad) for name in rank.hooks.param.inner_gradients()] or [grad]
    if type(grad) is not torch.Tensor and any(type(part) is not torch.Tensor for part in parts):
        raise ExtensionError(
            f"the gradient of the unsharded {cls} is a {type(grad).__name__}, expected a plain tensor. A gradient may "
            "be of a subclass only if shard and unsharded parameter are wrappers with the same inner tensors, each of "
            "the parameter's shape and dtype."
        )


# Other operations on shards. Each must keep the class, and the shards must still send the right values


def _handling(case: Case, expected: Values, rank: Rank) -> dict[str, Callable[[], None]]:
    checks: dict[str, Callable[[], None]] = {
        "clone": partial(_check_copy, case, expected, "clone", lambda param: param.detach().clone()),
        "empty_like": partial(_check_copy, case, expected, "empty_like", _emptied_and_filled),
        "to": partial(_check_cast, case),
        "deepcopy": partial(_check_deepcopy, case, expected),
        "meta": partial(_check_meta, case, expected),
        "load": partial(_check_load, case, expected),
        "save": partial(_check_save, case, expected),
    }
    if _torch.inner_names(rank.shard):
        name = "__tensor_unflatten__ of __tensor_flatten__"
        checks["flatten"] = partial(_check_copy, case, expected, name, lambda param: _rebuilt(local_of(param)))
    for name, optimizer in OPTIMIZERS.items() if case.trainable else ():
        checks[name] = partial(_check_optimizer, case, expected, optimizer, bool(rank.hooks.param.inner_gradients()))
    return checks


def _emptied_and_filled(param: torch.Tensor) -> torch.Tensor:
    """Empty and refill ``param`` as ``to_empty`` and ``load_state_dict`` do."""
    return torch.empty_like(param).copy_(param)


def _gathered(case: Case, shards: Sequence[torch.Tensor]) -> Values:
    world = World(case, case.params(shards))
    world.gather()
    return _values(world)


def _check_kept(found: torch.Tensor, like: torch.Tensor, operation: str) -> None:
    """``operation`` must keep the class and the shape."""
    if type(found) is not type(like) or found.shape != like.shape:
        raise ExtensionError(
            f"{operation} of a {type(like).__name__} of shape {tuple(like.shape)} gives a {type(found).__name__} of "
            f"shape {tuple(found.shape)}. The hooks would be lost. Let the operation keep the class."
        )


def _check_copy(case: Case, expected: Values, name: str, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """``copied``, called ``name``, copies sharded parameters."""
    shards = case.shards()
    with torch.no_grad():
        found = [local_of(copied(param)) for param in case.params(shards)]
    for made, shard in zip(found, shards, strict=True):
        _check_kept(made, shard, name)
    _check_sends(case, found, expected)


def _rebuilt(shard: torch.Tensor) -> torch.Tensor:
    return _torch.rewrapped(shard, {name: getattr(shard, name) for name in _torch.inner_names(shard)})


def _check_sends(case: Case, shards: Sequence[torch.Tensor], expected: Values) -> None:
    problem = "a gather of the copies gives other values than a gather of the originals"
    remedy = "Let the operation copy the inner tensors and everything else that the hooks read."
    check_equal(_gathered(case, shards), expected, problem, remedy)


def _check_cast(case: Case) -> None:
    if not case.dtype.is_floating_point:
        return
    dtype = torch.float32 if case.dtype is torch.bfloat16 else torch.bfloat16
    for param in case.params(case.shards()):
        with torch.no_grad():
            cast = local_of(param.detach().to(dtype))
        _check_kept(cast, local_of(param), f"to({dtype})")
        if cast.dtype is not dtype:
            raise ExtensionError(f"to({dtype}) gives a {type(cast).__name__} of {cast.dtype}, expected {dtype}.")


def _check_deepcopy(case: Case, expected: Values) -> None:
    """A model is copied before it is sharded. A class may refuse to be copied; torch does so for subclasses made
    by ``as_subclass``."""
    param = nn.Parameter(case.make(case.plain()), requires_grad=case.trainable)
    try:
        copied = copy.deepcopy(param)
    except Exception:
        return
    _check_kept(copied, param, "copy.deepcopy")
    with torch.no_grad():
        param.detach().copy_(case.make(case.plain(seed=1)))
    problem = "a deep copy differs from the original tensor, or changes when the original changes"
    check_equal(_gathered(case, case.shards(copied)), expected, problem, "Let clone copy the inner tensors.")


def _check_meta(case: Case, expected: Values) -> None:
    """A model is built on the meta device, sharded, given memory, and loaded."""
    made = case.make(case.plain().to("meta"))
    if not made.is_meta:
        raise ExtensionError(
            f"make of a tensor on the meta device gives a tensor on {made.device}. Let make keep the device."
        )
    device = case.device
    found = []
    with torch.no_grad():
        for param, source in zip(case.params(case.shards(made)), case.params(case.shards()), strict=True):
            empty = torch.empty_like(param, device=device)
            _check_kept(local_of(empty), local_of(source), "empty_like on the meta device")
            if empty.device != device:
                raise ExtensionError(f"empty_like(device={device}) of a meta tensor gives a tensor on {empty.device}.")
            found.append(local_of(empty.copy_(source)))
    _check_sends(case, found, expected)


def _check_load(case: Case, expected: Values) -> None:
    """Other values are copied into shards that have been gathered, as a checkpoint is loaded."""

    def load(params: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for param, other in zip(params, case.params(case.shards(seed=1)), strict=True):
                param.copy_(other)

    found, loaded = _gathered_after(case, load), _gathered(case, case.shards(seed=1))
    if are_equal(loaded, expected):
        raise ExtensionError("tensors of other values give the same unsharded parameter. Send the shard's values.")
    problem = "a gather after copy_ does not give the copied values"
    check_equal(found, loaded, problem, "Let copy_ copy all that the hooks read. Keep no state in the hooks.")


def _check_save(case: Case, expected: Values) -> None:
    """A checkpoint saves shards, and copies what it reads into other shards. It reads with ``weights_only=True``."""
    targets = case.params(case.shards(seed=1))
    with torch.no_grad():
        for target, shard in zip(targets, case.shards(), strict=True):
            target.copy_(StandInDTensor(_saved_and_read(shard)))
    problem = "a gather of shards that were saved, read and copied in gives other values than a gather of the originals"
    remedy = "Let torch.save write all that the hooks read."
    check_equal(_gathered(case, [local_of(target) for target in targets]), expected, problem, remedy)


def _saved_and_read(shard: torch.Tensor) -> torch.Tensor:
    name, file = type(shard).__name__, io.BytesIO()
    try:
        torch.save(shard, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle's, if it cannot write a value
        raise ExtensionError(
            f"torch.save cannot write a {name}: {type(error).__name__}: {error}. Define the class, and those of its "
            "attributes, at the top of a module."
        ) from error
    file.seek(0)
    try:
        return cast(torch.Tensor, torch.load(file, weights_only=True))
    except pickle.UnpicklingError as error:
        raise ExtensionError(
            f"torch.load(weights_only=True), with which checkpoints are read, refuses a {name}. Below the class, write "
            f"torch.serialization.add_safe_globals([{name}]), with the classes of its attributes in the list, too."
        ) from error


def _check_optimizer(
    case: Case, expected: Values, make_optimizer: Callable[[Any], torch.optim.Optimizer], is_wrapped: bool
) -> None:
    """With ``is_wrapped``, gradients have the class of the shard."""

    def step(params: list[nn.Parameter]) -> None:
        for param in params:
            shard = local_of(param)
            ones = torch.ones(shard.shape, dtype=shard.dtype, device=shard.device)
            parts = {name: ones.clone() for name in _torch.inner_names(shard)}
            param.grad = StandInDTensor(_torch.rewrapped(shard, parts) if is_wrapped else ones)
        make_optimizer(params).step()

    if are_equal(_gathered_after(case, step), expected):
        raise ExtensionError(
            "the step did not change the gathered values. Let in-place operations write the inner tensors, also in "
            "operations on lists. Keep no state in the hooks."
        )


def _gathered_after(case: Case, write: Callable[[list[nn.Parameter]], None]) -> Values:
    """The values of a second gather, after ``write`` has written the shards following the first."""
    params = case.params(case.shards())
    world = World(case, params)
    world.gather()
    world.release()
    write(params)
    world.gather()
    return _values(world)
