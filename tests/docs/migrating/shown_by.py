"""Which tests show what ``docs/migrating.md`` says: for each row, and for each public name of torch's FSDP2.

A test is named by its file below ``tests`` and its name. ``tests/docs/test_migrating.py`` looks for all of them.
"""

from __future__ import annotations

ACCUMULATION = "parity/test_accumulation.py::"
ACTIONS = "distributed/test_traces.py::test_actions["
BESIDE = "docs/migrating/test_beside_torch.py::"
COMMUNICATION = "parity/test_communication.py::"
CONTROL = "parity/test_step_control.py::"
DDP = "docs/migrating/test_beside_older_classes.py::test_trains_as_ddp"
FSDP1 = "docs/migrating/test_beside_older_classes.py::test_trains_as_fsdp1"
FULL_MESH = "parity/test_model_parallel.py::test_full_mesh_with_named_axes_on_four_ranks"
HELPERS = "parity/test_state.py::"
OLDER = "docs/migrating/test_beside_older_classes.py::"
OFFLOAD = "parity/test_offload.py::"
PLACEMENT = "parity/test_placement.py::"
POLICY = "parity/test_mixed_precision.py::test_policy"
PUBLIC = "unit/test_public_api.py::test_policy_is_built_and_prints_as_that_of_torch"
RESHARDING = "parity/test_step_control.py::"
TIED = (
    "distributed/test_ties.py::test_sharded_parameters_that_are_tied_before_the_first_forward_train_as_if_tied_before"
)
UNUSUAL = "distributed/test_unusual_parameters.py::test_they_train_as_in_the_unsharded_model"
STEPS = "distributed/test_step_control.py::"
WRAPPER = "parity/fsdp1/"

NAMES = {
    "fully_shard": ["parity/test_training.py::test_trains_as_torchs"],
    "FSDPModule": [PLACEMENT + "test_class_is_both_the_original_and_fsdp_module"],
    "UnshardHandle": [RESHARDING + "test_unshard_async_hands_out_a_handle"],
    "MixedPrecisionPolicy": [PUBLIC, "unit/test_install.py::test_policies_of_torch_are_refused_by_name"],
    "OffloadPolicy": [PUBLIC, BESIDE + "test_offload_policies_of_torch_are_refused"],
    "CPUOffloadPolicy": [PUBLIC, BESIDE + "test_offload_policies_of_torch_are_refused"],
    "DataParallelMeshDims": [FULL_MESH, BESIDE + "test_names_of_axes_in_torchs_class_are_taken"],
    "register_fsdp_forward_method": ["parity/test_passes.py::test_training_through_methods_alone"],
    "share_comm_ctx": ["parity/test_accumulation.py::test_stages_that_reduce_in_their_last_backward"],
    "Comm": [BESIDE + "test_collectives_of_torchs_classes_are_taken"],
    "AllGather": [BESIDE + "test_collectives_of_torchs_classes_are_taken"],
    "ReduceScatter": [BESIDE + "test_collectives_of_torchs_classes_are_taken"],
}

ARGUMENTS = {
    "module": ["parity/test_training.py::test_trains_as_torchs", PLACEMENT + "test_list_of_modules_makes_one_group"],
    "mesh": [
        PLACEMENT + "test_default_mesh_spans_all_ranks",
        PLACEMENT + "test_hsdp_replicates_on_axis_0_and_shards_on_axis_1",
        PLACEMENT + "test_meshes_with_an_axis_of_one",
    ],
    "reshard_after_forward": [RESHARDING + "test_reshard_after_forward"],
    "shard_placement_fn": [PLACEMENT + "test_shard_placement_fn_chooses_the_dim", UNUSUAL],
    "mp_policy": [POLICY],
    **{f"MixedPrecisionPolicy.{which}_dtype": [POLICY] for which in ("param", "reduce", "output")},
    "MixedPrecisionPolicy.cast_forward_inputs": ["parity/test_mixed_precision.py::test_models_inputs_and_meshes"],
    "offload_policy": [OFFLOAD + "test_training"],
    "CPUOffloadPolicy.pin_memory": [OFFLOAD + "test_default_policy_on_a_cpu_mesh_pins_nothing"],
    "ignored_params": [PLACEMENT + "test_ignored_parameters_stay_plain_and_local"],
    **{name: [FULL_MESH] for name in ("dp_mesh_dims", "DataParallelMeshDims.shard", "DataParallelMeshDims.replicate")},
}

METHODS = {
    "unshard": [
        RESHARDING + "test_unshard_by_hand_before_forward",
        RESHARDING + "test_unshard_async_hands_out_a_handle",
    ],
    "reshard": [RESHARDING + "test_reshard_by_hand_before_and_after_forward"],
    "reset_iter_state": ["distributed/test_recovery.py::test_a_model_is_usable_and_keeps_its_gradients"],
    "set_is_last_backward": [ACCUMULATION + "test_without_gradient_sync_until_the_last_micro_batch"],
    "set_requires_gradient_sync": [ACCUMULATION + "test_without_gradient_sync_until_the_last_micro_batch"],
    "set_requires_all_reduce": [ACCUMULATION + "test_hsdp_without_all_reduce_until_the_last_micro_batch"],
    "set_reshard_after_forward": [RESHARDING + "test_set_reshard_after_forward_between_steps"],
    "set_reshard_after_backward": [
        ACTIONS + "parameters kept after backward are not gathered for the next microbatch]"
    ],
    "set_modules_to_forward_prefetch": [ACTIONS + "forward prefetches what the user listed]"],
    "set_modules_to_backward_prefetch": [ACTIONS + "backward prefetches what the user listed]"],
    "set_custom_all_gather": [COMMUNICATION + "test_custom_collectives_carry_every_message"],
    "set_custom_reduce_scatter": [COMMUNICATION + "test_custom_collectives_carry_every_message"],
    "set_all_reduce_hook": [COMMUNICATION + "test_hook_sees_the_average_or_the_sum"],
    "set_post_optim_event": [CONTROL + "test_post_optim_event"],
    "set_gradient_divide_factor": [COMMUNICATION + "test_hooks_and_divide_factors"],
    "set_reduce_scatter_unused_params": [CONTROL + "test_ranks_that_use_other_parameters_get_zeros_not_none"],
    "set_reduce_scatter_max_input_buffers": [CONTROL + "test_any_number_of_reductions_in_flight"],
    "set_unshard_in_backward": [CONTROL + "test_embedding_that_backward_does_not_gather"],
    "set_reduce_scatter_divide_factor": [COMMUNICATION + "test_settings_change_no_result"],
    "set_force_sum_reduction_for_comms": [COMMUNICATION + "test_settings_change_no_result"],
    "set_separate_reduce_scatter_group": [COMMUNICATION + "test_settings_change_no_result"],
    "set_allocate_memory_from_process_group_for_comm": [COMMUNICATION + "test_settings_change_no_result"],
    "set_symm_mem_for_comm": [
        "distributed/test_custom_comm.py::test_setting_is_refused_and_the_model_trains_as_before"
    ],
    "_set_unshard_async_op": [CONTROL + "test_unshard_async_op_switched_between_steps"],
}

_WHOLE_STATE_DICT = [HELPERS + "test_whole_states_are_those_of_the_unsharded_model"]
_FROM_RANK_0 = [HELPERS + "test_meta_model_is_loaded_from_rank_0"]
_META_DEVICE = ["parity/test_state.py::test_meta_model_is_sharded_then_materialised"]

# By heading of the page, then by first cell of a row.
ROWS: dict[str, dict[str, list[str]]] = {
    "Names, arguments and methods": {
        "`share_comm_ctx`": NAMES["share_comm_ctx"],
        "`_fsdp_api.Comm`, `AllGather`, `ReduceScatter`": NAMES["Comm"],
        "`DataParallelMeshDims.replicate`": [FULL_MESH],
        "`set_gradient_divide_factor(factor)`": METHODS["set_gradient_divide_factor"],
        "`set_symm_mem_for_comm(backend)`": METHODS["set_symm_mem_for_comm"],
    },
    "What torch 2.15 adds": {
        "`set_manual_backward_finalization(bool)`, `finalize_backward(async_op)`": [
            "parity/test_accumulation.py::test_finalized_backwards_are_those_that_reduce_in_the_last_one"
        ],
        "`set_keep_unsharded_storage(bool, recurse)`": [STEPS + "test_kept_memory_stays_where_it_is"],
        "`MixedPrecisionPolicy.param_dtype_override_fn`": [
            "parity/test_mixed_precision.py::test_unit_of_several_dtypes"
        ],
        "`grad_dtype` of a parameter": ["distributed/test_dtypes.py::test_gradient_is_reduced_and_kept_in_grad_dtype"],
        "without `reduce_dtype`, gradients are reduced in the dtype of the shards": [
            "unit/test_precision.py::test_reduction_follows_torch_unless_told_otherwise"
        ],
        "`reset_iter_state(keep_unreduced=)`": [
            "distributed/test_recovery.py::test_gradients_on_their_way_stay_after_a_forward_that_raises"
        ],
        "`GradientReductionHandle`": [
            "distributed/test_finalization.py::test_handle_waits_once_and_gradients_are_there_then"
        ],
    },
    "What differs": {
        "first call refused": [BESIDE + "test_a_first_call_that_is_refused_leaves_the_model_as_it_was"],
        "`copy.deepcopy` of a sharded module": [BESIDE + "test_torch_refuses"],
        "sharding along a dim other than 0": [BESIDE + "test_torch_refuses", UNUSUAL],
        "scalars, parameters that are not contiguous": [BESIDE + "test_torch_refuses", UNUSUAL],
        "weights tied across units": [BESIDE + "test_torch_refuses", TIED],
        "models that differ between ranks": [
            "distributed/test_agreement.py::test_models_that_differ_between_ranks_are_refused"
        ],
        "forward prefetch": [ACTIONS + "second step prefetches along the recorded order]"],
        "parameters that are sharded over other ranks": [
            "parity/test_placement.py::test_experts_are_sharded_over_a_mesh_of_their_own"
        ],
        "a model that the other's `fully_shard` was given": [
            "parity/test_torchs_tools.py::test_a_model_of_one_runtime_is_refused_by_the_other"
        ],
    },
    "What differs in control of steps and communication": {
        "`op` that a custom reduce-scatter is given": [BESIDE + "test_collectives_of_torchs_classes_are_taken"],
        "`async_op` that custom collectives are given": [BESIDE + "test_collectives_of_torchs_classes_are_taken"],
        "what the all-reduce hook is given": [BESIDE + "test_what_the_all_reduce_hook_is_given"],
    },
    "From FSDP1": {
        "`FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))`": [
            FSDP1,
            "distributed/test_auto_shard.py::test_it_trains_as_if_sharded_by_hand",
        ],
        "`process_group=`, `device_mesh=`": [FSDP1],
        "`sharding_strategy=SHARD_GRAD_OP`": [FSDP1],
        "`sharding_strategy=HYBRID_SHARD`": [FSDP1],
        "`use_orig_params=False`, for optimizers that step one flat parameter per unit": [FSDP1],
        "`mixed_precision=MixedPrecision(param_dtype, reduce_dtype)`": [FSDP1],
        "`backward_prefetch`, `forward_prefetch`, `limit_all_gathers`": [FSDP1],
        "`cpu_offload=CPUOffload(offload_params=True)`": [OFFLOAD + "test_training"],
        "`ignored_states=`, `ignored_modules=`": [
            PLACEMENT + "test_ignored_parameters_stay_plain_and_local",
            WRAPPER + "test_construction.py::test_ignored_states_stay_as_they_are",
        ],
        "`with model.no_sync():`": [FSDP1],
        "`with FSDP.summon_full_params(model):`": [
            "distributed/test_scopes.py::test_whole_parameters_are_written_back",
            WRAPPER + "test_full_params.py::test_what_is_written_back",
        ],
        "`model.clip_grad_norm_(max_norm)`": [FSDP1],
        "`sync_module_states=True`": [
            *_FROM_RANK_0,
            WRAPPER + "test_construction.py::test_states_are_those_of_the_first_rank",
        ],
        "`param_init_fn`, meta device": [
            *_META_DEVICE,
            WRAPPER + "test_construction.py::test_models_on_the_meta_device",
        ],
        "`FSDP.state_dict_type(model, FULL_STATE_DICT)`": [
            *_WHOLE_STATE_DICT,
            WRAPPER + "test_state_dicts.py::test_full_state_dict_is_one_of_the_model_without_wrappers",
        ],
        "`FSDP.state_dict_type(model, SHARDED_STATE_DICT)`": [
            "parity/test_state.py::test_state_dict_has_the_keys_layouts_and_values_of_torch",
            WRAPPER + "test_checkpoints.py::test_files_are_loaded_elsewhere",
        ],
        "`FSDP.optim_state_dict(model, optimizer)`": [
            HELPERS + "test_states_are_read_as_under_torch",
            WRAPPER + "test_optim_state_dicts.py::test_every_kind_of_every_optimizer_is_torchs",
        ],
        "`apply_activation_checkpointing(model, ...)`": [
            "parity/test_passes.py::test_checkpoint_wrapper_around_units",
            WRAPPER + "test_training.py::test_models_of_many_kinds",
        ],
    },
    "From DDP": {
        "rank 0's values are broadcast when it wraps (`init_sync`)": _FROM_RANK_0,
        "`model.module`": [PLACEMENT + "test_class_is_both_the_original_and_fsdp_module"],
        "`mixed_precision=`": [POLICY],
        "`with model.no_sync():`": [DDP],
        "`model.module.state_dict()`": _WHOLE_STATE_DICT,
        "`process_group=`, `device_mesh=`": [DDP],
        "`bucket_cap_mb=`, `bucket_cap_mb_list=`": [DDP],
        "`broadcast_buffers=True`, `forward_sync_buffers=True`": [
            OLDER + "test_buffers_are_those_of_each_rank_and_ddps_those_of_rank_0"
        ],
        "`find_unused_parameters=True`": [
            CONTROL + "test_parameters_that_no_rank_uses_get_zeros",
            "distributed/test_skipped_units.py::test_every_rank_ends_with_the_mean",
        ],
        "`register_comm_hook(state, hook)`": [DDP],
        "`ZeroRedundancyOptimizer(parameters, AdamW)`": [DDP],
    },
    "From DeepSpeed": {
        "`deepspeed.initialize(model=..., optimizer=...)`": NAMES["fully_shard"],
        "`engine.backward(loss)`, `engine.step()`": NAMES["fully_shard"],
        "`zero.Init()`": _META_DEVICE,
        "`GatheredParameters(params)`": METHODS["unshard"],
        "`bf16.enabled`": ["parity/test_mixed_precision.py::test_transformer_in_bf16_reduced_in_fp32"],
        "`fp16.enabled`, `loss_scale`": ["parity/test_optimizers.py::test_overflow_on_one_rank_skips_the_step_on_all"],
        "`engine.save_checkpoint`, `engine.load_checkpoint`": [
            "parity/test_state.py::test_checkpoint_is_loaded_elsewhere"
        ],
        "`zero_to_fp32.py`, `stage3_gather_16bit_weights_on_model_save`": _WHOLE_STATE_DICT,
    },
    "ZeRO's options": {
        '`"stage": 1`': METHODS["set_reshard_after_backward"],
        '`"stage": 2`': [ACTIONS + "parameters kept after forward are not gathered in backward]"],
        "`offload_optimizer`": ["parity/test_optimizers.py::test_steps_as_adamw_on_the_shards"],
        "`offload_param`": [OFFLOAD + "test_training", OFFLOAD + "test_trains_offloaded_as_torchs"],
        "`zero_hpz_partition_size`": [ACTIONS + "parameters rest on the smaller mesh between forward and backward]"],
        "`zero_quantized_weights`": [OLDER + "test_weights_that_travel_as_int8_train_nearly_alike"],
        "`set_z3_leaf_modules(model, [Block])`": [ACTIONS + "first step gathers each unit when it is needed]"],
    },
}
