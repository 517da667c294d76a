"""What ``acceptance.py`` checks of values: training on one GPU, in ways that one GPU can show.

Each part takes ``report``, which writes a verdict, and the name of a device. A part runs in a process of its own.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks.gpu.device import GATHER, REDUCE, Device, device
from benchmarks.gpu.groups import late_group, real_group, staged_group
from benchmarks.gpu.verdicts import Report, attempt, ensure
from fsdp2.core.comm import backends
from fsdp2.core.comm.streams import AcceleratorStreams, streams_for
from fsdp2.tensors import (
    Float8AllGatherTensor,
    Float8Scaling,
    Float8Tensor,
    Int8AllGatherTensor,
    NF4Tensor,
    wrap_parameters,
)
from fsdp2.tensors.float8 import magnitude, quantise_float8, row_magnitudes, scale_from

Values = dict[str, Tensor]
BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIRES: dict[str, Any] = {"bf16": torch.bfloat16, "int8": fsdp2.tensors.Int8Wire()}  # which keeps what it loses
NUM_STEPS = 3
LEARNING_RATE = 0.01  # more would make roundings grow from step to step
NUM_LATE_RANKS = 8


def sent_in(wire: str | None, param_dtype: torch.dtype | None = None) -> fsdp2.MixedPrecisionPolicy:
    """Gradients are summed in fp32, and travel in one of ``WIRES``; None: as they are summed."""
    return fsdp2.MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, reduce_wire=None if wire is None else WIRES[wire]
    )


# What is trained


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.gain)))


class Net(nn.Module):
    """Some of its tensors travel direct, some in buckets, and 8 ranks cut some unevenly."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(4))
        self.exit = nn.Linear(dim, 13)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(x)


def net(dim: int, on: str) -> Net:
    """The same values every time."""
    torch.manual_seed(0)
    return Net(dim).to(on)


def batch(dim: int, on: str, seed: int) -> Tensor:
    return torch.randn(16, dim, generator=torch.Generator().manual_seed(seed)).to(on)


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh, **options)
    fsdp2.fully_shard(model, mesh=mesh, **options)
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Far from its minimum, so that no gradient is a small difference of large numbers."""
    output = model(x).float()
    return (output + torch.linspace(-3.0, 6.0, output.size(-1), device=x.device)).square().mean()


def train(model: nn.Module, x: Callable[[int], Tensor], finish: Callable[[], None] = lambda: None) -> Values:
    """All losses and gradients, and the last parameters, on the host. ``x``: the inputs of a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, foreach=False)
    found: Values = {}
    for step in range(NUM_STEPS):
        loss = loss_of(model, x(step))
        loss.backward()
        found[f"step {step}: loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"step {step}: gradient of {name}"] = local(parameter.grad).detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = local(parameter).detach().clone()
    finish()
    return {name: value.cpu() for name, value in found.items()}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# How values are compared


def ensure_equal(actual: Values, expected: Values) -> str:
    """Bit for bit."""
    ensure(list(actual) == list(expected), f"other values: {sorted(set(actual) ^ set(expected))[:4]}")
    other = [name for name in expected if not torch.equal(actual[name], expected[name])]
    ensure(not other, f"{len(other)} of {len(expected)} values differ, the first are {other[:3]}")
    return f"{len(expected)} values equal bit for bit"


def ensure_close(actual: Values, expected: Values, limit: float) -> str:
    """By the norm of the difference over the norm of what is expected."""
    ensure(list(actual) == list(expected), f"other values: {sorted(set(actual) ^ set(expected))[:4]}")
    errors = {name: error_of(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    text = f"largest relative error {errors[worst]:.1e} ({worst}) of {len(expected)} values, limit {limit:.0e}"
    ensure(errors[worst] <= limit, text)
    return text


def error_of(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.nan
    difference, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return difference / max(size, 1e-12)


# (1) Training through the backend's collectives, with one rank


@contextmanager
def collectives_of_one_rank(on: Device) -> Iterator[list[str]]:
    """fsdp2 goes through the process group, though there is one rank. Lists what it launches. Not on the CPU: gloo
    gathers no tensors of several dtypes in one launch, and fsdp2 does not ask it to."""
    launches: list[str] = []
    if on.type == "cpu":
        yield launches
        return

    class Counted(backends.CollectiveComm):
        def all_gather(self, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
            launch = super().all_gather(outputs, inputs)
            return lambda: (launches.append(GATHER), launch())[1]

        def reduce_scatter(self, *, averages: bool = False) -> Any:
            launch = super().reduce_scatter(averages=averages)
            return lambda outputs, inputs: (launches.append(REDUCE), launch(outputs, inputs))[1]

    def comm_for(axis: Any, where: torch.device, *, is_async: bool = False) -> Any:
        if axis.group is None:
            return backends.LocalComm()
        return Counted(axis.group, on_stream=streams_for(where).runs_ahead and not is_async)

    ours = [module for name, module in sys.modules.items() if name.startswith("fsdp2.")]
    users = [module for module in ours if getattr(module, "comm_for", None) is backends.comm_for]
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "comm_for", comm_for))
        yield launches


ONE_RANK: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, kept after forward": {"reshard_after_forward": False},
    "bf16, offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy()},
}


def forced(report: Report, name: str) -> None:
    """Values of the model that is not sharded, whose bf16 copy computes, and whose gradients are cast."""
    on = device(name)
    with real_group(on):
        mesh = init_device_mesh(name, (1,))
        x = [batch(on.dim, name, seed) for seed in range(NUM_STEPS)]
        expected = _train_unsharded_in_bf16(net(on.dim, name), x)
        for text, options in ONE_RANK.items():

            def check(options: dict[str, Any] = options) -> str:
                with collectives_of_one_rank(on) as launches:
                    model = sharded(net(on.dim, name), mesh, mp_policy=BF16, **options)
                    actual = train(model, x.__getitem__, on.finish)
                counts = f"{launches.count(GATHER)} gathers and {launches.count(REDUCE)} reduce-scatters"
                ensure(GATHER in launches and REDUCE in launches, counts)
                return f"{counts}; {ensure_close(actual, expected, 2e-2 if name == 'cuda' else 0.0)}"

            attempt(report, f"trained through it, {text}", check)


def _train_unsharded_in_bf16(master: Net, x: Sequence[Tensor]) -> Values:
    compute = net(x[0].size(1), x[0].device.type).to(torch.bfloat16)
    found: Values = {}
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for mine, parameter in zip(compute.parameters(), master.parameters(), strict=True):
                mine.copy_(parameter)
        loss = loss_of(compute, x[step].to(torch.bfloat16))
        loss.backward()
        found[f"step {step}: loss"] = loss.detach().cpu()
        for (name, mine), parameter in zip(compute.named_parameters(), master.parameters(), strict=True):
            assert mine.grad is not None
            grad = mine.grad.float()
            found[f"step {step}: gradient of {name}"] = grad.cpu()
            with torch.no_grad():
                parameter.sub_(grad, alpha=LEARNING_RATE)
            mine.grad = None
    return found | {name: parameter.detach().cpu() for name, parameter in master.named_parameters()}


# (2) Ranks that are not there, whose data comes late


DELAYS = {"gathers late": {GATHER}, "reductions late": {REDUCE}, "both late": {GATHER, REDUCE}}
LATE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": BF16},
    "kept after forward": {"mp_policy": BF16, "reshard_after_forward": False},
    "offloaded": {"mp_policy": BF16, "offload_policy": fsdp2.CPUOffloadPolicy()},
    "int8 hooks": {"mp_policy": BF16},
    **{f"gradients sent in {text}": {"mp_policy": sent_in(text, torch.bfloat16)} for text in WIRES},
}


def train_late(on: Device, text: str, kinds: Sequence[str] | set[str], *, is_serial: bool = False) -> Values:
    """Values of rank 0, with collectives of ``kinds`` late."""
    mesh = init_device_mesh(on.type, (NUM_LATE_RANKS,))
    model = net(on.dim, on.type)
    if "hooks" in text:
        wrap_parameters(model, Int8AllGatherTensor)
    sharded(model, mesh, **LATE[text])
    x = [batch(on.dim, on.type, seed) for seed in range(NUM_STEPS)]
    on.is_serial = is_serial
    on.set_late(kinds)
    try:
        return train(model, x.__getitem__, on.finish)
    finally:
        on.is_serial = False
        on.set_late(())


def late(report: Report, name: str) -> None:
    """Bit for bit what the same ranks make if the host waits for each collective."""
    on = device(name)
    with late_group(NUM_LATE_RANKS, on):
        for text in LATE:
            attempt(report, text, partial(_check_late, on, text))
        attempt(report, "fp32, whose gathers the host waits for", partial(_check_by_hand, on))
        for kinds in DELAYS.values():
            attempt(
                report,
                f"{' and '.join(sorted(kinds))} that nobody waits for",
                partial(_check_control, on, kinds),
            )


def _check_late(on: Device, text: str) -> str:
    expected = train_late(on, text, (), is_serial=True)
    broken = [name for name, value in expected.items() if not value.isfinite().all()]
    ensure(not broken, f"not finite though the host waits: {broken[:3]}")
    for delay, kinds in DELAYS.items():
        try:
            ensure_equal(train_late(on, text, kinds), expected)
        except AssertionError as error:
            raise AssertionError(f"{delay}: {error}") from None
    return f"{', '.join(DELAYS)}: {len(expected)} values of {NUM_STEPS} steps equal bit for bit"


def _check_by_hand(on: Device) -> str:
    """Losses and gradients of the first step are those of a model that holds what the ranks hold."""
    dense = net(on.dim, on.type)
    chunks = {}
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            rows = math.ceil(parameter.size(0) / NUM_LATE_RANKS)
            chunks[name] = rows
            parameter.copy_(torch.cat([parameter[:rows]] * NUM_LATE_RANKS)[: parameter.size(0)])
    loss = loss_of(dense, batch(on.dim, on.type, 0))
    loss.backward()
    expected = {"step 0: loss": loss.detach().cpu()}
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None
        padded = parameter.grad.new_zeros(NUM_LATE_RANKS * chunks[name], *parameter.shape[1:])
        padded[: parameter.size(0)] = parameter.grad
        summed = padded.view(NUM_LATE_RANKS, chunks[name], *parameter.shape[1:]).sum(0) / NUM_LATE_RANKS
        expected[f"step 0: gradient of {name}"] = summed.cpu()
    found = train_late(on, "fp32", (), is_serial=True)
    return ensure_close({name: found[name] for name in expected}, expected, 1e-4)


def _check_control(on: Device, kinds: set[str]) -> str:
    """Without the waits of the compute stream, values must be others: else this part could not fail."""
    expected = train_late(on, "fp32", (), is_serial=True)
    with mock.patch.object(AcceleratorStreams, "wait_here"):
        found = train_late(on, "fp32", kinds)
    other = [name for name in expected if not torch.equal(found[name], expected[name])]
    ensure(bool(other), "nothing differs, so a wait that is left out would not be noticed")
    return f"noticed in {len(other)} of {len(expected)} values"


# (3) The same under torch's sanitizer of CUDA streams


def sanitizer(report: Report, name: str) -> None:
    """The caller has set TORCH_CUDA_SANITIZER=1."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    on = device(name)
    with late_group(NUM_LATE_RANKS, on):
        try:
            peer = net(on.dim, name)
            _shard_by_torch(peer, init_device_mesh(name, (NUM_LATE_RANKS,)), {})
            on.set_late(DELAYS["both late"])
            train(peer, lambda seed: batch(on.dim, name, seed), on.finish)
            report("PASS", "torch's fully_shard, to compare: no race found")
        except CUDASanitizerErrors as error:
            text = "torch's fully_shard, to compare: the sanitizer finds races there, too, so it may be wrong below"
            report("NOT RUN", f"{text}: {str(error.errors[0]).splitlines()[0]}")
        except Exception as error:  # what follows does not need it
            report("NOT RUN", f"torch's fully_shard, to compare: {error}", traceback=traceback.format_exc())
        for text in ("fp32", "bf16", "offloaded"):

            def check(text: str = text) -> str:
                return f"{len(train_late(on, text, DELAYS['both late']))} values of {NUM_STEPS} steps, no race found"

            attempt(report, text, check)

        def control() -> str:
            """The sanitizer must find a wait that is left out."""
            with mock.patch.object(AcceleratorStreams, "wait_here"):
                try:
                    train_late(on, "fp32", DELAYS["both late"])
                except CUDASanitizerErrors as error:
                    return f"found, {len(error.errors)} races in the first operation"
            raise AssertionError("a wait that is left out is not found")

        attempt(report, "a wait that is left out", control)


# (4) Ranks that share the GPU, by way of the host


SHARED: dict[str, tuple[tuple[int, ...], dict[str, Any], float]] = {
    "fp32": ((-1,), {}, 1e-4),
    "bf16": ((-1,), {"mp_policy": BF16}, 3e-2),
    "kept after forward": ((-1,), {"reshard_after_forward": False}, 1e-4),
    "offloaded": ((-1,), {"offload_policy": fsdp2.CPUOffloadPolicy()}, 1e-4),
    "replicated and sharded": ((2, -1), {}, 1e-4),
    # Rounded once on their way: to 8 bits of mantissa, or to 1/127 of the largest value of a block.
    "gradients sent in bf16": ((-1,), {"mp_policy": sent_in("bf16")}, 1e-2),
    "gradients sent in int8": ((-1,), {"mp_policy": sent_in("int8")}, 3e-2),
}


def ranks(report: Report, name: str, size: int) -> None:
    """Values are those of torch's ``fully_shard`` on the CPU, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        lost = ""
        try:
            torch.multiprocessing.spawn(_rank, (size, name, Path(folder)), nprocs=size)
        except Exception as error:  # a rank has ended; the verdicts say why
            lost = str(error)
        for index, text in enumerate(SHARED):
            found = sorted(Path(folder).glob(f"{index}-*"))
            verdicts = [each.read_text().split("\n", 2) for each in found]
            failed = [each for each in verdicts if each[0] == "FAIL"]
            if failed:
                report("FAIL", f"{size} ranks, {failed[0][1]}", traceback=[trace for _, _, trace in failed])
            elif len(found) == size:
                report("PASS", f"{size} ranks, {verdicts[0][1]}")
            else:
                report("FAIL", f"{size} ranks, {text}: a rank was lost before", traceback=lost)


def _rank(rank: int, size: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    on = device(name)
    with staged_group(rank, size, folder / "store", on):
        for index, (text, (shape, options, limit)) in enumerate(SHARED.items()):
            path = folder / f"{index}-{rank}"
            attempt(partial(_write, path, rank), text, partial(_check_rank, rank, size, on, shape, options, limit))
            status, detail, _ = path.read_text().split("\n", 2)
            if status == "FAIL" and "AssertionError" not in detail:  # others may wait for this rank for good
                sys.stdout.flush()
                os._exit(3)
            dist.barrier()


def _write(path: Path, rank: int, status: str, detail: str, **figures: object) -> None:
    where = f" (rank {rank})" if status == "FAIL" else ""
    path.write_text(f"{status}\n{detail}{where}\n{figures.get('traceback', '')}")


def _check_rank(rank: int, size: int, on: Device, shape: tuple[int, ...], options: dict[str, Any], limit: float) -> str:
    sizes = tuple(size // math.prod(other for other in shape if other > 0) if each < 0 else each for each in shape)
    names = ("replicate", "shard")[-len(sizes) :]
    x = [batch(on.dim, "cpu", 100 * step + rank) for step in range(NUM_STEPS)]
    gloo: dict[int | str, Any] = dict.fromkeys(names, "gloo")
    reference = net(on.dim, "cpu")
    _shard_by_torch(reference, init_device_mesh("cpu", sizes, mesh_dim_names=names, backend_override=gloo), options)
    expected = train(reference, x.__getitem__)
    mesh = init_device_mesh(on.type, sizes, mesh_dim_names=names)
    model = sharded(net(on.dim, on.type), mesh, **options)
    return ensure_close(train(model, lambda step: x[step].to(on.type), on.finish), expected, limit)


def _shard_by_torch(model: Net, mesh: DeviceMesh, options: Mapping[str, Any]) -> None:
    from torch.distributed import fsdp

    own: dict[str, Any] = {}
    for name, value in options.items():
        if name == "mp_policy":
            value = fsdp.MixedPrecisionPolicy(param_dtype=value.param_dtype, reduce_dtype=value.reduce_dtype)
        if name != "offload_policy":  # on the CPU, it is all the same
            own[name] = value
    for module in (*model.layers, model):
        fsdp.fully_shard(module, mesh=mesh, **own)


# (7) Float8 products, and weights in 4 bits


class Adapted(nn.Module):
    """A frozen weight in 4 bits, and an adapter of rank 16 that is trained."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim, bias=False)
        self.down = nn.Linear(dim, 16, bias=False)
        self.up = nn.Linear(16, dim, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def extensions(report: Report, name: str) -> None:
    on = device(name)
    multiplies = name == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    with real_group(on):
        for scaling in Float8Scaling:
            if multiplies:
                attempt(report, f"float8 product, {scaling.value}", partial(_check_product, on, scaling))
            else:
                report("NOT RUN", f"float8 product, {scaling.value}: needs CUDA of capability 8.9")
            attempt(report, f"float8, {scaling.value}", partial(_check_float8, on, scaling, multiplies))
        attempt(report, "NF4 below adapters", partial(_check_nf4, on))


def _check_product(on: Device, scaling: Float8Scaling) -> str:
    """What a float8 linear computes, against the product of the same rounded operands in fp32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(256, on.dim, generator=generator).to(on.type, torch.bfloat16) for _ in range(2))
    per_row = scaling is Float8Scaling.PER_ROW

    def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale_from(row_magnitudes(values) if per_row else magnitude(values))
        return quantise_float8(values, scale), scale

    (x8, x_scale), (w8, w_scale) = rounded(x), rounded(weight)
    actual, ops = _ops_of(lambda: nn.functional.linear(x, Float8Tensor(w8, w_scale, torch.bfloat16)))
    expected = (x8.float() * x_scale) @ (w8.float() * w_scale).t()
    ensure(any("scaled_mm" in op for op in ops), f"no scaled product among {ops}")
    return f"by {next(op for op in ops if 'scaled_mm' in op)}; " + ensure_close(
        {"product": actual.float().cpu()}, {"product": expected.cpu()}, 1e-2
    )


def _ops_of(call: Callable[[], Tensor]) -> tuple[Tensor, list[str]]:
    """What ``call`` returns, and the names of the operations that it runs."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = call()
    return result, sorted({event.key for event in profiler.key_averages()})


def _check_float8(on: Device, scaling: Float8Scaling, multiplies: bool) -> str:
    """Trained through the backend's collectives, against the same in bf16 without sharding. Values of 3 bits of
    mantissa differ by some percent."""
    x = [batch(on.dim, on.type, seed) for seed in range(NUM_STEPS)]
    expected = _train_unsharded_in_bf16(net(on.dim, on.type), x)
    with collectives_of_one_rank(on):
        model = net(on.dim, on.type)
        wrap_parameters(model, partial(Float8AllGatherTensor, scaling=scaling))
        sharded(model, init_device_mesh(on.type, (1,)), mp_policy=BF16)
        found = train(model, x.__getitem__, on.finish)
        _, ops = _ops_of(lambda: model(x[0]))
    ensure(any("scaled_mm" in op for op in ops) == multiplies, f"scaled products: expected {multiplies}, found {ops}")
    return ensure_close({n: plain(value) for n, value in found.items()}, expected, 0.2)


def plain(value: Tensor) -> Tensor:
    """``value`` without its subclass."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def _check_nf4(on: Device) -> str:
    """Trained through the backend's collectives, against dense weights of the same values."""
    x = [batch(on.dim, on.type, seed) for seed in range(NUM_STEPS)]
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Adapted(on.dim) for _ in range(4))).to(on.type)
        for layer in model:
            weight: Tensor = NF4Tensor.quantise(layer.base.weight.detach())
            weight = weight if is_sharded else weight.dequantise()  # type: ignore[attr-defined]
            layer.base.weight = nn.Parameter(weight, requires_grad=False)
        with collectives_of_one_rank(on):
            for module in (*model, model) if is_sharded else ():
                fsdp2.fully_shard(module, mesh=init_device_mesh(on.type, (1,)))
            values = train(model, x.__getitem__, on.finish)
        found.append(values)
    return ensure_close(found[1], found[0], 1e-5)
