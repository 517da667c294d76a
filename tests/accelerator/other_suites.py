"""The tests of other suites once more, on the simulated accelerator: the same bodies with the same parameters.

While a body runs, the accelerator is torch's default device and that of the meshes, so models and batches are made
there, and the host waits for nothing by itself. Gathers and reductions come as late as the order of streams lets them,
so whatever does not wait for them reads NaN. ``compare`` then asks for the bits of torch's ``fully_shard`` on the CPU;
bodies without it ask for what they ask for on the CPU.

All cases run, on as many ranks as there, but for those of ``EXCLUDED``. They are long, but for those of ``SAMPLE``.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2.checkpoint.stream_gate import Gate
from tests.accelerator import device
from tests.accelerator.support import prepare
from tests.harness.distributed import RankContext
from tests.harness.pool import shared_pool

LATE = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

_AUTOCAST = "asks for autocast of the CPU, and the device has none"
_PREFETCH = "on streams, hooks fill outputs as soon as a gather is enqueued, used or not"
_IN_PYTHON = "the device's process group is written in Python: torch's calls pass by the dispatcher"
_TO_ALL = "with a backend other than NCCL, all ranks gather on a device, although one receives"

# What does not run there: modules, tests, or cases with a value of a parameter, each with the reason.
EXCLUDED: dict[str, dict[str, str]] = {
    "parity": {
        "test_communication.test_payload_that_is_a_wrapper_tensor": (
            f"{_IN_PYTHON}, where wrapper tensors come apart; fsdp2 gathers what they hold"
        ),
        "test_optimizers.test_optimizer_that_steps_in_backward_has_stepped_before_the_next_forward": (
            "torch's next gathers do not wait for what the hooks write; test_training has this case without torch"
        ),
        "test_offload.test_default_policy_on_a_cpu_mesh_pins_nothing": "is about meshes on the CPU",
        "test_offload.test_policy_on_a_cpu_mesh_trains_as_torchs": "is about meshes on the CPU",
        "test_state.test_meta_model_is_loaded_from_rank_0[buffers]": (
            "torch loads buffers of a meta model onto the CPU, where a process group has one for both devices"
        ),
        "test_torchs_tools.test_a_replicated_module_stays_whole_under_fully_shard": (
            "torch's DDP gives NaN on the device, beside torch's fully_shard, too"
        ),
        "test_optimizers.test_compiled_step_of_an_optimizer_is_that_of_torch": (
            "torch.compile has no backend for the device"
        ),
        "test_optimizers.test_gradients_lie_in_their_memory_as_under_torch": "is about fake tensors of the CPU",
        "test_torchs_tools.test_comm_debug_mode_counts_what_a_feature_adds_to_every_step": _IN_PYTHON,
    },
    "distributed": {
        "test_auto_shard.test_ignored_parameters_are_planned_whole_and_groups_in_the_dtype_of_the_policy": (
            "torch's optimizers take foreach on a device, and DTensor's does not mix with plain tensors"
        ),
        "test_compiled_blocks": "torch.compile has no backend for the device",
        "test_custom_comm.test_a_managed_group_averages_over_the_replicas_of_the_moment": "has a group of the CPU",
        "test_comm": "is about the channels of gloo",
        "test_activations.test_a_step_has_the_same_bits[compiled]": "torch.compile has no backend for the device",
        "test_backward_threads.test_who_comes_while_a_backward_runs_in_a_worker_waits_for_its_end": (
            "autograd has a thread of its own for a device, and the runtime raises the error for two threads"
        ),
        "test_door.test_hooks_at_the_landing_compute_in_the_autocast_of_the_user": _AUTOCAST,
        "test_names.test_messages_have_names_without_wrappers[a parameter that was added]": (
            "asks for a warning as an error, and there warnings are none"
        ),
        "test_door.test_methods_and_steps_inside_of_compiled_functions": "torch.compile has no backend for the device",
        "test_door.test_what_watches_sees_the_runtime": _IN_PYTHON,
        "test_custom_comm.test_hook_gets_one_buffer_with_zeros_between_the_gradients": (
            "is about the alignment of buffers on the CPU"
        ),
        "test_report.test_steps_of_the_host_for_offloaded_units_are_shown_beside_backward": (
            "the device's clock is not that of the host's thread"
        ),
        "test_staleness.test_writes_that_bypass_the_versions_of_shards_need_a_reshard_first[numpy]": (
            "numpy sees no memory of a device"
        ),
        "test_extension_protocol.test_prefetch_that_is_not_used_calls_no_post_hook_and_frees_its_outputs": _PREFETCH,
        "test_extension_training.test_what_arrives_in_another_dtype_than_the_bias_is_reduced_in_its_own": _AUTOCAST,
        "test_extension_training.test_what_arrives_in_another_dtype_than_the_policy_asks_for_is_reduced_in_it": (
            _AUTOCAST
        ),
        "test_flat_optimizer.test_same_values_however_the_model_is_sharded[ignored]": (
            "torch's optimizers take foreach on a device, and DTensor's does not mix with plain tensors"
        ),
        "test_dtypes.test_gradients_of_all_dtypes_travel_in_one_launch": "counts the launches of gloo's channel",
        "test_dtypes.test_no_gradient_is_lost_in_one_autocast_region": _AUTOCAST,
        "test_initialisation.test_shards_are_those_of_the_unsharded_model": "draws from the generator of the CPU",
        "test_inner_losses.test_compiled_block": "torch.compile has no backend for the device",
        "test_step_control.test_registered_method_and_compilation": "torch.compile has no backend for the device",
        "test_install.test_torchs_checkpoint_helpers_take_our_wrappers_of_flat_parameters": "wraps models on the CPU",
        "test_memory_limit": "measures the allocator of the CPU",
        "test_messages_in_flight": "is about messages of gloo",
        "test_report.test_rank_0_has_the_collectives_bytes_and_memory_of_a_step": (
            "asks for timed waits; on a device, a wait only enqueues"
        ),
        "test_report.test_the_profiler_tells_compute_from_what_a_slow_host_loses": (
            "torch.profiler sees no operations on the device; tests/accelerator/test_report.py asks what is said then"
        ),
        "test_report.test_compute_belongs_to_the_module_whose_work_it_is": (
            "the host sleeps, which takes no time of the device; tests/accelerator/test_report.py asks for names"
        ),
        "test_report.test_memory_counts_activations_and_optimizer_states": (
            "counts what autograd saves; tests/accelerator/test_report.py asks for what the device's allocator says"
        ),
        "test_stream.test_memory_is_that_of_few_buckets_however_many_there_are": _TO_ALL,
        "test_stream.test_ranks_of_the_receivers_replica_send_their_shards_once_and_others_nothing": _TO_ALL,
        "test_recovery.test_sharded_model_that_is_dropped_is_freed": (
            "autograd's thread for the device keeps the graph for a moment after backward has returned"
        ),
    },
}

# In the short suite, or always in CI where the tests are.
SAMPLE: dict[str, list[str]] = {
    "parity": [
        "test_accumulation.test_hsdp_without_gradient_sync_until_the_last_micro_batch",
        "test_mixed_precision.test_transformer_in_bf16_reduced_in_fp32",
        "test_offload.test_parameters_frozen_and_thawed_between_steps",
        "test_step_control.test_unshard_async_op_switched_between_steps",
    ],
    "distributed": [
        "test_finalization.test_handle_waits_once_and_gradients_are_there_then",
        "test_gradient_wires.test_blocks_are_those_of_each_gradient_and_what_they_lose_is_sent_later",
        "test_offload.test_units_may_be_offloaded_one_by_one",
        "test_recovery.test_reset_drops_gradients_that_were_not_reduced",
        "test_reshard_to.test_moving_back_and_forth_changes_no_bit",
    ],
}


def suite_on_device(suite: str) -> dict[str, Any]:
    """By name, a test for each of those in ``tests/<suite>`` whose body runs on ranks.

    Raises:
        LookupError: one of the lists above names what is not there.
    """
    found: dict[str, Any] = {}
    unknown = {*EXCLUDED[suite], *SAMPLE[suite]}
    for path in sorted((Path(__file__).parents[1] / suite).glob("test_*.py")):
        module = importlib.import_module(f"tests.{suite}.{path.stem}")
        for name, test in vars(module).items():
            if not hasattr(test, "body") or test.__module__ != module.__name__:
                continue
            where = f"{path.stem}.{name}"
            unknown -= {path.stem, where, *itertools.chain(*(_cases(where, mark) for mark in test.pytestmark))}
            if not EXCLUDED[suite].keys() & {path.stem, where}:
                again = _on_device(test, where, EXCLUDED[suite])
                test_name = f"{path.stem}__{name.removeprefix('test_')}"
                found[test_name] = again if where in SAMPLE[suite] else pytest.mark.long(again)
    if unknown:
        raise LookupError(f"not in tests/{suite}: {sorted(unknown)}")
    return found


def _on_device(test: Any, where: str, excluded: Collection[str]) -> Any:
    """``test`` on pools of ranks with the device, without the excluded cases."""

    def again(world_size: int, **arguments: Any) -> None:
        __tracebackhide__ = True
        pool = shared_pool(world_size, device.DEVICE)
        named = {"module": test.__module__, "qualname": test.__qualname__}
        pool.run(run_body, test.timeout_s, **named, arguments=arguments)

    again.__doc__ = test.__doc__
    again.__signature__ = test.__signature__  # type: ignore[attr-defined]
    again.pytestmark = [_without(excluded, where, mark) for mark in test.pytestmark]  # type: ignore[attr-defined]
    return again


def _cases(where: str, mark: pytest.Mark) -> list[str]:
    """What ``EXCLUDED`` calls the cases of each value of a ``parametrize``."""
    if mark.name != "parametrize":
        return []
    return [f"{where}[{value.values[0] if hasattr(value, 'marks') else value}]" for value in mark.args[1]]


def _without(excluded: Collection[str], where: str, mark: pytest.Mark) -> pytest.Mark:
    kept = [case not in excluded for case in _cases(where, mark)]
    if all(kept):
        return mark
    names, values, *rest = mark.args
    ids = mark.kwargs.get("ids")
    if isinstance(ids, Iterable):
        ids = list(itertools.compress(ids, kept))
    values = list(itertools.compress(values, kept))
    return pytest.mark.parametrize(names, values, *rest, **{**mark.kwargs, "ids": ids}).mark


def run_body(ctx: RankContext, module: str, qualname: str, arguments: dict[str, Any]) -> None:
    """On a rank: what the test ``qualname`` of ``module`` does."""
    body = getattr(importlib.import_module(module), qualname).body
    with arriving_late():
        body(ctx, **arguments)
    assert device.load().ran_at_once() == set()  # else the order of streams was not free


@contextmanager
def arriving_late() -> Iterator[None]:
    """The device is the default one, and what it communicates comes as late as the order of streams lets it."""
    prepare()
    device.load().spoil_all_free()  # else values of an earlier run stand in for those that came too late
    device.schedule(late=LATE)
    try:
        with torch.device(device.DEVICE), mock.patch.object(Gate, "_await", _await):
            yield
    finally:
        device.load().drain()  # what other ranks may wait for


def _await(gate: Gate, *given: Any, waits: Callable[..., bool] = Gate._await) -> bool:
    """A device would go on while the host waits at the gate of a stream, and other ranks may need what it sends."""
    device.load().drain()
    return waits(gate, *given)
