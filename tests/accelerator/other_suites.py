"""The tests of other suites once more, on the simulated accelerator: the same bodies with the same parameters.

While a body runs, the accelerator is torch's default device and that of the meshes, so models and batches are made
there, and the host waits for nothing by itself. Gathers and reductions come as late as the order of streams lets them,
so whatever does not wait for them reads NaN. ``compare`` then asks for the bits of torch's ``fully_shard`` on the CPU;
bodies without it ask for what they ask for on the CPU.

What runs: tests on 2 ranks, and those of ``ON_4_RANKS``; of each parameter the first two values that are not long. All
of it is long but for ``SAMPLE``.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.cases import SCHEDULES
from tests.accelerator.support import prepare
from tests.harness.distributed import RankContext
from tests.harness.pool import shared_pool
from tests.harness.selection import WORLD_SIZE

SCHEDULE = SCHEDULES["late gathers and reductions"]

_PREFETCH = "on streams, hooks fill outputs as soon as a gather is enqueued, used or not"
_NO_WORK = "on a device, a stream waits for a reduction: there is no work that the host could wait for"
_PINNED = "the shard's class supports no pinned memory, which fsdp2 says"

# What does not run there: modules, tests, or cases with a value of a parameter, each with the reason.
EXCLUDED: dict[str, dict[str, str]] = {
    "parity": {
        "test_compile": "torch.compile has no backend for the device",
        "test_offload.test_default_policy_on_a_cpu_mesh_pins_nothing": "is about meshes on the CPU",
        "test_offload.test_policy_on_a_cpu_mesh_trains_as_torchs": "is about meshes on the CPU",
        "test_state.test_meta_model_is_initialised_by_reset_parameters": (
            "DTensor moves the offset of the device's random generator, and the device draws by the host's"
        ),
        "test_state_dict_helpers.test_meta_model_is_loaded_from_rank_0[buffers]": (
            "torch loads buffers of a meta model onto the CPU, where a process group has one for both devices"
        ),
        "test_composable.test_a_replicated_module_stays_whole_under_fully_shard": (
            "torch's DDP gives NaN on the device, beside torch's fully_shard, too"
        ),
        "test_tools_that_watch.test_comm_debug_mode_counts_the_same": (
            "the device's process group is written in Python: torch's calls pass by the dispatcher"
        ),
    },
    "distributed": {
        "test_compiled_blocks": "torch.compile has no backend for the device",
        "test_compiled_models": "torch.compile has no backend for the device",
        "test_comm": "is about the channels of gloo",
        "test_custom_comm.test_hook_gets_one_buffer_with_zeros_between_the_gradients": (
            "is about the alignment of buffers on the CPU"
        ),
        "test_extension_features.test_prefetch_in_vain_is_dropped": _PREFETCH,
        "test_extension_lifetimes.test_prefetch_that_is_not_used_calls_no_post_hook_and_frees_its_outputs": _PREFETCH,
        "test_extension_training.test_what_arrives_in_another_dtype_than_the_policy_asks_for_is_reduced_in_it": (
            "asks for autocast of the CPU, and the device has none"
        ),
        "test_flat_optimizer.test_same_values_however_the_model_is_sharded[ignored]": (
            "torch's optimizers take foreach on a device, and DTensor's does not mix with plain tensors"
        ),
        "test_grad_dtype.test_gradients_of_all_dtypes_travel_in_one_launch": "counts the launches of gloo's channel",
        "test_inner_gradients.test_compiled_block": "torch.compile has no backend for the device",
        "test_step_control.test_registered_method_and_compilation": "torch.compile has no backend for the device",
        "test_install.test_torchs_checkpoint_helpers_take_our_wrappers": "wraps models on the CPU",
        "test_lost_collectives": "collectives of the device do not time out",
        "test_memory_limit": "measures the allocator of the CPU",
        "test_messages_in_flight": "is about messages of gloo",
        "test_report.test_rank_0_has_the_collectives_bytes_and_memory_of_a_step": (
            "asks for timed waits; on a device, a wait only enqueues"
        ),
        "test_report.test_the_profiler_tells_compute_from_what_a_slow_host_loses": (
            "torch.profiler sees no operations on the device; tests/accelerator/test_report.py asks what is said then"
        ),
        "test_offload.test_policy_on_a_cpu_mesh_copies_nothing": "is about meshes on the CPU",
        "test_offload.test_hooks_send_what_they_make_of_a_copy_of_the_shard": _PINNED,
        "test_offload.test_payload_that_is_kept_is_made_anew_only_when_the_shard_was_written": _PINNED,
        "test_recovery.test_reset_waits_for_reductions_in_flight": _NO_WORK,
        "test_recovery.test_reset_brings_all_units_to_rest_though_a_reduction_is_lost": _NO_WORK,
        "test_recovery.test_sharded_model_that_is_dropped_is_freed": (
            "autograd's thread for the device keeps the graph for a moment after backward has returned"
        ),
    },
}

# What must fail there, and why.
KNOWN: dict[str, dict[str, str]] = {
    "parity": {},
    "distributed": {},
}

# Of the tests that take more than 2 ranks. The others say much the same there as on 2, and each takes seconds.
ON_4_RANKS: dict[str, list[str]] = {
    "parity": [
        "test_accumulation.test_hsdp_mixes_no_sync_and_no_all_reduce",
        "test_model_parallel.test_hooks_with_tensor_parallelism_rest_on_a_smaller_mesh",
    ],
    "distributed": [],
}
NUM_VALUES = 2

# In the short suite.
SAMPLE: dict[str, list[str]] = {
    "parity": [
        "test_accumulation.test_hsdp_without_gradient_sync_until_the_last_micro_batch",
        "test_mixed_precision.test_transformer_in_bf16_reduced_in_fp32",
        "test_offload.test_parameters_frozen_and_thawed_between_steps",
        "test_step_control.test_unshard_async_op_switched_between_steps",
    ],
    "distributed": [
        "test_finalization.test_handle_waits_once_and_gradients_are_there_then",
        "test_offload.test_units_may_be_offloaded_one_by_one",
        "test_recovery.test_reset_between_steps_changes_nothing",
    ],
}


def suite_on_device(suite: str) -> dict[str, Any]:
    """By name, a test for each of those in ``tests/<suite>`` whose body runs on ranks.

    Raises:
        LookupError: one of the lists above names what is not there.
    """
    found: dict[str, Any] = {}
    unknown = {*EXCLUDED[suite], *KNOWN[suite], *ON_4_RANKS[suite], *SAMPLE[suite]}
    for path in sorted((Path(__file__).parents[1] / suite).glob("test_*.py")):
        module = importlib.import_module(f"tests.{suite}.{path.stem}")
        unknown.discard(path.stem)
        for name, test in vars(module).items():
            where = f"{path.stem}.{name}"
            unknown.discard(where)
            if not hasattr(test, "body") or test.__module__ != module.__name__:
                continue
            if not EXCLUDED[suite].keys() & {path.stem, where} and (_is_on_2_ranks(test) or where in ON_4_RANKS[suite]):
                found[f"{path.stem}__{name.removeprefix('test_')}"] = _on_device(test, suite, where, unknown)
    if unknown:
        raise LookupError(f"not in tests/{suite}: {sorted(unknown)}")
    return found


def _is_on_2_ranks(test: Any) -> bool:
    (sizes,) = (mark.args[1] for mark in test.pytestmark if mark.name == "parametrize" and mark.args[0] == WORLD_SIZE)
    return min(getattr(size, "values", [size])[0] for size in sizes) <= 2


def _on_device(test: Any, suite: str, where: str, unknown: set[str]) -> Any:
    """``test`` on pools of ranks with the device; takes the excluded cases that it finds from ``unknown``."""

    def again(world_size: int, **arguments: Any) -> None:
        __tracebackhide__ = True
        pool = shared_pool(world_size, device.DEVICE)
        pool.run(run_body, module=test.__module__, qualname=test.__qualname__, arguments=arguments)

    marks = [_shortened(mark, EXCLUDED[suite], where, unknown) for mark in test.pytestmark]
    if where not in SAMPLE[suite]:
        marks.append(pytest.mark.long.mark)
    if where in KNOWN[suite]:
        marks.append(pytest.mark.xfail(strict=True, reason=KNOWN[suite][where]).mark)
    again.__doc__ = test.__doc__
    again.__signature__ = test.__signature__  # type: ignore[attr-defined]
    again.pytestmark = marks  # type: ignore[attr-defined]
    return again


def _shortened(mark: pytest.Mark, excluded: Collection[str], where: str, unknown: set[str]) -> pytest.Mark:
    """A ``parametrize`` with the first values that are neither long nor excluded."""
    if mark.name != "parametrize":
        return mark
    names, values, *rest = mark.args
    values, ids = list(values), mark.kwargs.get("ids")
    cases = [f"{where}[{value}]" for value in values]
    unknown -= set(cases)
    kept = [i for i, value in enumerate(values) if not _is_long(value) and cases[i] not in excluded][:NUM_VALUES]
    if ids is not None and not callable(ids):
        given = list(ids)
        ids = [given[i] for i in kept]
    return pytest.mark.parametrize(names, [values[i] for i in kept], *rest, **{**mark.kwargs, "ids": ids}).mark


def _is_long(value: Any) -> bool:
    return any(mark.name == "long" for mark in getattr(value, "marks", ()))


def run_body(ctx: RankContext, module: str, qualname: str, arguments: dict[str, Any]) -> None:
    """On a rank: what the test ``qualname`` of ``module`` does."""
    body = getattr(importlib.import_module(module), qualname).body
    prepare()
    device.load().spoil_all_free()  # else values of an earlier run stand in for those that came too late
    device.schedule(**SCHEDULE)
    try:
        with torch.device(device.DEVICE):
            body(ctx, **arguments)
    finally:
        device.load().drain()  # what other ranks may wait for
    assert device.load().ran_at_once() == set()  # else the order of streams was not free
