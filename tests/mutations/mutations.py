"""One-line defects. Each must fail a test of those that are named with it: see ``__main__.py``.

``test_mutations.py`` checks that each still applies. If you change a line that one replaces, change the mutation, too.
"""

from __future__ import annotations

from dataclasses import dataclass

_SCHEDULE = (
    "unit/test_schedule_rules.py",
    "unit/test_schedule_order.py",
    "unit/test_schedule_table.py",
    "unit/test_skipped.py",
)
_TRACES = (
    "distributed/test_traces.py",
    "distributed/test_traces_of_variants.py",
)
_PLAN = (
    "unit/test_plan.py",
    "unit/test_layout.py",
    "unit/test_extension_plans.py",
)
_STREAMS = (
    "distributed/test_stream_order.py",
    "unit/test_streams.py",
)
_IN_FLIGHT = ("distributed/test_messages_in_flight.py",)
_RANDOM = ("fuzz/test_fuzz.py",)


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        file: in ``fsdp2/``.
        before, after: text that occurs there once, and what replaces it.
        tests: files in ``tests/``, in the order in which they are run until one fails.
    """

    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTATIONS = [
    # plan/layout.py
    Mutation(
        "plan/layout.py",
        "return -(-self.size // self.num_shards)",
        "return max(1, self.size // self.num_shards)",
        (*_PLAN,),
    ),
    Mutation("plan/layout.py", "return self.chunk_numel * self.num_shards", "return self.numel", (*_PLAN,)),
    Mutation("plan/layout.py", "end += -(-size // alignment) * alignment", "end += size", (*_PLAN,)),
    Mutation(
        "plan/layout.py",
        "return self.dim == 0 and not any(self.sizes[first_short + 1 :])",
        "return self.dim == 0",
        (*_PLAN,),
    ),
    # plan/dtypes.py
    Mutation(
        "plan/dtypes.py",
        "factor = float(world_size) if factor is None else factor",
        "factor = float(world_size)",
        (
            *_RANDOM,
            "unit/test_precision.py",
            "parity/test_step_control.py",
        ),
    ),
    Mutation(
        "plan/dtypes.py",
        "return DivideFactors(before, factor / before, behind_hook=True)",
        "return DivideFactors(before, factor, behind_hook=True)",
        (
            *_RANDOM,
            "unit/test_precision.py",
        ),
    ),
    Mutation(
        "plan/dtypes.py",
        "return ParamDtypes(orig, param, policy.reduce_dtype or unless_told, orig)",
        "return ParamDtypes(orig, param, param, orig)",
        (
            *_RANDOM,
            "unit/test_precision.py",
        ),
    ),
    # plan/plan.py
    Mutation(
        "plan/plan.py",
        "offset += item.layout.chunk_numel",
        "offset += item.layout.numel",
        (
            *_PLAN,
            *_RANDOM,
        ),
    ),
    Mutation(
        "plan/plan.py",
        "alignment = ALIGNMENT_NBYTES // step.source.itemsize if step.route is Route.DIRECT else 1",
        "alignment = 1",
        (*_PLAN,),
    ),
    Mutation("plan/plan.py", "is_even = item.layout.is_even or routing.reduces_uneven", "is_even = True", (*_PLAN,)),
    Mutation(
        "plan/plan.py",
        "if item.layout.dim != 0:",
        "if False:",
        (
            *_PLAN,
            "parity/test_placement.py",
        ),
    ),
    # schedule/schedule.py
    Mutation(
        "schedule/schedule.py",
        "return *gather, *self._prefetch_in_forward(unit)",
        "return gather",
        (
            *_SCHEDULE,
            *_TRACES,
        ),
    ),
    Mutation(
        "schedule/schedule.py",
        "return *actions, *((Action.RESHARD, other) for other in self._take_unused())",
        "return actions",
        (
            *_SCHEDULE,
            *_TRACES,
        ),
    ),
    Mutation(
        "schedule/schedule.py",
        "reshard = self._reshard_after_backward(unit)\n        return",
        "reshard: Actions = ()\n        return",
        (
            *_SCHEDULE,
            *_TRACES,
        ),
    ),
    Mutation(
        "schedule/schedule.py",
        "if not rules.reduces:",
        "if False:",
        (
            *_SCHEDULE,
            "parity/test_accumulation.py",
        ),
    ),
    Mutation(
        "schedule/schedule.py",
        "gather = self._gather[unit] if self.rules[unit].unshard_in_backward else ()",
        "gather = self._gather[unit]",
        (*_SCHEDULE,),
    ),
    Mutation(
        "schedule/schedule.py",
        "actions.append((Action.LAND, 0))",
        "pass",
        (
            *_SCHEDULE,
            *_RANDOM,
        ),
    ),
    Mutation(
        "schedule/schedule.py",
        "if self.phases[unit] is Phase.BACKWARD:  # checkpointing around the unit: it stays in its own backward",
        "if False:",
        (
            *_SCHEDULE,
            "parity/test_activation_checkpointing.py",
        ),
    ),
    # extras/skipped_units.py
    Mutation(
        "extras/skipped_units.py",
        "if not present.issuperset(registered):",
        "if False:",
        (
            "unit/test_skipped.py",
            "distributed/test_skipped_units.py",
        ),
    ),
    # comm/streams.py
    Mutation("comm/streams.py", "stream.wait_stream(current)  # user's", "pass  # user's", (*_STREAMS,)),
    # comm/backends.py
    Mutation(
        "comm/backends.py",
        "output[mine.numel() :].zero_()",
        "pass",
        (
            *_RANDOM,
            "distributed/test_comm.py",
            "parity/test_training.py",
        ),
    ),
    Mutation("comm/backends.py", "for other in [*others, self._mine]:", "for other in others:", (*_RANDOM,)),
    Mutation(
        "comm/backends.py",
        "_next_channel[_identity(group)] = first + 2",
        "pass",
        (
            "distributed/test_comm.py",
            "distributed/test_recovery.py",
            "distributed/test_agreement.py",
            "distributed/test_skipped_units.py",
            "distributed/test_own_groups.py",
            "distributed/test_lost_collectives.py",
        ),
    ),
    Mutation(
        "comm/backends.py",
        "_next_channel[_identity(axis.group)] = max(exchange(axis, mine))",
        "pass",
        ("distributed/test_agreement.py",),
    ),
    Mutation("comm/backends.py", "_in_flight.add(self)", "pass", _IN_FLIGHT),
    # comm/custom.py
    Mutation(
        "comm/custom.py",
        "if found != (numel, dtype, device.type, True):",
        "if False:",
        ("distributed/test_custom_comm.py",),
    ),
    # comm/offload.py
    Mutation(
        "comm/offload.py",
        "is_staged = is_elsewhere or isinstance(policy, StagedOffloadPolicy)",
        "is_staged = is_elsewhere",
        (
            "unit/test_offload.py",
            "distributed/test_offload.py",
            "parity/test_offload.py",
        ),
    ),
    # comm/custom.py
    Mutation(
        "comm/custom.py",
        "earlier.wait()  # copies its data out before the next message is written",
        "pass",
        (
            "parity/test_communication.py",
            "distributed/test_custom_comm.py",
        ),
    ),
    # group/all_gather.py
    Mutation("group/all_gather.py", "if self._cast_targets:", "if False:", (*_RANDOM,)),
    Mutation(
        "group/all_gather.py",
        "mine = output.narrow(0, self._rank * n, n)  # the gather",
        "mine = output.narrow(0, 0, n)  # the gather",
        (
            *_RANDOM,
            "distributed/test_comm.py",
            "parity/test_mixed_precision.py",
            "distributed/test_extension_training.py",
            "parity/test_placement.py",
        ),
    ),
    Mutation(
        "group/all_gather.py",
        "            self._wait_for_works()\n            self._empty(self._passing)",
        "            self._empty(self._passing)",
        (
            *_RANDOM,
            "distributed/test_recovery.py",
            "distributed/test_failure_at_every_event.py",
            "distributed/test_extension_lifetimes.py",
            "distributed/test_memory.py",
        ),
    ),
    # group/group.py
    Mutation(
        "group/group.py",
        "torch.autograd.graph.increment_version(unsharded.versioned)",
        "pass",
        (
            "distributed/test_memory.py",
            "distributed/test_inner_losses.py",
            "distributed/test_misuse.py",
            "distributed/test_staleness.py",
        ),
    ),
    Mutation(
        "group/group.py",
        "self._return_to(before)  # nothing is in flight: a refused gather leaves the group as it was",
        "pass",
        (
            "distributed/test_hook_errors.py",
            "distributed/test_misuse.py",
        ),
    ),
    Mutation(
        "group/group.py",
        "if sharded == noted and bound == noted:",
        "if sharded == noted:",
        ("distributed/test_changed_flags.py", "distributed/test_staleness.py"),
    ),
    Mutation(
        "group/group.py",
        "if parameters.get(name) is before[index]:\n                parameters[name] = forms[index]",
        "if True:\n                parameters[name] = forms[index]",
        (
            "distributed/test_changed_parameters.py",
            "distributed/test_copies.py",
            "distributed/test_misuse.py",
        ),
    ),
    # group/reduce_scatter.py
    Mutation("group/reduce_scatter.py", "if plan.factors.after != 1.0:", "if False:", (*_RANDOM,)),
    Mutation(
        "group/reduce_scatter.py",
        "if self._hook is not None and plan.factors.behind_hook:",
        "if False:",
        ("parity/test_communication.py",),
    ),
    Mutation(
        "group/reduce_scatter.py",
        "self._new_buffer = torch.zeros if is_hooked else torch.empty",
        "self._new_buffer = torch.empty",
        (
            "parity/test_communication.py",
            "distributed/test_custom_comm.py",
        ),
    ),
    # group/gradients.py
    Mutation(
        "group/gradients.py",
        "earlier, self._partial = self._partial, None\n        if earlier is not None and not",
        "earlier = None\n        if earlier is not None and not",
        (
            *_RANDOM,
            "parity/test_accumulation.py",
        ),
    ),
    Mutation(
        "group/gradients.py",
        "elif not jointly and True not in present:",
        "elif False:",
        (
            *_TRACES,
            *_RANDOM,
            "parity/test_gradients.py",
            "parity/test_passes.py",
        ),
    ),
    Mutation(
        "group/gradients.py",
        "copies.wait()",
        "pass",
        (
            *_STREAMS,
            "distributed/test_offload.py",
            "unit/test_offload.py",
        ),
    ),
    Mutation(
        "group/gradients.py",
        "            for hook in _torch.post_accumulate_grad_hooks(param):\n                hook(param)",
        "            pass",
        (
            "parity/test_optimizers.py",
            "parity/test_offload.py",
        ),
    ),
    # group/all_gather.py
    Mutation(
        "group/all_gather.py",
        "self._streams.wait_here(self._done)  # compute waits for the gather stream: compute reads what that fills",
        "pass",
        (
            *_STREAMS,
            "accelerator/test_left_out_waits.py",
        ),
    ),
    Mutation(
        "group/all_gather.py",
        "            self._streams.gather_after_compute()\n            return",
        "            return",
        (
            *_STREAMS,
            "accelerator/test_left_out_waits.py",
        ),
    ),
    Mutation(
        "group/all_gather.py",
        "release(self._lasting if self._hooks is None else self._lasting + self._hooks.storages, self._streams)",
        "pass",
        ("distributed/test_memory.py",),
    ),
    # group/group.py
    Mutation(
        "group/group.py",
        "self.on_transition(before, after)  # called first: if it raises, nothing has changed",
        "pass",
        (
            *_TRACES,
            "distributed/test_group_states.py",
        ),
    ),
    # group/reduce_scatter.py
    Mutation(
        "group/reduce_scatter.py",
        "        streams.reduce_after_compute()\n",
        "",
        (
            *_STREAMS,
            "accelerator/test_left_out_waits.py",
        ),
    ),
    # group/gradients.py
    Mutation(
        "group/gradients.py",
        "keeps_partial = self._mesh.replicate.group is not None and not self.options.requires_all_reduce",
        "keeps_partial = False",
        (
            *_RANDOM,
            "parity/test_accumulation.py",
        ),
    ),
    Mutation(
        "group/gradients.py",
        "        wait_for(works)  # on an accelerator, the reduce stream waits\n",
        "        pass\n",
        (*_RANDOM,),
    ),
    # group/hooked_params.py
    Mutation(
        "group/hooked_params.py",
        "                        hooked.fill_first()",
        "                        pass",
        (
            "parity/test_extensions.py",
            "distributed/test_extension_protocol.py",
        ),
    ),
    # group/gradients.py
    Mutation(
        "group/gradients.py",
        "reduces = self._mesh.replicate.size > 1 and not self.options.hook_reduces",
        "reduces = False",
        (
            *_RANDOM,
            "parity/test_training.py",
        ),
    ),
    Mutation(
        "group/param.py",
        "self.accumulated = grad.to(dtype)",
        "self.accumulated = grad",
        (
            *_RANDOM,
            "parity/test_accumulation.py",
        ),
    ),
    Mutation(
        "group/gradients.py",
        "(self.options.fills_beside_others and True in present)",
        "False",
        (
            "parity/fsdp1/test_behaviour.py",
            "parity/fsdp1/test_training.py",
        ),
    ),
    Mutation(
        "extras/ranks_may_differ.py",
        "late = [param in anywhere for param in landed.params]",
        "late = [True for param in landed.params]",
        ("distributed/test_other_parameters_on_other_ranks.py", "distributed/test_skipped_units.py"),
    ),
    # group/all_gather.py
    Mutation("group/all_gather.py", "self.gathered.is_lost, self._works = True, ()", "self._works = ()", _IN_FLIGHT),
    Mutation(
        "group/all_gather.py",
        "and some are not\n                self.gathered.is_lost = True\n",
        "and some are not\n",
        _IN_FLIGHT,
    ),
    # group/post_forward.py
    Mutation("group/post_forward.py", "if self.gather.gathered.is_lost:", "if False:", _IN_FLIGHT),
    # group/all_gather.py
    Mutation(
        "group/all_gather.py",
        "                self._forget_memory()\n                raise\n            try:",
        "                raise\n            try:",
        (
            "distributed/test_recovery.py",
            "distributed/test_memory.py",
            "accelerator/test_findings.py",
        ),
    ),
    # runtime/executor.py
    Mutation(
        "runtime/executor.py",
        "reduction.drop()",
        "pass",
        (
            "distributed/test_recovery.py",
            "distributed/test_failure_at_every_event.py",
        ),
    ),
    Mutation(
        "runtime/executor.py",
        "if group.gradients.awaits_all_reduce:",
        "if False:",
        (
            "distributed/test_finalization.py",
            "parity/test_step_control.py",
            "parity/test_pipeline_roots.py",
        ),
    ),
    Mutation(
        "runtime/executor.py",
        'raise group.lost("reduction", error) from error.__cause__',
        "raise",
        ("distributed/test_lost_collectives.py",),
    ),
    # runtime/root.py
    Mutation(
        "extras/alike.py",
        'root.agree("the comparison of the models", partial(check_agreement, root.class_name, root.units))',
        "pass",
        ("distributed/test_agreement.py",),
    ),
    Mutation(
        "runtime/root.py",
        "if group.stamp is not None:\n                group.reshard_if_outdated()",
        "pass",
        (
            "distributed/test_staleness.py",
            "distributed/test_changed_parameters.py",
        ),
    ),
    Mutation(
        "runtime/root.py",
        "if schedule.in_backward:\n            self.reset()",
        "if False:\n            self.reset()",
        ("distributed/test_recovery.py",),
    ),
    Mutation(
        "runtime/root.py",
        "if self._seen_version != ModuleTrees.version:",
        "if self._seen_version is None:",
        ("distributed/test_changed_modules.py",),
    ),
    Mutation(
        "extras/ranks_may_differ.py",
        'self.agree("the agreement on which parameters had gradients", used.settle)',
        "pass",
        ("distributed/test_skipped_units.py", "distributed/test_other_parameters_on_other_ranks.py"),
    ),
    Mutation(
        "runtime/root.py",
        "self.executor.do(((Action.LAND, self.unit.index),))\n        self.executor.finish_copies()",
        "self.executor.do(((Action.LAND, self.unit.index),))",
        (
            "parity/test_offload.py",
            "distributed/test_offload.py",
        ),
    ),
    Mutation(
        "runtime/root.py",
        "ranks_may_differ=config.ranks_may_differ and has_others,",
        "ranks_may_differ=config.ranks_may_differ,",
        (
            *_TRACES,
            *_RANDOM,
            "distributed/test_skipped_units.py",
            "parity/test_gradients.py",
            "parity/test_training.py",
        ),
    ),
    # extras/rank_checks.py
    Mutation(
        "extras/ranks_may_differ.py",
        "used[start + at :]",
        "used[at :]",
        ("distributed/test_other_parameters_on_other_ranks.py", "distributed/test_skipped_units.py"),
    ),
    # runtime/executor.py
    Mutation(
        "runtime/executor.py",
        "        self._make_room(group)\n        launch =",
        "        launch =",
        (
            *_TRACES,
            "distributed/test_memory.py",
            "parity/test_step_control.py",
        ),
    ),
    Mutation(
        "runtime/executor.py",
        "group.note_writes()  # before the reduction lands",
        "pass  # before the reduction lands",
        (
            "distributed/test_staleness.py",
            "parity/test_optimizers.py",
        ),
    ),
    Mutation(
        "runtime/executor.py",
        "            with suppress(CommunicationError):  # the first error is the cause\n                self.drop()",
        "            pass",
        ("unit/test_executor.py",),
    ),
    # runtime/root.py
    Mutation(
        "runtime/root.py",
        "        if event is None:\n            streams.gather_after_compute()\n            return",
        "        if event is None:\n            return",
        (
            *_STREAMS,
            "accelerator/test_left_out_waits.py",
        ),
    ),
    # extras/rank_checks.py
    Mutation(
        "extras/rank_checks.py",
        "wait_for(launched(_torch.counted_as, None, partial(all_reduce, axis, values, op)))",
        "pass",
        (
            "distributed/test_agreement.py",
            "distributed/test_skipped_units.py",
        ),
    ),
    # runtime/split_backward.py
    Mutation(
        "runtime/split_backward.py",
        "if len(losers) > may_compute_shapes:",
        "if False:",
        (
            "parity/test_pipeline_roots.py",
            "distributed/test_finalization.py",
            "distributed/test_misuse.py",
        ),
    ),
    Mutation(
        "runtime/split_backward.py",
        "self._params, self._losers = (), []",
        "self._params = ()",
        ("unit/test_split_backward.py",),
    ),
    # runtime/ties.py
    Mutation(
        "runtime/ties.py",
        "self.unit.hooks.hold([slot.module for slot in moved])",
        "pass",
        ("distributed/test_ties.py",),
    ),
    Mutation(
        "runtime/ties.py",
        "if not all(keeps(member.unit) for member in members):",
        "if False:",
        ("distributed/test_ties.py",),
    ),
    Mutation(
        "runtime/ties.py",
        "return group.state is GroupState.SHARDED and group.unsharded.gather is None",
        "return group.state is GroupState.SHARDED",
        ("distributed/test_ties.py",),
    ),
    # api/fully_shard.py
    Mutation("api/fully_shard.py", "if param in ignored:", "if False:", ("parity/test_placement.py",)),
    # api/resolve.py
    Mutation(
        "api/resolve.py",
        "if value < 1 or size % value != 0:",
        "if value < 1:",
        ("distributed/test_refusals.py",),
    ),
    Mutation(
        "api/resolve.py", "return placement.dim % param.dim()", "return placement.dim", ("parity/test_placement.py",)
    ),
    # extras/lending.py
    Mutation(
        "api/no_sync.py",
        "stack.callback(unit.configure, reduces=unit.config.reduces)",
        "pass",
        (
            "distributed/test_scopes.py",
            "distributed/test_unusual_parameters.py",
        ),
    ),
    Mutation(
        "api/no_sync.py",
        "group.configure(requires_all_reduce=False)",
        "pass",
        (
            "distributed/test_scopes.py",
            "parity/test_accumulation.py",
        ),
    ),
    Mutation("extras/lending.py", "stack.callback(group.take_back)", "pass", ("distributed/test_scopes.py",)),
    # api/fully_shard.py
    Mutation(
        "api/fully_shard.py",
        "setattr(module, name, buffer.to(self.parallel.device))",
        "pass",
        ("accelerator/test_findings.py",),
    ),
    Mutation(
        "api/fully_shard.py",
        "            root.__class__ = original\n        raise",
        "            pass\n        raise",
        ("distributed/test_refusals.py",),
    ),
    # tools/clip.py
    Mutation(
        "tools/clip.py",
        "return tuple(mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1), mesh_device(mesh)",
        "return (), mesh_device(mesh)",
        ("parity/test_clipping_on_mixed_meshes.py",),
    ),
    Mutation(
        "tools/clip.py",
        "if error_if_nonfinite and not torch.isfinite(total):",
        "if False:",
        (
            "parity/test_clipping_on_mixed_meshes.py",
            "parity/test_clipping.py",
        ),
    ),
    Mutation(
        "tools/clip.py",
        "if start == end and nbytes <= left and tensor.dtype is dtype and tensor.is_contiguous():",
        "if start == end and tensor.dtype is dtype and tensor.is_contiguous():",
        (
            "parity/test_clipping_on_mixed_meshes.py",
            "unit/test_buffers.py",
            "distributed/test_flat_optimizer.py",
            "unit/test_layers.py",
        ),
    ),
    # tools/flat_optimizer.py
    Mutation(
        "tools/flat_optimizer.py",
        "if layout is None or not layout.is_that_of(self.param_groups):",
        "if layout is None:",
        ("distributed/test_flat_optimizer.py",),
    ),
    Mutation(
        "tools/flat_optimizer.py",
        "        self._layout = None\n        super().__setstate__(state)",
        "        super().__setstate__(state)",
        ("distributed/test_flat_optimizer.py",),
    ),
    # tools/memory_limit.py
    Mutation(
        "tools/memory_limit.py",
        "if not self._ledger.fits(nbytes):",
        "if False:",
        (
            "distributed/test_memory_limit.py",
            "unit/test_budget.py",
        ),
    ),
    Mutation(
        "tools/memory_limit.py",
        "self._executor.land_down_to(ledger.num_reductions)",
        "pass",
        ("distributed/test_memory_limit.py",),
    ),
    # tools/weights.py
    Mutation(
        "tools/weights.py",
        "if shape != tuple(tensor.shape):",
        "if False:",
        (
            "unit/test_weights.py",
            "distributed/test_weights.py",
        ),
    ),
    Mutation(
        "tools/weights.py",
        "if keys and strict:",
        "if False:",
        (
            "unit/test_weights.py",
            "distributed/test_weights.py",
        ),
    ),
    # tools/save_weights.py
    Mutation(
        "tools/save_weights.py",
        "if cut[-1] and filled + entry.nbytes > max_nbytes:",
        "if False:",
        (
            "unit/test_weights.py",
            "distributed/test_weights.py",
        ),
    ),
    Mutation(
        "tools/save_weights.py",
        "if others:\n",
        "if False:\n",
        (
            "unit/test_weights.py",
            "distributed/test_weights.py",
        ),
    ),
    # tools/install.py
    Mutation(
        "tools/install.py",
        "if unit_of(module) is not None:",
        "if False:",
        (
            "unit/test_install.py",
            "distributed/test_install.py",
        ),
    ),
    # tensors/int8.py
    Mutation(
        "tensors/int8.py",
        "yield floats[:, end:].unsqueeze(1), values[:, end:].unsqueeze(1), scales[:, num_full:]",
        "pass",
        ("unit/test_int8_tensor.py",),
    ),
    # tensors/wire.py
    Mutation(
        "tensors/wire.py",
        "torch.autograd.graph.increment_version([self._data, self._origin])",
        "pass",
        ("unit/test_wire_tensors.py",),
    ),
    # tensors/bfloat16.py
    Mutation(
        "tensors/bfloat16.py",
        "padded[: self.size(0)].copy_(self._data)",
        "pass",
        (
            "unit/test_wire_tensors.py",
            "unit/test_check_all_gather_extension.py",
        ),
    ),
    # fsdp1/optim_load.py
    Mutation(
        "fsdp1/optim_load.py",
        "if not kinds <= {str} and not kinds <= {int}:",
        "if False:",
        (
            "parity/fsdp1/test_optim_state_dicts.py",
            "parity/fsdp1/test_optim_checkpoints.py",
            "unit/fsdp1",
        ),
    ),
    Mutation(
        "fsdp1/optim_load.py",
        "if theirs != ways[0]:",
        "if False:",
        (
            "parity/fsdp1/test_optim_state_dicts.py",
            "parity/fsdp1/test_optim_checkpoints.py",
        ),
    ),
    Mutation(
        "fsdp1/optim_load.py",
        "if rank0_only and ways:",
        "if False:",
        (
            "parity/fsdp1/test_optim_state_dicts.py",
            "parity/fsdp1/test_optim_checkpoints.py",
        ),
    ),
    # fsdp1/state_dict.py
    Mutation(
        "fsdp1/state_dict.py",
        "values[param] = value if device is None else value.to(device)",
        "values[param] = value",
        (
            "parity/fsdp1/test_state_dicts.py",
            "accelerator/test_fsdp1.py",
            "parity/fsdp1/test_extensions.py",
        ),
    ),
    Mutation("fsdp1/state_dict.py", "if first != found:", "if False:", ("parity/fsdp1/test_state_dicts.py",)),
    # group/all_gather.py
    Mutation(
        "group/all_gather.py",
        "                    raise\n                self.gathered.is_lost = True\n",
        "                    raise\n",
        _IN_FLIGHT,
    ),
    # extras/skipped_units.py and group/group.py: several forwards, and changes between a forward and its backward
    Mutation(
        "extras/skipped_units.py",
        "left += [each for each in around if each.unit not in self._reachable]",
        "pass",
        ("unit/test_skipped.py",),
    ),
    Mutation(
        "extras/skipped_units.py",
        "staying.update(event.unit for event in first)",
        "pass",
        ("unit/test_skipped.py",),
    ),
    Mutation(
        "group/group.py",
        "is_replaceable = before is GroupState.SHARDED and not in_backward",
        "is_replaceable = before is GroupState.SHARDED",
        ("distributed/test_changed_parameters.py",),
    ),
    Mutation(
        "group/gradients.py",
        "if self._has_kept or self.state is GradientState.UNREDUCED:",
        "if self.state is GradientState.UNREDUCED:",
        ("distributed/test_changed_flags.py",),
    ),
    # Units that run several times, or alone; compiled calls of modules with hooks
    Mutation(
        "extras/skipped_units.py",
        "if self._is_following and self._num_uses[unit] > 0:",
        "if False:",
        ("unit/test_skipped.py", "distributed/test_repeated_units.py"),
    ),
    Mutation(
        "extras/skipped_units.py",
        "if unit in self._with_gradients:",
        "if False:",
        ("distributed/test_repeated_units.py",),
    ),
    Mutation(
        "extras/skipped_units.py",
        "units.num_passed.get(len(forwards), 1)",
        "len(forwards)",
        ("distributed/test_repeated_units.py",),
    ),
    Mutation(
        "extras/ranks_may_differ.py",
        "anywhere = set(compress(gradients.params, used[start + at :]))",
        "anywhere = set(gradients.params)",
        ("distributed/test_other_parameters_on_other_ranks.py", "distributed/test_skipped_units.py"),
    ),
    Mutation(
        "_torch.py",
        "        if is_traced():\n            return call(*args, **kwargs)\n",
        "",
        ("distributed/test_compiled_blocks.py",),
    ),
    Mutation(
        "runtime/root.py",
        "return inner == unit.index and not unit.missing_modules",
        "return running == unit.index and not unit.missing_modules",
        ("distributed/test_recovery.py",),
    ),
    Mutation(
        "group/shards.py",
        "            self._follow_locals()\n            return False\n",
        "            return False\n",
        ("distributed/test_staleness.py",),
    ),
    Mutation(
        "fsdp1/names.py",
        'return clean_name(name.replace(f"{_CHECKPOINT}.", "").removesuffix(f".{_CHECKPOINT}"))',
        "return clean_name(name)",
        ("parity/fsdp1/test_optim_checkpoints.py",),
    ),
    Mutation(
        "fsdp1/wrapper.py",
        "return inside_checkpoint(self._unit.modules[0])",
        "return self._unit.modules[0]",
        ("parity/fsdp1/test_training.py",),
    ),
    Mutation(
        "group/param.py",
        "grad = self._take_unsharded_grad(dtype)",
        "grad = self._take_unsharded_grad()",
        ("parity/test_model_parallel.py",),
    ),
    Mutation(
        "runtime/hooks.py",
        "output = _viewed(output, view)",
        "output = output",
        ("distributed/test_skipped_units.py",),
    ),
    Mutation(
        "_torch.py",
        "output = output.view_as(output)",
        "output = output",
        ("distributed/test_skipped_units.py",),
    ),
    Mutation(
        "tools/memory_plan.py",
        "is_last_use=uses[unit] == 0",
        "is_last_use=True",
        ("distributed/test_memory_limit.py",),
    ),
    Mutation(
        "runtime/root.py",
        "self.checks.agree_on_flags()\n        self.compare_uses()",
        "self.compare_uses()",
        ("faults/test_unlike_ranks.py",),
    ),
    Mutation(
        "extras/stalls.py",
        "if others != before or any(",
        "if any(",
        ("unit/test_stalls.py",),
    ),
    Mutation(
        "_torch.py",
        "with temporarily_clear_interpreter_stack():",
        "if True:",
        ("distributed/test_transforms.py",),
    ),
    Mutation(
        "comm/backends.py",
        "while _lent and time.monotonic() < until:",
        "while False:",
        ("faults/test_endings.py",),
    ),
    # What all ranks must do alike
    Mutation("extras/alike.py", "if its != scope.used and any(its):", "if False:", ("faults/test_unlike_ranks.py",)),
    Mutation(
        "extras/alike.py", "if units != self._orders.get(unit.index):", "if False:", ("faults/test_unlike_ranks.py",)
    ),
    Mutation(
        "runtime/hooks.py",
        "_torch.before_in_place(view, num_writes, self._on_input_gradient)",
        "pass",
        ("distributed/test_traces.py",),
    ),
    Mutation(
        "runtime/root.py",
        "self._has_raised = self.schedule.forward_root == unit.index",
        "pass",
        ("distributed/test_recovery.py",),
    ),
    # Backwards that raise, losses inside units, optimizers in backward, guards
    Mutation(
        "group/group.py",
        "            if attributes.get(_torch.CALL) is expected:",
        "            if False:",
        ("distributed/test_misuse.py",),
    ),
    Mutation(
        "runtime/running_backward.py",
        "        if thread == its_thread and depth <= its_depth:",
        "        if False:",
        ("distributed/test_recovery.py",),
    ),
    Mutation(
        "runtime/root.py",
        "        if param.unsharded_grad is not None:",
        "        if False:",
        ("distributed/test_inner_losses.py",),
    ),
    Mutation(
        "runtime/root.py",
        "            self.executor.land_down_to(0)\n            self.executor.wait_for_landed()",
        "            pass",
        ("parity/test_optimizers.py",),
    ),
    Mutation(
        "runtime/executor.py",
        "            self.streams.compute_after_reduce()",
        "            pass",
        ("unit/test_executor.py", "accelerator/test_left_out_waits.py"),
    ),
]
