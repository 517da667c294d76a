"""Small defects. Each must fail a test of those that it is listed under: see ``__main__.py``.

A defect is ``number: (place, before, after)``. ``place`` names a function or a class of the package by its qualified
name, in whichever file. ``before`` is an expression or statements that occur there once, and ``after`` replaces it.
Syntax trees are compared: a function that moves, another line break or comment do not matter (``places.py``).
Where ``before`` occurs several times, ``place`` says which is meant: ``Class.method#1``.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULE = "unit/schedule unit/skipped"
TRACES = "distributed/traces"
PLAN = "unit/plan unit/layout"
STREAMS = "distributed/stream_order unit/streams"
CHANNELS = "distributed/comm distributed/recovery distributed/agreement distributed/skipped_units "
CHANNELS += "distributed/own_groups distributed/messages_in_flight"


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        place, before, after: what is replaced.
        tests: files in ``tests/``, in the order in which they are run until one fails.
    """

    place: str
    before: str
    after: str
    tests: tuple[str, ...]


# By the tests, "unit/plan" for "unit/test_plan.py".
_LISTED: dict[str, dict[int, tuple[str, str, str]]] = {
    "fuzz/fuzz unit/precision parity/step_control": {
        4: ("divide_factors", "float(world_size) if factor is None else factor", "float(world_size)"),
        5: (
            "divide_factors",
            "DivideFactors(before, factor / before, behind_hook=True)",
            "DivideFactors(before, factor, behind_hook=True)",
        ),
        6: ("param_dtypes", "policy.reduce_dtype or unless_told", "param"),
        21: ("_PeerSum.wait", "[*others, self._mine]", "others"),
        28: ("Gather.issue", "_torch.foreach_copy(self._cast_targets, self._cast_sources)", "pass"),
        35: ("Reduce.complete", "plan.factors.after != 1.0", "False"),
        48: ("Reduction._advance", "wait_for(works)", "pass"),
    },
    f"{PLAN} fuzz/fuzz": {
        0: ("shard_layout", "-(-size // num_shards)", "max(1, size // num_shards)"),
        1: ("Layout.padded_numel", "self.chunk_numel * self.num_shards", "self.numel"),
        2: ("pack", "-(-size // alignment) * alignment", "size"),
        3: ("Layout.is_contiguous", "self.dim == 0 and not any(self.sizes[first_short + 1 :])", "self.dim == 0"),
        7: ("_compile_reduce", "item.layout.chunk_numel", "item.layout.numel"),
        8: ("_place_shards", "ALIGNMENT_NBYTES // step.source.itemsize if step.route is Route.DIRECT else 1", "1"),
        9: ("_reduce_route", "item.layout.is_even or routing.reduces_uneven", "True"),
    },
    f"{PLAN} parity/placement": {10: ("_reduce_route", "item.layout.dim != 0", "False")},
    f"{SCHEDULE} {TRACES}": {
        11: ("Schedule.pre_forward", "predicted if listed is None else listed", "listed or ()"),
        12: ("Schedule.post_forward", "self._take_unused()", "()"),
        13: ("Schedule.post_backward", "self._reshard_after_backward(unit)", "()"),
    },
    f"{SCHEDULE} parity/accumulation": {
        14: ("Schedule._reduce", "not rules.reduces", "False"),
        15: ("Schedule.pre_backward", "rules.unshard_in_backward", "True"),
    },
    f"{SCHEDULE} fuzz/fuzz": {16: ("Schedule.end_backward", "actions.append((Action.LAND, 0))", "pass")},
    f"{SCHEDULE} parity/passes": {17: ("Schedule.pre_forward", "passes.phases[unit] is Phase.BACKWARD", "False")},
    "unit/skipped distributed/skipped_units": {
        18: ("SkippedUnits.agree", "not present.issuperset(registered)", "False"),
        108: ("Backward._reach", "each.unit not in self._reachable", "False"),
        109: ("Backward._pass_to", "staying.update(event.unit for event in first)", "pass"),
    },
    "fuzz/fuzz distributed/comm parity/training": {
        20: ("PeerComm._reduce_one", "output[mine.numel() :].zero_()", "pass")
    },
    CHANNELS: {22: ("_new_channels", "_next_channel[_identity(group)] = first + 2", "pass")},
    "distributed/messages_in_flight": {
        24: ("_Messages.__init__", "_in_flight.add(self)", "pass"),
        54: ("Gather._wait_for_works", "self.gathered.is_lost, self._works = True, ()", "self._works = ()"),
        55: ("Gather.issue", "self.gathered.is_lost = True\nraise", "raise"),
        60: ("_run", 'raise group.lost("reduction", error) from error.__cause__', "raise"),
        56: ("PostForwardShards.release", "self.gather.gathered.is_lost", "False"),
        107: (
            "Gather.issue",
            "self.gathered.is_lost = True\nraise CommunicationError(str(error)) from error",
            "raise CommunicationError(str(error)) from error",
        ),
    },
    "distributed/custom_comm": {25: ("_allocated", "found != (numel, dtype, device.type, True)", "False")},
    "unit/memory distributed/offload parity/offload": {
        26: ("home_for", "is_elsewhere or isinstance(policy, StagedOffloadPolicy)", "is_elsewhere")
    },
    "parity/communication distributed/custom_comm": {
        27: ("_run", "work.wait()", "pass"),
        36: ("Reduce.complete", "self._hook is not None and plan.factors.behind_hook", "False"),
        37: ("_Part.__init__", "torch.zeros if is_hooked else torch.empty", "torch.empty"),
    },
    "fuzz/fuzz distributed/comm parity/mixed_precision distributed/extension_training parity/placement": {
        29: ("Gather._direct", "output.narrow(0, self._rank * n, n)", "output.narrow(0, 0, n)")
    },
    "fuzz/fuzz distributed/recovery distributed/extension_protocol distributed/memory": {
        30: ("Gather.drop", "self._wait_for_works()", "pass")
    },
    "distributed/memory distributed/inner_losses distributed/misuse distributed/staleness": {
        31: ("ParamGroup._release", "torch.autograd.graph.increment_version(unsharded.versioned)", "pass"),
        44: ("Gather.release", "self._lasting if self._hooks is None else self._lasting + self._hooks.storages", "()"),
    },
    "distributed/hook_errors distributed/misuse": {32: ("ParamGroup.unshard", "self._return_to(before)", "pass")},
    "distributed/changed_parameters distributed/staleness": {
        33: ("ParamGroup.take_flags", "sharded == noted and bound == noted", "sharded == noted"),
        62: ("ParamGroup.unshard", "self.reshard_if_outdated()", "pass"),
        111: ("GroupGradients.owe", "self._has_kept", "False"),
        118: ("GroupShards.refresh", "self._follow_locals()", "pass"),
    },
    "distributed/changed_parameters distributed/copies distributed/misuse": {
        34: (
            "Bindings.rebind",
            "(parameters.get(name) if custom is None else getattr(custom, name, None)) is not before[index]",
            "False",
        ),
        110: ("ParamGroup.unshard", "before is GroupState.SHARDED and not in_backward", "before is GroupState.SHARDED"),
    },
    "fuzz/fuzz parity/accumulation": {
        38: ("GroupGradients.reduce", "earlier, self._partial = self._partial, None", "earlier = None"),
        47: ("GroupGradients.reduce", "self._mesh.replicate.group is not None", "False"),
        51: ("ShardedParam.keep_grad", "grad.to(dtype)", "grad"),
    },
    f"{TRACES} fuzz/fuzz parity/training parity/passes": {
        39: ("GroupGradients.reduce", "not jointly and True not in present", "False")
    },
    f"{STREAMS} distributed/offload unit/memory": {40: ("GroupGradients.finish_copies", "copies.wait()", "pass")},
    "parity/optimizers parity/offload": {
        41: ("land_in_grad", "_torch.post_accumulate_grad_hooks(param)", "()"),
        136: ("UnitTree.order_gathers", "self.executor.land_down_to(0)\nself.executor.wait_for_landed()", "pass"),
    },
    f"{STREAMS} accelerator/left_out_waits": {
        19: ("AcceleratorStreams.on", "stream.wait_stream(current)", "pass"),
        42: ("Gather.wait", "self._streams.wait_here(self._done)", "pass"),
        43: ("Gather.release", "self._streams.gather_after_compute()", "pass"),
        46: ("Reduce.launch", "streams.reduce_after_compute()", "pass"),
        72: ("UnitTree.order_gathers", "streams.gather_after_compute()", "pass"),
    },
    f"{TRACES} distributed/group_states": {
        45: ("ParamGroup._transition", "self.on_transition(before, after)", "pass"),
        131: ("ModuleHooks._handed_out", "_torch.before_in_place(view, num_writes, self._on_input_gradient)", "pass"),
    },
    "parity/communication distributed/extension_protocol": {
        49: ("HookedParams._arrive_checked", "hooked.fill_first()", "pass")
    },
    "fuzz/fuzz parity/training": {50: ("GroupGradients._landing_stages", "self._mesh.replicate.size > 1", "False")},
    "distributed/skipped_units": {
        53: ("UsedParams.land_kept", "param in anywhere", "True"),
        65: (
            "ChecksWhereRanksDiffer.end_step",
            'self._tree.agree("the agreement on which parameters had gradients", used.land_kept)',
            "pass",
        ),
        68: ("UsedParams.land_kept", "used[start + at :]", "used[at :]"),
        115: ("UsedParams.land_kept", "set(compress(gradients.params, used[start + at :]))", "set(gradients.params)"),
        122: (
            "ModuleHooks._handed_out",
            "map_tensors(lambda each: each.view_as(each) if each is view else each, output)",
            "output",
        ),
        123: ("watch_calls.watched", "output.view_as(output)", "output"),
    },
    "distributed/recovery distributed/memory accelerator/findings": {
        57: ("Gather.issue#1", "self._forget_memory()\nraise", "raise")
    },
    "distributed/recovery": {
        63: ("UnitTree._recover", "passes.in_backward", "False"),
        117: ("PassStack.has_left_behind", "inner == unit", "self.root == unit"),
        132: ("PassStack.pop_raised", "phase is Phase.FORWARD and unit == self.root", "False"),
        134: ("RunningBackward.was_left", "thread == its_thread and depth <= its_depth", "False"),
    },
    "distributed/finalization parity/step_control parity/accumulation": {
        59: ("Executor.reduce_partial", "group.gradients.awaits_all_reduce", "False")
    },
    "distributed/changed_parameters": {
        64: ("UnitTree._take_changes", "self._seen_version != ModuleTrees.version", "self._seen_version is None")
    },
    "parity/offload distributed/offload": {66: ("UnitTree.land", "self.executor.finish_copies()", "pass")},
    f"{TRACES} fuzz/fuzz distributed/skipped_units parity/training": {
        67: ("UnitTree.rules_of", "config.ranks_may_differ and has_others", "config.ranks_may_differ")
    },
    f"{TRACES} distributed/memory parity/step_control": {69: ("Executor._reduce", "self._make_room(group)", "pass")},
    "distributed/staleness parity/optimizers": {70: ("Executor._reduce", "group.note_writes()", "pass")},
    "distributed/agreement distributed/skipped_units": {
        23: ("match_channels", "_next_channel[_identity(axis.group)] = max(exchange(axis, mine))", "pass"),
        61: (
            "Alike.begin_pass",
            'tree.agree("the comparison of the models", partial(check_agreement, tree.class_name, tree.units))',
            "pass",
        ),
        73: ("reduce", "wait_for(launched(all_reduce, axis, values, op))", "pass"),
    },
    "parity/accumulation distributed/finalization distributed/misuse": {
        74: ("SplitBackwards.check", "len(losers) > may_compute_shapes", "False")
    },
    "unit/runtime": {75: ("SplitBackwards.check", "losers, self._losers = self._losers, []", "losers = self._losers")},
    "distributed/ties": {
        76: ("join_tie", "unit.hooks.hold([slot.module for slot in moved])", "pass"),
        78: ("_is_fresh", "group.unsharded.gather is None", "True"),
    },
    "parity/placement": {
        79: ("_collect", "param in ignored", "False"),
        81: ("_resolve_dim", "placement.dim % param.dim()", "placement.dim"),
    },
    "distributed/refusals": {
        80: ("read_reshard_after_forward", "value < 1 or size % value != 0", "value < 1"),
        86: ("_change_classes", "root.__class__ = original", "pass"),
    },
    "distributed/scopes distributed/unusual_parameters": {
        82: ("no_sync", "stack.callback(unit.configure, reduces=unit.config.reduces)", "pass"),
        84: ("lent_whole", "stack.callback(group.take_back)", "pass"),
    },
    "distributed/scopes parity/accumulation": {83: ("no_sync", "group.configure(requires_all_reduce=False)", "pass")},
    "accelerator/findings": {85: ("prepare_unit.commit", "setattr(module, name, buffer.to(parallel.device))", "pass")},
    "parity/clipping": {
        87: ("_groups_of", "mesh.size(axis) > 1", "False"),
        88: ("clip_grad_norm_", "error_if_nonfinite and not torch.isfinite(total)", "False"),
    },
    "parity/clipping unit/memory distributed/flat_optimizer unit/layers": {
        89: ("joined_neighbours", "nbytes <= left", "True")
    },
    "distributed/flat_optimizer": {
        90: ("FlatOptimizer._step_flat", "not layout.is_that_of(self.param_groups)", "False"),
        91: ("FlatOptimizer.__setstate__", "self._layout = None", "pass"),
    },
    "distributed/memory_limit unit/budget": {
        92: ("MemoryLimit._limited", "not self._ledger.fits(nbytes)", "False"),
        93: ("MemoryLimit._room", "self._executor.land_down_to(ledger.num_reductions)", "pass"),
        124: ("simulate", "uses[unit] == 0", "True"),
    },
    "unit/weights distributed/weights": {
        94: ("_Checked._check_header", "shape != expected", "False"),
        95: ("_Checked.problems", "keys and strict", "False"),
        96: ("_files", "cut[-1] and filled + entry.nbytes > max_nbytes", "False"),
        97: ("_check_alike#1", "others", "False"),
    },
    "unit/install distributed/install": {98: ("_refuse_our_modules", "unit_of(module) is not None", "False")},
    "unit/wire_tensors": {
        99: (
            "_blocks",
            "yield floats[:, end:].unsqueeze(1), values[:, end:].unsqueeze(1), scales[:, num_full:]",
            "pass",
        )
    },
    "unit/wire_tensors unit/check_all_gather_extension": {
        100: (
            "WireFormatTensor._before_write",
            "torch.autograd.graph.increment_version([self._data, self._origin])",
            "pass",
        ),
        101: ("BFloat16AllGatherTensor.fsdp_pre_all_gather", "padded[: self.size(0)].copy_(self._data)", "pass"),
    },
    "parity/fsdp1/optim_state_dicts parity/fsdp1/checkpoints": {
        102: ("rekeyed", "not kinds <= {str} and not kinds <= {int}", "False"),
        103: ("_check_alike", "theirs != ways[0]", "False"),
        104: ("to_load", "rank0_only and ways", "False"),
    },
    "parity/fsdp1/state_dicts accelerator/fsdp1 parity/fsdp1/extensions": {
        105: ("replace_values", "value if device is None else value.to(device)", "value"),
        106: ("_check_alike", "first != found", "False"),
    },
    "unit/skipped distributed/repeated_units": {
        112: ("Backward._ends_last_use", "self._is_following and self._num_uses[unit] > 0", "False")
    },
    "distributed/repeated_units": {
        113: ("Forward.differentiated", "unit in self._with_gradients", "False"),
        114: ("Backward.__init__", "units.num_passed.get(len(forwards), 1)", "len(forwards)"),
    },
    "distributed/compiled_blocks": {116: ("watch_calls.watched", "is_traced()", "False")},
    "parity/fsdp1/checkpoints": {
        119: ("saved_name", 'name.replace(f"{_CHECKPOINT}.", "").removesuffix(f".{_CHECKPOINT}")', "name")
    },
    "parity/fsdp1/training": {
        52: ("GroupGradients.reduce", "(self.options.fills_beside_others and True in present)", "False"),
        120: (
            "FullyShardedDataParallel._flat_owner",
            "inside_checkpoint(self._unit.modules[0])",
            "self._unit.modules[0]",
        ),
    },
    "parity/model_parallel": {
        121: ("ShardedParam.keep_grad", "self._take_unsharded_grad(dtype)", "self._take_unsharded_grad()")
    },
    "faults/unlike_ranks": {
        125: ("UnitTree._begin_backward", "self.checks.agree_on_flags()", "pass"),
        129: ("Alike.end_step", "its != scope.used and any(its)", "False"),
        130: ("Alike.end_forward", "units != self._orders.get(unit.index)", "False"),
    },
    "unit/stalls": {126: ("StallWatch._compared", "others != before", "False")},
    "distributed/transforms": {127: ("outside_transforms", "temporarily_clear_interpreter_stack()", "memoryview(b'')")},
    "faults/endings": {128: ("_wait_for_lent", "_lent and time.monotonic() < until", "False")},
    "distributed/misuse": {133: ("Bindings.rebind", "attributes.get(_torch.CALL) is expected", "False")},
    "distributed/inner_losses": {135: ("_check_reduced", "param.unsharded_grad is not None", "False")},
    "unit/runtime accelerator/left_out_waits": {
        58: ("Executor.drop", "reduction.drop()", "pass"),
        71: ("Executor.land", "self.drop()", "pass"),
        137: ("Executor.wait_for_landed", "self.streams.compute_after_reduce()", "pass"),
    },
    "unit/whole_matrices distributed/whole_matrices parity/muon": {
        138: ("Entry.update", "grad.lerp(buffer, momentum) if nesterov else buffer", "buffer"),
        139: ("EarlyRun.check", "found is not grad or (grad is not None and grad._version != version)", "False"),
        140: ("WholeMatrices.agree", "bool(failures)", "False"),
        141: ("_owners", "2 * most < matrix.numel or load_of[owner] + matrix.cost > bound", "False"),
    },
    "unit/checkpoint_mapping distributed/checkpoint_mapping": {
        142: ("runs", "entry != entries[at - 1] + 1", "False"),
        143: ("_Checked._add_rule", "len(absent) == len(rule.keys)", "bool(absent)"),
        144: ("_Gathering._part", "self._kept[0] is not weight", "False"),
    },
}


def _paths(tests: str) -> tuple[str, ...]:
    split = (each.rpartition("/") for each in tests.split())
    return tuple(f"{folder}/test_{name}.py" if name else folder for folder, _, name in split)


MUTATIONS = {number: Mutation(*row, _paths(tests)) for tests, rows in _LISTED.items() for number, row in rows.items()}
