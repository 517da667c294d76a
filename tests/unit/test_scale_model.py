"""The model of ``benchmarks/scale``: cases that can be computed by hand, and what holds whatever the figures are."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.core.schedule.schedule import AfterForward, UnitRules
from fsdp2.report import trace
from tests.distributed.support import Block, step
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scale import gloo
from scale.pipeline import Pipeline, simulate_stages
from scale.tensor_parallel import Exchange, ParallelScenario, TensorParallel
from scale.workload import (
    HEAD_DIM,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    Batch,
    Checkpointing,
    LossOfAPart,
    observed,
    scenario,
)

from fsdp2.planner.groups import Flight, GroupCost
from fsdp2.planner.machine import (
    Contention,
    Link,
    Machine,
    Ranks,
    Resource,
    Transfer,
    all_reduce,
    gather,
    ranks_of,
)
from fsdp2.planner.machines import H100
from fsdp2.planner.queues import Op, Queues, Stream, run
from fsdp2.planner.scenario import Choice, Scenario, simulate
from fsdp2.planner.simulate import Accelerator, CallCost, Held, StepTime, steady_step
from fsdp2.planner.work import UnitWork, Work

KEEP, SMALLER = AfterForward.KEEP, AfterForward.RESHARD_TO_SMALLER_MESH
# Round figures: a second per byte sent, unless said otherwise.
PLAIN = Machine(
    name="round",
    bf16_flops=1e15,
    fp8_flops=2e15,
    utilisation=0.5,
    memory_nbytes=1e12,
    copy_bandwidth=float("inf"),
    node_size=8,
    in_node=Link(bandwidth=400.0, latency=0.01),
    network=Link(bandwidth=25.0, latency=1.0),
    bandwidth_efficiency=1.0,
    launch_latency=0.0,
    channels=16,
)
FSDP = Choice()


@pytest.mark.parametrize(
    ("found", "latency", "seconds", "resource"),
    [
        (gather(PLAIN, Ranks(8, 8), 800), 7 * 0.01, 700 / 400, Resource.IN_NODE),  # all parts but one's own
        # A hop leaves each node, the others stay in one; a node's adapters are shared.
        (gather(PLAIN, Ranks(32, 8), 3200), 4 * 1.0 + 27 * 0.01, 3100 / (8 * 25), Resource.NETWORK),
        (gather(PLAIN, ranks_of(4, stride=8, node_size=8), 400), 3 * 1.0, 300 / 25, Resource.NETWORK),  # one adapter
        # Everything twice, by a tree: log2(16) hops, and back.
        (all_reduce(PLAIN, Ranks(16, 1), 1600), 2 * 4 * 1.0, 2 * 1500 / 25, Resource.NETWORK),
        (gather(PLAIN, Ranks(8, 8), 800, 16), 7 * 0.01, 700 / 400, Resource.IN_NODE),
        (gather(PLAIN, Ranks(8, 8), 800, 17), 2 * 7 * 0.01, 700 / 400, Resource.IN_NODE),  # more than channels
    ],
)
def test_collectives_take_hops_and_bytes(found: Transfer, latency: float, seconds: float, resource: Resource) -> None:
    assert (found.latency, found.seconds) == (pytest.approx(latency), pytest.approx(seconds))
    assert found.resource is resource
    assert found.alone == found.latency + found.seconds


def _run(queues: Queues, **contention: float) -> dict[str, tuple[float, float]]:
    run(queues.ops, Contention(**contention))
    return {op.label: (op.start, op.end) for op in queues.ops}


def test_streams_run_beside_each_other_in_order_and_wait_for_what_they_are_told_to() -> None:
    queues = Queues()
    queues.enqueue(Stream.GATHER, "gather", fixed=1, work=2, resource=Resource.NETWORK)
    queues.enqueue(Stream.COMPUTE, "early", work=1)
    queues.wait(Stream.COMPUTE, queues.last(Stream.GATHER))
    queues.enqueue(Stream.COMPUTE, "late", work=1)
    assert _run(queues) == {"gather": (0, 3), "early": (0, 1), "late": (3, 4)}
    queues.wait(Stream.COMPUTE, Op("elsewhere", Stream.GATHER, 0, 1, Resource.NETWORK, ()))
    queues.enqueue(Stream.COMPUTE, "never", work=1)
    with pytest.raises(ValueError, match=r"wait for what never ends: \['never'\]"):
        run(queues.ops, Contention())


@pytest.mark.parametrize(
    ("work", "link", "other", "contention", "expected"),
    [
        # alone for 1 s of latency, which is not shared, both at half for 2 s, alone for 1 s
        (2, Resource.NETWORK, {"fixed": 1, "work": 2, "resource": Resource.NETWORK}, {}, (3, 4)),
        (2, Resource.IN_NODE, {"work": 2, "resource": Resource.NETWORK}, {}, (2, 2)),  # links of different kinds
        (1, Resource.NETWORK, {"work": 4}, {"compute": 0.25, "transfer": 0.5}, (2, 4.5)),  # while both run
    ],
)
def test_what_shares_a_link_or_the_device_slows_each_other_down(
    work: float, link: Resource, other: dict[str, Any], contention: dict[str, float], expected: tuple[float, float]
) -> None:
    queues = Queues()
    queues.enqueue(Stream.GATHER, "gather", work=work, resource=link)
    queues.enqueue(Stream.REDUCE if "resource" in other else Stream.COMPUTE, "other", **other)
    assert _run(queues, **contention) == {"gather": (0, expected[0]), "other": (0, expected[1])}


# Steps


def _group(gather_seconds: float, reduce_seconds: float, *, regather: float | None = None) -> GroupCost:
    """A hundred bytes unsharded, a hundred of gradients, which are cast to two hundred."""
    gather, again, reduce = (
        Flight(Transfer(0.0, each or 0.0, Resource.NETWORK)) for each in (gather_seconds, regather, reduce_seconds)
    )
    return GroupCost(
        gather=gather,
        regather=None if regather is None else again,
        reduce=(reduce,),
        unsharded_nbytes=100,
        grad_nbytes=100,
        cast_nbytes=200,
        reduced_nbytes=10,
        resting_nbytes=0 if regather is None else 25,
        shards_nbytes=40,
        trained_nbytes=40,
    )


def _device(
    num_units: int,
    group: GroupCost,
    *,
    forward: float = 4.0,
    backward: float = 8.0,
    after_forward: AfterForward = AfterForward.RESHARD,
    kind: type[Accelerator] = Accelerator,
) -> Accelerator:
    calls = [CallCost(unit + 1, forward, backward) for unit in range(num_units)]
    rules = [UnitRules(after_forward=KEEP), *[UnitRules(after_forward=after_forward)] * num_units]
    return kind([None, *[group] * num_units], calls, rules)


@pytest.mark.parametrize(
    ("num_units", "after_forward", "exposed"),
    [
        (1, AfterForward.RESHARD, 1 + 1 + 2),  # one group hides nothing
        (2, AfterForward.RESHARD, 1 + 1 + 2),  # first of forward, first of backward; last of backward
        (2, KEEP, 1 + 2),
        (2, SMALLER, 1 + 0.25 + 2),
    ],
)
def test_all_but_the_ends_is_hidden(num_units: int, after_forward: AfterForward, exposed: float) -> None:
    group = _group(1, 2, regather=0.25 if after_forward is SMALLER else None)
    time = steady_step(_device(num_units, group, after_forward=after_forward), Contention())
    assert time == StepTime(step=pytest.approx(num_units * 12 + exposed), compute=num_units * 12)


def test_a_reduction_that_outlasts_the_next_backward_holds_it_up() -> None:
    """One is in flight: the next backward may run meanwhile, the one behind it may not."""
    device = _device(3, _group(gather_seconds=0, reduce_seconds=10), forward=0, backward=8)
    assert steady_step(device, Contention()).step == pytest.approx(8 + 10 + 10 + 10)


def test_two_groups_are_in_flight_and_nothing_is_held_when_a_step_has_ended() -> None:
    """At the end of the fifth backward of six, four units rest: the fourth has been prefetched and has not arrived."""
    device = _device(6, _group(1, 2, regather=0.25), after_forward=SMALLER)
    device.step()
    assert device.memory.peak[Held.GROUPS] == 2 * 100 + 4 * 25
    assert device.memory.peak[Held.GRADIENTS] == (100 + 200) + 100  # the older one with its casts
    assert set(device.memory.now.values()) == {0}


def test_on_the_cpu_the_program_launches_and_finishes() -> None:
    """Copies and sums hold up compute there, and half of the next backward is what a reduction may take."""
    travel = Flight(Transfer(0.0, 1, Resource.NETWORK), before=0.5, behind=0.25)
    group = replace(
        _group(1, 2), gather=travel, reduce=(replace(travel, transfer=replace(travel.transfer, seconds=5)),)
    )
    time = steady_step(_device(2, group, kind=gloo.Cpu), Contention())
    # Gathers: launch and unpack each of four, and wait for the first of either pass. Reductions: launch and land both;
    # while the first travels, a gather is unpacked and half of a backward runs; nothing runs beside the second.
    assert time.exposed == pytest.approx(4 * 0.75 + 2 * 1 + 2 * 0.75 + (5 - 0.25 - 4) + 5)


# Models and scenarios


def test_models_have_as_many_parameters_as_published() -> None:
    found = [model.num_params for model in (LLAMA_8B, LLAMA_70B, LLAMA_405B)]
    assert found == [8_030_261_248, 70_553_706_496, 405_853_388_800]


@pytest.mark.ci
def test_a_model_observed_again_is_seen_the_same() -> None:
    """Storages of inputs that are gone must not be taken for those that all blocks share."""
    first, again, once_more = (observed.__wrapped__(LLAMA_8B, 1, 8192).kinds[0] for _ in range(3))
    assert first == again == once_more


def _parallel(*sizes: int) -> list[Scenario]:
    batches = (Batch(8192, checkpointing=Checkpointing.FULL, tensor_parallel=size) for size in sizes)
    return [scenario(H100, LLAMA_8B, batch, 256, FSDP) for batch in batches]


def test_tensor_parallelism_divides_parameters_and_products_and_gathers_whole_sequences_to_compute() -> None:
    """Block: what is kept is divided, what its backward works on is not. Head: its input is gathered and kept.

    torch's ``loss_parallel`` makes log-probabilities, zeros, exponentials and their sum: four times logits. The loss
    of one GPU makes log-probabilities, their gradients and those of logits."""
    whole, divided = _parallel(1, 8)
    assert divided.axes.shard == Ranks(32, 1)
    assert simulate(divided).state_nbytes == pytest.approx(simulate(whole).state_nbytes, rel=1e-2)  # 8 x 32 ranks
    for part, unit in zip(divided.units, whole.units, strict=True):
        assert part.forward.linear == unit.forward.linear / 8
        assert part.backward.other == unit.backward.other / 8
    block, part = whole.units[1], divided.units[1]
    activations = 2 * 8192 * LLAMA_8B.dim
    assert part.saved_nbytes == block.saved_nbytes / 8 == activations / 8
    assert part.working_nbytes > block.working_nbytes / 8 + 2 * activations
    logits = 4 * 8192 * LLAMA_8B.vocab_size / 8
    angles = 8 * 8192 * HEAD_DIM / 2  # which all blocks are given
    assert divided.units[-1].saved_nbytes == pytest.approx(logits + activations * (1 + 4 / 8) + angles, rel=1e-3)
    for copies, of_loss, found in ((3, 8 * logits, whole), (4, logits, divided)):
        head = found.units[-1]
        assert copies * of_loss < head.saved_nbytes + head.working_nbytes < (copies + 1) * of_loss


def test_the_loss_of_all_words_computed_as_that_of_a_part_is_cross_entropy() -> None:
    logits, labels = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    expected = torch.nn.functional.cross_entropy(logits, labels)
    found = LossOfAPart.apply(logits, labels[:, None])
    assert found.item() == pytest.approx(expected.item())
    (ours,), (theirs,) = (torch.autograd.grad(loss, logits) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs)


def _exchanging(*exchanges: Exchange, async_tp: float | None = None) -> float:
    """Seconds that ``exchanges`` add to a forward: gathers take a second per 400 bytes, copies one per 100."""
    machine = replace(PLAIN, copy_bandwidth=100.0, in_node=Link(400.0, 0.0), bf16_flops=1.0, utilisation=1.0)
    second = Work(linear=1.0)
    sent = TensorParallel(machine, 8, async_tp=async_tp).seconds(exchanges, is_block=True)
    unit = UnitWork("block", (), second, Work(), 0.0, 0.0, sent_s=(sent, 0.0), is_block=True)
    found = simulate(ParallelScenario(machine, (unit,), 1 / 8, 64, Choice(), tensor_parallel=8))
    return found.time.step - 1


TRAVELS = 1600 * 7 / 8 / 400
GATHERS, SUMS = (Exchange(800.0, gathers, product=TRAVELS - 1) for gathers in (True, False))
HIDDEN, ALONE = replace(GATHERS, product=2 * TRAVELS), Exchange(800.0, gathers=False)


@pytest.mark.parametrize(
    ("exchange", "async_tp", "expected"),
    [
        (Exchange(800.0, gathers=True), None, TRAVELS + 2 * 1600 / 100),  # a transfer and a copy
        (ALONE, 1.0, _exchanging(ALONE)),  # it belongs to no single product
        (GATHERS, 1.0, 1),  # all but what is longer than the product
        (HIDDEN, 1.0, 0),
        (SUMS, 1.0, 1 + 1600 * (1 + 1 / 8) / 100),  # in a kernel of its own
        (HIDDEN, 0.75, TRAVELS / 4),  # parts of a product are slower than the whole
        (GATHERS, 0.75, 1 + (TRAVELS - 1) / 4),
    ],
)
def test_async_tp_hides_a_share_of_a_transfer(exchange: Exchange, async_tp: float | None, expected: float) -> None:
    assert _exchanging(exchange, async_tp=async_tp) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pipeline", "seconds", "in_flight"),
    [
        (Pipeline(4, 6, 1), 3.0 * (6 + 3), 4),  # filled and emptied once
        (Pipeline(4, 6, 3), 3.0 * (6 + 1), None),  # interleaving shortens that
        (Pipeline(4, 2), 3.0 * (2 + 3), 2),
    ],
)
def test_a_pipeline_is_filled_and_emptied_and_its_first_gpu_holds_activations_of_as_many_microbatches_as_gpus(
    pipeline: Pipeline, seconds: float, in_flight: int | None
) -> None:
    """Of a microbatch of 8 tokens, whose forward takes a second and backward two, on groups of 4 GPUs."""
    machine = replace(PLAIN, bf16_flops=1.0, utilisation=1.0)
    block = UnitWork("block", (), Work(linear=1.0), Work(linear=2.0), 5.0, 0.0, is_block=True)
    head = replace(block, name="head", is_block=False)
    microbatch = ParallelScenario(machine, (block, head), 8 / 4, 64, FSDP, tensor_parallel=4)
    found = simulate_stages(microbatch, pipeline)
    assert found.time.step == pytest.approx(seconds)
    assert found.tokens_per_second == pytest.approx(pipeline.num_microbatches * 8 / 4 / 4 / seconds)
    if in_flight is not None:
        assert found.memory[Held.ACTIVATIONS] == 5.0 * in_flight


def test_a_model_is_divided_into_stages_of_as_many_blocks_as_the_longest() -> None:
    assert [Pipeline(8, 8, num_chunks).num_blocks(126) for num_chunks in (1, 2, 4, 5)] == [16, 16, 16, 20]


PIECES = gloo.Measured(
    forward=4.0,
    backward=8.0,
    gather_launch=0.5,
    gather_travel=2.0,
    gather_cpu=1.0,
    gather_finish=0.25,
    plain=4.0,
    beside=4.75,
    reduce_launch=0.5,
    reduce_travel=2.0,
    reduce_finish=0.25,
    settle=0.125,
    step=0.0,
    cores=1.0,
)


@pytest.mark.parametrize(
    ("travel_cpu", "cores", "together", "expected"),
    [
        (0.0, 1.0, 4.0, Contention()),
        (0.5, 1.0, 4.5, Contention(compute=0.25)),  # a quarter of a core, which compute loses for 2 s
        (2.0, 1.0, 6.0, Contention(compute=0.5, transfer=0.5)),  # half as fast: compute loses half a core for 4 s
        (2.0, 1.0, 10.0, Contention(compute=0.5, transfer=0.99)),  # the transfer waits until compute is over
        (2.0, 1.0, 9.0, Contention(compute=0.5, transfer=0.875)),  # all but 1 s of it
        (0.5, 0.5, 5.0, Contention(compute=0.5)),  # half of what each of two ranks on one core has
        (2.0, 1.5, 5.0, Contention(compute=0.5)),  # half a core is free
        (2.0, 2.0, 4.0, Contention()),
    ],
)
def test_a_transfer_and_compute_slow_each_other_where_ranks_fill_the_cores(
    travel_cpu: float, cores: float, together: float, expected: Contention
) -> None:
    busy = PIECES.gather_launch + PIECES.gather_finish
    found = replace(PIECES, gather_cpu=busy + travel_cpu, beside=busy + together, cores=cores)
    assert gloo.contention(found) == expected


def test_a_step_on_gloo_ranks_is_compute_copies_and_what_compute_does_not_hide() -> None:
    """As on the CPU above: of two blocks' transfers, the first gather of either pass and the last reduction show."""
    free = replace(PIECES, gather_cpu=0.75)
    found = gloo.predict(gloo.Case(2, 1, 2, 1, 1), free)
    assert found.compute == 2 * 12
    assert found.exposed == pytest.approx(4 * 0.75 + 2 * 2 + 2 * 0.75 + 2 + 0.125)
    assert gloo.predict(gloo.Case(2, 1, 2, 1, 1), PIECES).step > found.step


def _actions(after_forward: AfterForward) -> list[str]:
    flight = Flight(Transfer(0.0, 1.0, Resource.NETWORK))
    device = _device(3, GroupCost(flight, flight, (flight,), 1, 1, 1, 1, 1), after_forward=after_forward)
    device.step()
    first = len(device.performed)
    device.step()
    return [f"{action.value} {('(root)', '0', '1', '2')[unit]}" for action, unit in device.performed[first:]]


def _actions_of_the_runtime(ctx: RankContext, reshard_after_forward: Any) -> list[str]:
    """Of the second step."""
    model: Any = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d(), reshard_after_forward=reshard_after_forward)
    step(fsdp2.fully_shard(model, mesh=ctx.mesh_1d()))
    with trace.record(model) as recorded:
        step(model)
    return recorded.actions()


@pytest.mark.parametrize(
    ("reshard_after_forward", "after_forward"), [(True, AfterForward.RESHARD), (False, KEEP), (2, SMALLER)]
)
def test_model_acts_as_the_runtime(reshard_after_forward: bool | int, after_forward: AfterForward) -> None:
    ran = on_one_rank(_actions_of_the_runtime, world_size=4, reshard_after_forward=reshard_after_forward)
    assert _actions(after_forward) == ran
