"""The model of ``benchmarks/scale``: cases that can be computed by hand, and what holds whatever the figures are."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.render import read_results
from benchmarks.scale import gloo
from benchmarks.scale.pipeline import Pipeline, simulate_stages
from benchmarks.scale.tensor_parallel import Exchange, TensorParallel
from benchmarks.scale.workload import (
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
from fsdp2.memory.plan import Held
from fsdp2.planner.machine import Contention, Link, Ranks, Resource, Transfer
from fsdp2.planner.machines import H100
from fsdp2.planner.scenario import Choice, Scenario, simulate
from fsdp2.planner.simulate import steady_step
from fsdp2.planner.work import Attention, UnitWork, Work
from tests.unit.planner.round_figures import FSDP, PLAIN, device_of, group_of


def test_on_the_cpu_the_program_launches_and_finishes() -> None:
    """Copies and sums hold up compute there, and half of the next backward is what a reduction may take."""
    travel = Transfer(0.0, 1, Resource.NETWORK, before=0.5, behind=0.25)
    group = replace(group_of(1, 2), gather=travel, reduce=(replace(travel, seconds=5),))
    time = steady_step(device_of(2, group, kind=gloo.Cpu), Contention())
    # Gathers: launch and unpack each of four, and wait for the first of either pass. Reductions: launch and land both;
    # while the first travels, a gather is unpacked and half of a backward runs; nothing runs beside the second.
    assert time.exposed == pytest.approx(4 * 0.75 + 2 * 1 + 2 * 0.75 + (5 - 0.25 - 4) + 5)


def test_the_readme_says_how_wrong_predictions_of_published_steps_are() -> None:
    blind, by_torchtitan = (
        next(each["rows"] for each in read_results()[script]["tables"] if each["name"] == name)
        for script, name in (("scale/scale_blind", "rows"), ("scale/scale_model", "published"))
    )
    ends = [[abs(int(error[:-1])) for error in row[3].split(" or ")] for row in blind if row[3] != "open"]
    nearest = [min(each) for each in ends]
    said = f"{len(ends)} published steps by {median(nearest):.0f}% in the median and {max(nearest)}% at worst"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert said in readme
    memory = [float(row[5]) / float(row[4]) - 1 for row in blind if row[4] is not None]
    memory += [float(row[6]) / float(row[7]) - 1 for row in by_torchtitan]
    worst = 100 * max(map(abs, memory))
    assert f"within {worst:.0f}% of {len(memory)} published runs" in readme
    assert f"open, by up to {max(map(max, ends))}%" in readme


def test_models_have_as_many_parameters_as_published() -> None:
    found = [model.num_params for model in (LLAMA_8B, LLAMA_70B, LLAMA_405B)]
    assert found == [8_030_261_248, 70_553_706_496, 405_853_388_800]


@pytest.mark.ci
def test_a_model_observed_again_is_seen_the_same() -> None:
    """Storages of inputs that are gone must not be taken for those that all blocks share."""
    first, again, once_more = (observed.__wrapped__(LLAMA_8B, 1, 8192).kinds[0] for _ in range(3))
    assert first == again == once_more


SECOND = Work(attention=(Attention(1.0, 1e30),))  # one operation, and no bytes


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
    assert divided.units[-1].saved_nbytes == pytest.approx(logits + activations * (1 + 3 / 8) + angles, rel=1e-3)
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
    machine = PLAIN
    block = UnitWork("block", (), SECOND, SECOND + SECOND, 5.0, 0.0, is_block=True)
    head = replace(block, name="head", is_block=False)
    microbatch = Scenario(machine, (block, head), 8 / 4, 64, FSDP, tensor_parallel=4)
    found = simulate_stages(microbatch, pipeline)
    assert found.time.step == pytest.approx(seconds)
    assert found.tokens_per_second == pytest.approx(pipeline.num_microbatches * 8 / 4 / 4 / seconds)
    if in_flight is not None:
        assert found.memory[Held.SAVED] == 5.0 * in_flight


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


def _exchanging(*exchanges: Exchange, async_tp: float | None = None) -> float:
    """Seconds that ``exchanges`` add to a forward: gathers take a second per 400 bytes, copies one per 100."""
    machine = replace(PLAIN, copy_bandwidth=100.0, in_node=Link(400.0, 0.0))
    sent = TensorParallel(machine, 8, async_tp=async_tp).seconds(exchanges, is_block=True)
    unit = UnitWork("block", (), SECOND, Work(), 0.0, 0.0, sent_s=(sent, 0.0), is_block=True)
    found = simulate(Scenario(machine, (unit,), 1 / 8, 64, Choice(), tensor_parallel=8))
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
