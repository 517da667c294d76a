"""One model, on so many GPUs, sharded in one way: its step time, and what it holds at the peak."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp2.schedule.schedule import AfterForward, UnitRules

from .groups import Axes, Wire, group_cost
from .hardware import Hardware, all_reduce, gather, ranks_of
from .memory import Held
from .simulate import Accelerator, StepTime, UnitCost, steady_step
from .workload import Batch, Flops, Llama, UnitWork

_MASTER_NBYTES = 4
_ADAM_NBYTES = 8  # two moments in fp32
_ADAM_TRAFFIC_NBYTES = 28  # reads four tensors, writes three


@dataclass(frozen=True)
class Choice:
    """A way to shard. ``shard_size``: over how many ranks, with replicas over the others (HSDP); None is over all."""

    name: str
    shard_size: int | None = None
    after_forward: AfterForward = AfterForward.RESHARD
    wire: Wire = Wire.BF16
    shares_communicator: bool = True


@dataclass(frozen=True)
class Scenario:
    """``fp8``: the blocks' products with weights run in fp8. ``hides_exchanges``: those of tensor parallelism overlap
    with compute (async TP)."""

    hardware: Hardware
    model: Llama
    batch: Batch
    num_gpus: int
    choice: Choice
    fp8: bool = False
    hides_exchanges: bool = False

    @property
    def data_parallel_size(self) -> int:
        return self.num_gpus // self.batch.tensor_parallel

    @property
    def axes(self) -> Axes:
        """Tensor parallelism takes neighbours, sharding comes next, replicas are furthest apart."""
        tp, node, total = self.batch.tensor_parallel, self.hardware.node_size, self.data_parallel_size
        shard_size = min(self.choice.shard_size or total, total)
        resting = None
        if self.choice.after_forward is AfterForward.RESHARD_TO_SMALLER_MESH:
            resting = ranks_of(min(node, shard_size), tp, node)
        shard = ranks_of(shard_size, tp, node)
        return Axes(shard, ranks_of(total // shard_size, tp * shard_size, node), resting)

    @property
    def is_possible(self) -> bool:
        """Whether the ranks divide into groups of the size that the choice asks for, and more than one of them."""
        total, size = self.data_parallel_size, self.choice.shard_size
        if self.choice.after_forward is AfterForward.RESHARD_TO_SMALLER_MESH and total <= self.hardware.node_size:
            return False
        return size is None or (total % size == 0 and total > size)


@dataclass(frozen=True)
class Result:
    """``state_nbytes``: of parameters and optimizer. ``memory``: what else is held at the peak, and for what."""

    time: StepTime
    tokens_per_second: float
    state_nbytes: float
    memory: dict[Held, float]

    @property
    def peak_nbytes(self) -> float:
        return self.state_nbytes + sum(self.memory.values())


def simulate(scenario: Scenario) -> Result:
    """The second step of ``scenario``; ``tokens_per_second`` are those of one GPU."""
    units = [_unit_cost(scenario, work) for work in scenario.model.units(scenario.batch)]
    numel = sum(unit.group.shard_numel for unit in units if unit.group is not None)
    device = Accelerator(
        units,
        [
            UnitRules(after_forward=AfterForward.KEEP),
            *(UnitRules(after_forward=scenario.choice.after_forward) for _ in units),
        ],
        shares_communicator=scenario.choice.shares_communicator,
        optimizer=numel * _ADAM_TRAFFIC_NBYTES / scenario.hardware.copy_bandwidth + _scales_seconds(scenario),
    )
    time = steady_step(device, scenario.hardware.contention)
    tokens_per_second = scenario.batch.tokens / scenario.batch.tensor_parallel / time.step
    return Result(time, tokens_per_second, numel * (_MASTER_NBYTES + _ADAM_NBYTES), device.memory.peak)


def calibrated(scenario: Scenario, tokens_per_second: float) -> Hardware:
    """The hardware of ``scenario`` with the utilisation that gives so many tokens per second and GPU."""
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        hardware = replace(scenario.hardware, utilisation=middle)
        too_fast = simulate(replace(scenario, hardware=hardware)).tokens_per_second > tokens_per_second
        low, high = (low, middle) if too_fast else (middle, high)
    return replace(scenario.hardware, utilisation=high)


def _unit_cost(scenario: Scenario, work: UnitWork) -> UnitCost:
    hardware = scenario.hardware
    wire = scenario.choice.wire if work.name == "block" else Wire.BF16
    exchange = 0.0
    if not scenario.hides_exchanges:
        exchange = gather(
            hardware, ranks_of(scenario.batch.tensor_parallel, 1, hardware.node_size), work.exchanged_nbytes
        ).alone
    forward, backward = (exchange * count for count in work.exchanges)
    return UnitCost(
        name=work.name,
        forward=_seconds(scenario, work.forward),
        backward=_seconds(scenario, work.backward),
        group=group_cost(hardware, work.params, scenario.axes, wire),
        saved_nbytes=work.saved_nbytes,
        working_nbytes=work.working_nbytes,
        forward_fixed=forward,
        backward_fixed=backward,
    )


def _seconds(scenario: Scenario, flops: Flops) -> float:
    hardware = scenario.hardware
    linear_peak = hardware.fp8_flops if scenario.fp8 else hardware.bf16_flops
    return (flops.linear / linear_peak + flops.other / hardware.bf16_flops) / hardware.utilisation


def _scales_seconds(scenario: Scenario) -> float:
    """With fp8 on the wire, one all-reduce of all scales follows the optimizer."""
    if scenario.choice.wire is not Wire.FP8:
        return 0.0
    return all_reduce(scenario.hardware, scenario.axes.shard, 4.0 * 7 * scenario.model.num_blocks).alone
