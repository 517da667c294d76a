"""The part of one GPU of groups that share products or sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import fsdp2
from fsdp2.planner.machines import H100
from fsdp2.planner.parallel import Parallel
from fsdp2.planner.work import Checkpointing
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.unit.planner.models import LanguageModel
from tests.unit.planner.plans import WORKLOAD, on_meta, plan_of, work_of

TEXTS = texts_beside(__file__)
WHOLE = replace(WORKLOAD, sequence=4096)


def test_context_parallelism_divides_tokens_and_each_query_still_meets_all_keys() -> None:
    whole = work_of(on_meta(), WHOLE)
    part = Parallel(H100, context=4).part_of(work_of(on_meta(), replace(WHOLE, context_parallel=4)))
    for checkpointing in Checkpointing:
        ours, theirs = part.kinds[0][checkpointing], whole.kinds[0][checkpointing]
        for passed in ("forward", "backward"):
            mine, their = getattr(ours, passed), getattr(theirs, passed)
            assert (mine.linear, mine.other) == (their.linear / 4, their.other / 4)
            assert {each.length for each in mine.attention} == {4096}
        assert ours.saved_nbytes == theirs.saved_nbytes / 4
    assert part.params == whole.params
    slow = replace(H100, in_node=replace(H100.in_node, bandwidth=1e9))
    alone = work_of(on_meta(), replace(WHOLE, context_parallel=4))
    sent = Parallel(slow, context=4).part_of(alone).kinds[0][Checkpointing.NONE].sent_s
    keys = 4 * 2 * 2 * 2 * 1024 * 64  # parts; keys and values; bf16; sequences, tokens and features of a part
    assert sent[0] == pytest.approx(3 / 4 * keys / 1e9, rel=0.05)  # of which attention hides little
    assert sent[1] == pytest.approx(2 * sent[0], rel=0.05)


def test_tensor_parallelism_divides_matrices_and_sends_activations() -> None:
    whole = work_of(on_meta(), WHOLE)
    part = Parallel(H100, tensor=2).part_of(whole)
    given = 2 * 2 * 4096 * 64
    for checkpointing in Checkpointing:
        ours, theirs = part.kinds[0][checkpointing], whole.kinds[0][checkpointing]
        assert (ours.forward.linear, ours.backward.other) == (theirs.forward.linear / 2, theirs.backward.other / 2)
        gathered = 2 * given / 2 if checkpointing is Checkpointing.NONE else 0  # which two products keep
        assert ours.saved_nbytes == theirs.saved_nbytes / 2 + gathered
    numels = [sum(param.numel for params in work.params.values() for param in params) for work in (part, whole)]
    norms = 64 * (2 * 2 + 1)  # with four blocks of one norm, and one before the head, which are whole
    assert numels[0] == pytest.approx(numels[1] / 2, abs=norms)
    forward, backward = (unit.sent_s for unit in (part.kinds[0][Checkpointing.NONE], part.kinds[0][Checkpointing.FULL]))
    assert forward[0] == forward[1] == backward[0] == pytest.approx(backward[1] / 1.75)  # three of four again
    in_fp8 = Parallel(H100, tensor=2, fp8=True).part_of(whole).kinds[0][Checkpointing.NONE].sent_s
    assert in_fp8[0] < forward[0]


def test_micro_batches_take_their_time_and_no_more_memory_than_gradients() -> None:
    one, three = (plan_of(micro_batches=number).choices for number in (1, 3))
    by_name = {each.choice.name: each.result for each in three}
    for each in one:
        ours, theirs = by_name[each.choice.name], each.result
        optimizer = 0.1 * theirs.time.step  # which steps once: no more than this here
        assert 3 * theirs.time.step - optimizer < ours.time.step < 3.01 * theirs.time.step
        assert 0 <= ours.peak_nbytes - theirs.peak_nbytes <= ours.grads_nbytes  # those of earlier ones


def test_code_and_head_name_what_the_plan_divides() -> None:
    found = plan_of(tensor_parallel=2, context_parallel=2, micro_batches=3, precision="fp8", reduce_dtype="bf16")
    shown = "3 micro-batches of 2 x 128 tokens per 4 GPUs (2 for tensors x 2 for contexts), adamw, fp8, eager kernels"
    assert shown in str(found)
    assert '"shard", "tensor"))' in found.code
    assert "torch.optim.AdamW(model.parameters(), fused=True)" in found.code
    for said in (
        'parallelize_module(model, mesh["tensor"], ...)',
        "context_parallel on 2",
        "convert_to_float8_training",
    ):
        assert said in found.code
    assert "reduce_dtype=torch.bfloat16" in found.code
    compile(found.code, "pasted", "exec")
    assert found.choices[0].result.tokens_per_second == pytest.approx(
        3 * 2 * 128 / 4 / found.choices[0].result.time.step
    )


def _plan(num_gpus: int = 16, **options: Any) -> Callable[[], object]:
    return lambda: fsdp2.planner.plan(LanguageModel, "H100", replace(WORKLOAD, **options), num_gpus=num_gpus)


WRONG: dict[str, Callable[[], object]] = {
    "sequences that cannot be shared": _plan(context_parallel=3),
    "GPUs that are no multiple": _plan(12, tensor_parallel=8),
    "tensors across nodes": _plan(tensor_parallel=16),
    "no micro-batch": _plan(micro_batches=0),
    "dtype of reductions": _plan(reduce_dtype="fp8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)
