"""``compare``: the subject against the oracle and against the unsharded model, step by step.

Tolerances, all stated here:

- Where every mesh axis has at most 2 ranks, a reduction adds two numbers, in either order the same: **bit for bit**.
- On a longer axis gloo's order of summation depends on where an element lies in the buffer, and the runtimes lay
  their buffers out differently: a few roundings of the reduce dtype, grown over the optimizer steps.
- Against the unsharded model the reduction divides at another place, and kernels may see other memory alignment:
  ``Case.unsharded``.

On an accelerator (the simulated one, ``tests/accelerator``) there is no tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness.distributed import RankContext, distributed
from tests.harness.runtimes import oracle, subject
from tests.harness.training import EXACT, Case, Snapshot, Step, StepRecord, Tolerance, train

SUMMATION_ORDER = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-6),
    torch.float64: Tolerance(rtol=1e-12, atol=1e-13),
    torch.bfloat16: Tolerance(rtol=5e-2, atol=5e-3),
    torch.float16: Tolerance(rtol=5e-3, atol=1e-3),
}
MAX_LINES = 12


def compare(case: Case, mesh: DeviceMesh, oracle_case: Case | None = None) -> None:
    """Train under all runtimes; raise with the first differences, named by step, tensor and size.

    ``oracle_case`` replaces the case for the oracle, where the oracle needs a detour to the same numbers.
    """
    expected = oracle_records(oracle_case or case, mesh)
    actual = subject_records(case, mesh)
    compare_with_oracle(case, mesh, actual, expected)
    if case.unsharded is not None and mesh.device_type == "cpu":
        compare_with_unsharded(case, mesh, actual)


def trains_alike(
    *world_sizes: int, model: Any, mesh: Callable[[RankContext], DeviceMesh] = RankContext.mesh_1d, **options: Any
) -> Callable[[Callable[[Step, Any], list[Tensor]]], Any]:
    """The step of a ``Case`` with ``options`` becomes a test on pools of ranks: see ``compare``."""

    def decorate(step: Callable[[Step, Any], list[Tensor]]) -> Any:
        @functools.wraps(step)
        def body(ctx: RankContext) -> None:
            compare(Case(model, step=step, **options), mesh(ctx))

        del body.__wrapped__  # type: ignore[attr-defined]  # the arguments of the test are those of ``body``
        return distributed(*world_sizes)(body)

    return decorate


def as_torchs(*world_sizes: int) -> Callable[[Callable[..., Any]], Any]:
    """A function of a ``RankContext`` and a runtime becomes a test on pools of ranks: with torch's and with fsdp2 it
    must return the same, bit for bit. Other arguments are parameters."""

    def decorate(scenario: Callable[..., Any]) -> Any:
        @functools.wraps(scenario)
        def body(ctx: RankContext, **parameters: Any) -> None:
            found = []
            for runtime in (oracle(), subject()):
                torch.manual_seed(0)
                found.append(scenario(ctx, runtime, **parameters))
            compare_values("against torch", found[1], found[0])

        arguments = inspect.signature(scenario).parameters.values()
        body.__signature__ = inspect.Signature([each for each in arguments if each.name != "runtime"])  # type: ignore[attr-defined]
        return distributed(*world_sizes)(body)

    return decorate


Cases = Mapping[str, Any]


def each_compared(
    *world_sizes: int,
    mesh: Callable[[RankContext], DeviceMesh] = RankContext.mesh_1d,
    by: Callable[[Case, DeviceMesh], None] = compare,
    ci: Collection[str] = (),
    long: Collection[str] = (),
) -> Callable[[Callable[[], Cases]], Any]:
    """A table of cases becomes a test of each on pools of ranks, by ``by``; see ``selection`` for ``ci`` and ``long``.

    A value is a case or several, or the function of a ``RankContext`` that makes their mesh or meshes, and then cases.
    """

    def decorate(table: Callable[[], Cases]) -> Any:
        rows = {name: row if isinstance(row, tuple) else (row,) for name, row in table().items()}

        @functools.wraps(table)
        def body(ctx: RankContext, name: str) -> None:
            make_mesh, *cases = rows[name] if callable(rows[name][0]) else (mesh, *rows[name])
            made = make_mesh(ctx)
            for place, case in itertools.product(made if isinstance(made, list) else [made], cases):
                by(case, place)

        del body.__wrapped__  # type: ignore[attr-defined]  # the arguments of the test are those of ``body``
        marks = {
            name: [*([pytest.mark.ci] if name in ci else []), *([pytest.mark.long] if name in long else [])]
            for name in rows
        }
        names = [pytest.param(name, marks=marks[name]) if marks[name] else name for name in rows]
        return pytest.mark.every_case(pytest.mark.parametrize("name", names)(distributed(*world_sizes)(body)))

    return decorate


def hsdp(ctx: RankContext) -> DeviceMesh:
    """Two replicas; on 2 ranks nothing is left to shard over."""
    return ctx.mesh_2d(2, ctx.world_size // 2)


def one_replica(ctx: RankContext) -> DeviceMesh:
    """A replicate axis of one rank."""
    return ctx.mesh_2d(1, ctx.world_size)


def oracle_records(case: Case, mesh: DeviceMesh) -> list[StepRecord]:
    """What the oracle does with ``case``. On an accelerator, the subject must be bit for bit the oracle on the CPU, or,
    where gloo adds more than two numbers, the oracle there."""
    if mesh.device_type == "cpu" or not _is_exact(case, mesh):
        return train(case, mesh, oracle())
    with _KERNELS(), torch.device("cpu"):
        return train(case, _on_cpu(mesh), oracle())


def subject_records(case: Case, mesh: DeviceMesh) -> list[StepRecord]:
    """What the subject does with ``case``."""
    with nullcontext() if mesh.device_type == "cpu" else _KERNELS():
        return train(case, mesh, subject())


def unsharded_records(case: Case, mesh: DeviceMesh) -> list[StepRecord]:
    """What the unsharded model does with ``case`` on the CPU."""
    if mesh.device_type == "cpu":
        return train(case, mesh, None)
    with torch.device("cpu"):
        return train(case, _on_cpu(mesh), None)


def compare_with_oracle(case: Case, mesh: DeviceMesh, actual: list[StepRecord], expected: list[StepRecord]) -> None:
    """Raise with the first differences of what the subject and the oracle did."""
    title = f"{subject().name} differs from {oracle().name}"
    if mesh.device_type == "cpu":
        _raise_if_any(title, _differences(actual, expected, tolerance_of_reduction(case, mesh)))
        return
    title += " on the CPU" if _is_exact(case, mesh) else ""
    _raise_if_any(title, _differences(_without_device(actual), _without_device(expected), EXACT))


def compare_with_unsharded(case: Case, mesh: DeviceMesh, actual: list[StepRecord]) -> None:
    """Raise with the first differences of what the subject and the unsharded model did, the latter on the CPU."""
    assert case.unsharded is not None
    title = f"{subject().name} differs from the unsharded model"
    reference = unsharded_records(case, mesh)
    actual = actual if mesh.device_type == "cpu" else _without_device(actual, _on_cpu)
    _raise_if_any(title, _differences_from_unsharded(actual, reference, case.unsharded))


_KERNELS = functools.partial(sdpa_kernel, SDPBackend.MATH)  # only the CPU has a fused one


def _is_exact(case: Case, mesh: DeviceMesh) -> bool:
    return tolerance_of_reduction(case, mesh) == EXACT


@functools.cache
def _on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """The same process groups, for the CPU."""
    groups, names = mesh.get_all_groups(), mesh.mesh_dim_names
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=names)
    return DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=names)


def _ranks_and_names(mesh: DeviceMesh) -> Any:
    return mesh.mesh.tolist(), mesh.mesh_dim_names


def _without_device(found: Any, of_mesh: Callable[[DeviceMesh], Any] = _ranks_and_names) -> Any:
    """What was recorded, with tensors on the CPU, and ``of_mesh`` for each mesh."""
    if isinstance(found, dict):
        return {key: _without_device(value, of_mesh) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_without_device(value, of_mesh) for value in found]
    if isinstance(found, DeviceMesh):
        return of_mesh(found)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = {each.name: _without_device(getattr(found, each.name), of_mesh) for each in dataclasses.fields(found)}
        return dataclasses.replace(found, **fields)
    return found.cpu() if isinstance(found, Tensor) else found


def compare_losses_with_unsharded(case: Case, mesh: DeviceMesh) -> None:
    """Train under the subject and unsharded only, for what the oracle gets wrong; look at nothing but the losses."""
    assert case.unsharded is not None
    actual, reference = ([record.losses for record in train(case, mesh, runtime)] for runtime in (subject(), None))
    title = f"{subject().name} differs from the unsharded model"
    _raise_if_any(title, _values("losses", actual, reference, case.unsharded))


def compare_values(title: str, actual: Any, expected: Any, tolerance: Tolerance = EXACT) -> None:
    """Two trees of dicts, lists, tensors, snapshots and plain values are equal, tensors bit for bit by default."""
    _raise_if_any(f"{title}: unequal", differences(actual, expected, tolerance))


def differences(actual: Any, expected: Any, tolerance: Tolerance = EXACT) -> list[str]:
    """What ``compare_values`` raises with."""
    return list(_values("", actual, expected, tolerance))


def tolerance_of_reduction(case: Case, mesh: DeviceMesh) -> Tolerance:
    return EXACT if (case.longest_axis or max(mesh.shape)) <= 2 else SUMMATION_ORDER[case.reduce_dtype]


def _raise_if_any(title: str, differences: Iterable[str]) -> None:
    found = list(differences)
    if found:
        more = [f"... and {len(found) - MAX_LINES} more"] if len(found) > MAX_LINES else []
        raise AssertionError("\n  ".join([title, *found[:MAX_LINES], *more]))


def _differences(actual: list[StepRecord], expected: list[StepRecord], tolerance: Tolerance) -> Iterator[str]:
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for what in ("losses", "notes", "gradients", "parameters", "buffers"):
            yield from _values(f"step {index}: {what}", getattr(ours, what), getattr(theirs, what), tolerance)


def _differences_from_unsharded(
    actual: list[StepRecord], reference: list[StepRecord], tolerance: Tolerance
) -> Iterator[str]:
    for index, (ours, unsharded) in enumerate(zip(actual, reference, strict=True)):
        for what in ("losses", "gradients", "parameters", "buffers"):
            compared = _shards if what in ("gradients", "parameters") else _values
            yield from compared(f"step {index}: {what}", getattr(ours, what), getattr(unsharded, what), tolerance)


def _shards(
    where: str, actual: Mapping[str, Snapshot | None], whole: Mapping[str, Snapshot | None], tolerance: Tolerance
) -> Iterator[str]:
    """Differences of sharded tensors from this rank's cut of the unsharded ones."""
    if list(actual) != list(whole):
        yield _names(where, actual, whole)
    for name in actual.keys() & whole.keys():
        ours, theirs = actual[name], whole[name]
        if ours is None or theirs is None:
            yield from _values(f"{where} {name!r}", ours, theirs, tolerance)
        else:
            yield from _tensors(f"{where} {name!r} (local)", ours.local, ours.shard_of(theirs.local), tolerance)
            if ours.full is not None:
                yield from _tensors(f"{where} {name!r} (full)", ours.full, theirs.local, tolerance)


def _names(where: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    missing = [name for name in expected if name not in actual]
    unexpected = [name for name in actual if name not in expected]
    if missing or unexpected:
        return f"{where}: other names: missing {missing}, unexpected {unexpected}"
    return f"{where}: names in other order: {list(actual)}, expected {list(expected)}"


def _values(where: str, actual: Any, expected: Any, tolerance: Tolerance) -> Iterator[str]:
    """The differences of two trees of dicts, lists, tensors, snapshots and plain values."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if list(actual) != list(expected):
            yield _names(where, actual, expected)
        for name in expected.keys() & actual.keys():
            yield from _values(f"{where} {name!r}", actual[name], expected[name], tolerance)
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)) and len(actual) == len(expected):
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            yield from _values(f"{where}[{index}]", a, e, tolerance)
    elif isinstance(expected, Snapshot) and isinstance(actual, Snapshot):
        if actual.spec != expected.spec:
            yield f"{where}: layout is {actual.spec}, expected {expected.spec}"
        yield from _values(f"{where} (local)", actual.local, expected.local, tolerance)
        yield from _values(f"{where} (full)", actual.full, expected.full, tolerance)
    elif isinstance(expected, Tensor) and isinstance(actual, Tensor):
        yield from _tensors(where, actual, expected, tolerance)
    elif type(actual) is not type(expected) or actual != expected:
        yield f"{where}: {_brief(actual)}, expected {_brief(expected)}"


def _tensors(where: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> Iterator[str]:
    if actual.shape != expected.shape or (tolerance == EXACT and actual.dtype != expected.dtype):
        yield f"{where}: {_brief(actual)}, expected {_brief(expected)}"
    elif tolerance == EXACT or not expected.is_floating_point():
        if not torch.equal(_bits(actual), _bits(expected)):
            yield f"{where}: not bit-equal, {_distance(actual, expected)}"
    elif not _are_close(actual.double(), expected.double(), tolerance):
        yield f"{where}: beyond {tolerance}, {_distance(actual, expected)}"


def _are_close(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    atol = tolerance.atol
    if tolerance.of_largest and expected.numel():
        atol += tolerance.of_largest * expected.abs().max().item()
    return torch.allclose(actual, expected, tolerance.rtol, atol)


def _bits(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _distance(actual: Tensor, expected: Tensor) -> str:
    difference = (actual.double() - expected.double()).abs()
    return f"at most {difference.max().item():.3g} apart where |expected| <= {expected.double().abs().max().item():.3g}"


def _brief(value: Any) -> str:
    if isinstance(value, Snapshot):
        return f"Snapshot({value.spec})"
    return f"Tensor{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
