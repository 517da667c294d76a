"""Simulates one model on a number of GPUs, sharded in one way: its step time and its peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from fsdp2.core import AfterForward, MixedPrecisionPolicy, schedules
from fsdp2.memory.plan import TEMPORARY, Held
from fsdp2.planner.groups import Axes, GroupCost, Wire, group_cost
from fsdp2.planner.machine import Machine, all_reduce, ranks_of
from fsdp2.planner.simulate import Accelerator, CallCost, StepTime, steady_step
from fsdp2.planner.work import Checkpointing, Param, UnitWork, Work

ALLOCATOR_SHARE = 1.191  # reserved per byte held at the peak: calibrated on one published row, docs/scale.md
FP8_CAST_NBYTES = 5  # per element of an operand: bf16 read for the magnitude, bf16 read again, fp8 written
_AFTER = {
    AfterForward.RESHARD: "reshard",
    AfterForward.KEEP: "keep",
    AfterForward.RESHARD_TO_SMALLER_MESH: "reshard to node",
}


class Precision(Enum):
    """The dtype of compute: all-gathers and products use it; gradients are summed in fp32. With ``FP8``, blocks
    multiply by their weights in fp8, as torchao's float8 training does, and all else is in bf16."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP32 = "fp32"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy to pass to ``fully_shard``."""
        return MixedPrecisionPolicy(self.dtype, torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """That of parameters and activations."""
        return torch.float32 if self is Precision.FP32 else torch.bfloat16


class Optimizer(Enum):
    """The kind of optimizer."""

    ADAMW = "adamw"
    MOMENTUM = "sgd with momentum"
    SGD = "sgd"

    @property
    def num_states(self) -> int:
        """The number of state tensors per parameter, in its size and dtype."""
        return {Optimizer.ADAMW: 2, Optimizer.MOMENTUM: 1, Optimizer.SGD: 0}[self]

    @property
    def num_moved(self) -> int:
        """The number of tensors that a step reads or writes. It reads the gradient, and reads and writes the others."""
        return 1 + 2 * (1 + self.num_states)


class Kernels(Enum):
    """What runs under ``torch.compile``: nothing, blocks, or blocks and the loss."""

    EAGER = "eager"
    COMPILED = "compiled"
    COMPILED_LOSS = "compiled with loss"

    @property
    def are_compiled(self) -> bool:
        """Whether blocks are."""
        return self is not Kernels.EAGER


@dataclass(frozen=True)
class Choice:
    """A way to shard.

    Attributes:
        shard_size: the number of ranks to shard over, with replicas over the others (HSDP); None is all.
        num_kept: how many of the last blocks stay unsharded after forward, where ``after_forward`` reshards.
        offloads: whether shards, gradients and optimizer are in host memory.
    """

    shard_size: int | None = None
    after_forward: AfterForward = AfterForward.RESHARD
    wire: Wire = Wire.BF16
    shares_communicator: bool = True
    checkpointing: Checkpointing = Checkpointing.NONE
    num_kept: int = 0
    offloads: bool = False

    @property
    def name(self) -> str:
        parts = [self.sharding, self.between_passes]
        if self.checkpointing is not Checkpointing.NONE:
            parts.append(f"{self.checkpointing.value} checkpointing")
        if self.wire is Wire.FP8:
            parts.append("fp8 gathers")
        if self.offloads:
            parts.append("offload")
        return ", ".join(parts)

    @property
    def sharding(self) -> str:
        return f"HSDP {self.shard_size}" if self.shard_size else "FSDP"

    @property
    def between_passes(self) -> str:
        """What happens to blocks between forward and backward."""
        return f"keep last {self.num_kept}" if self.num_kept else _AFTER[self.after_forward]

    @property
    def is_exact(self) -> bool:
        """Rounding on the wire changes what is learned, so it is never recommended."""
        return self.wire is Wire.BF16


@dataclass(frozen=True)
class Scenario:
    """One step.

    Attributes:
        units: one for each call in the order of forward, without the root. Calls of one unit have one name.
        tokens: the tokens of one GPU in a step; samples, if the model takes no tokens.
        root: the root's own parameters.
        members: all units in the order of the model, those that this forward does not use among them; without it, those
            of ``units``.
        mp_policy: the policy of units; None is that of ``precision``.
        micro_batches: how many forwards and backwards a step has.
        tensor_parallel: how many neighbouring GPUs share ``units``, which are the part of one of them.
        ignored: parameters that stay whole on each rank, as ``buffers_nbytes`` do.
    """

    machine: Machine
    units: tuple[UnitWork, ...]
    tokens: float
    num_gpus: int
    choice: Choice
    root: tuple[Param, ...] = ()
    members: tuple[UnitWork, ...] = ()
    ignored: tuple[Param, ...] = ()
    buffers_nbytes: int = 0
    precision: Precision = Precision.BF16
    mp_policy: MixedPrecisionPolicy | None = None
    optimizer: Optimizer = Optimizer.ADAMW
    kernels: Kernels = Kernels.COMPILED
    micro_batches: int = 1
    tensor_parallel: int = 1

    @property
    def distinct(self) -> tuple[UnitWork, ...]:
        """Each unit once."""
        found: dict[str, UnitWork] = {}
        for unit in (*self.members, *self.units):
            found.setdefault(unit.name, unit)
        return tuple(found.values())

    @property
    def axes(self) -> Axes:
        """The axes of ranks: tensor parallelism uses neighbours, sharding comes next, replicas are furthest apart."""
        node, size = self.machine.node_size, self.tensor_parallel
        total = self.num_gpus // size
        shard_size = min(self.choice.shard_size or total, total)
        resting = None
        if self.choice.after_forward is AfterForward.RESHARD_TO_SMALLER_MESH:
            resting = ranks_of(max(1, min(node // size, shard_size)), size, node)
        replicate = ranks_of(total // shard_size, size * shard_size, node)
        return Axes(ranks_of(shard_size, size, node), replicate, resting)

    def is_fused(self, *, is_block: bool) -> bool:
        """Whether the kernels between two products are one."""
        return is_block and self.kernels.are_compiled

    def seconds(self, work: Work, *, is_block: bool) -> float:
        """The time of ``work`` on the slowest GPU: products and attention at the rates that the machine reaches, and
        other kernels at the rate of a copy."""
        machine, plain = self.machine, "fp32" if self.precision is Precision.FP32 else "bf16"
        is_fused = self.is_fused(is_block=is_block)
        moved = work.fused_nbytes if is_fused else work.moved_nbytes
        seconds = sum(machine.attention_seconds(each, plain) for each in work.attention)
        for product in work.products:
            if self.precision is Precision.FP8 and is_block and product.by_weight:
                seconds += machine.product_seconds(product, "fp8")
                moved += product.operand_numel * FP8_CAST_NBYTES
            else:
                seconds += machine.product_seconds(product, plain)
        delays = work.num_kernels(is_fused=is_fused) * machine.kernel_latency
        return seconds / machine.slowest_of(self.num_gpus) + moved / machine.copy_bandwidth + delays


@dataclass(frozen=True)
class Result:
    """``grads_nbytes`` counts sharded gradients. ``memory`` is held at the peak in addition to parameters, buffers and
    optimizer, by purpose. ``host_nbytes`` is what offloading puts into the host memory of one node. The rest is per
    GPU."""

    time: StepTime
    tokens_per_second: float
    params_nbytes: float
    optimizer_nbytes: float
    grads_nbytes: float
    memory: dict[Held, float]
    buffers_nbytes: float = 0.0
    host_nbytes: float = 0.0

    @property
    def state_nbytes(self) -> float:
        return self.params_nbytes + self.buffers_nbytes + self.optimizer_nbytes

    @property
    def peak_nbytes(self) -> float:
        return self.state_nbytes + sum(self.memory.values())

    @property
    def reserved_nbytes(self) -> float:
        """The memory that the caching allocator takes."""
        return ALLOCATOR_SHARE * self.peak_nbytes


def simulate(scenario: Scenario) -> Result:
    """Simulate the second step of ``scenario``. With ``offloads``, the optimizer's time on the host is not known, and
    left out."""
    choice, machine, optimizer = scenario.choice, scenario.machine, scenario.optimizer
    device = accelerator(scenario)
    groups = [group for group in device.groups if group is not None]
    params, trainable = (sum(getattr(group, name) for group in groups) for name in ("shards_nbytes", "trained_nbytes"))
    on_host = params + trainable * (1 + optimizer.num_states) if choice.offloads else 0
    updated = _updated_nbytes(scenario, device.groups)
    time = steady_step(device, machine.contention)
    return Result(
        time,
        scenario.tokens / time.step,
        sum(param.nbytes for param in scenario.ignored) + (0 if choice.offloads else params),
        updated * optimizer.num_states,
        updated,
        {held: device.memory.at_peak.get(held, 0) for held in (*TEMPORARY, Held.SHARD_GRADIENTS, Held.SAVED)},
        buffers_nbytes=scenario.buffers_nbytes,
        host_nbytes=on_host * min(machine.node_size, scenario.num_gpus),
    )


def accelerator(scenario: Scenario) -> Accelerator:
    """The device that runs ``scenario``."""
    wires = {True: scenario.choice.wire, False: Wire.BF16}
    root = _group_cost(scenario, scenario.root, Wire.BF16)
    groups = [root, *(_group_cost(scenario, unit.params, wires[unit.is_block]) for unit in scenario.distinct)]
    numbers = {unit.name: number for number, unit in enumerate(scenario.distinct, 1)}
    updated = _updated_nbytes(scenario, groups)
    return Accelerator(
        groups,
        [_call_cost(scenario, unit, numbers[unit.name]) for unit in scenario.units],
        _rules(scenario),
        shares_communicator=scenario.choice.shares_communicator,
        optimizer=updated * scenario.optimizer.num_moved / scenario.machine.copy_bandwidth + _scales_seconds(scenario),
        micro_batches=scenario.micro_batches,
    )


def _updated_nbytes(scenario: Scenario, groups: Sequence[GroupCost | None]) -> int:
    """The bytes that the optimizer updates on the device."""
    whole = sum(param.nbytes for param in scenario.ignored if param.trainable)
    return whole + (0 if scenario.choice.offloads else sum(group.trained_nbytes for group in groups if group))


def _rules(scenario: Scenario) -> list[schedules.UnitRules]:
    """The rules that ``fully_shard`` gets for each unit, first for the root, which stays unsharded."""
    choice, units = scenario.choice, scenario.distinct
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    kept = set(blocks[len(blocks) - choice.num_kept :])
    after = [AfterForward.KEEP if index in kept else choice.after_forward for index in range(len(units))]
    return [schedules.UnitRules(after_forward=each) for each in (AfterForward.KEEP, *after)]


def _group_cost(scenario: Scenario, params: tuple[Param, ...], wire: Wire) -> GroupCost | None:
    if not params:
        return None
    offloads, policy = scenario.choice.offloads, scenario.mp_policy or scenario.precision.policy
    return group_cost(scenario.machine, params, scenario.axes, wire, policy, offloads=offloads)


def _call_cost(scenario: Scenario, work: UnitWork, unit: int) -> CallCost:
    return CallCost(
        unit,
        forward=scenario.seconds(work.forward, is_block=work.is_block),
        backward=scenario.seconds(work.backward, is_block=work.is_block),
        saved_nbytes=int(work.saved_nbytes - work.unread_nbytes * scenario.is_fused(is_block=work.is_block)),
        working_nbytes=int(work.working_nbytes),
        left_nbytes=int(work.left_nbytes),
        has_backward=work.has_backward,
        hands_on=work.hands_on,
        forward_fixed=work.sent_s[0],
        backward_fixed=work.sent_s[1],
    )


def _scales_seconds(scenario: Scenario) -> float:
    """With all-gathers in fp8, one all-reduce of the scales of all matrices follows the optimizer."""
    if scenario.choice.wire is not Wire.FP8:
        return 0.0
    matrices = sum(len(param.shape) > 1 for unit in scenario.distinct if unit.is_block for param in unit.params)
    return all_reduce(scenario.machine, scenario.axes.shard, 4.0 * matrices).alone
