"""What programs do beyond forwards and backwards, as Python text by the name of the value or operation.

The text sees ``step``, ``model``, ``losses`` and ``optimizers`` of a printed program: see ``source``.
"""

from __future__ import annotations

# ``{sum}``: of how many losses a step has gradients. Without it, steps are so large that any rounding grows.
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(parameters, lr=0.02 / {sum}, foreach=False)",
    "momentum": "torch.optim.SGD(parameters, lr=0.02 / {sum}, momentum=0.9, weight_decay=0.01, foreach=False)",
    # eps is well above the rounding noise of a gradient, so that noise stays noise in the update
    "AdamW": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)",
    "AdamW foreach": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=True)",
    "AdamW fused": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, fused=True)",
    "AdamW one by one": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=False)",
    "AdamW flat": "parts.flat_adamw(parameters, flat=is_ours())",
    "AdamW on the host": "parts.host_adamw(parameters, runtimes=runtimes)",
    "AdamW on the host, overlapped": "parts.host_adamw(parameters, runtimes=runtimes, overlap_forward=True)",
    "Muon": "parts.muon(parameters, runtimes=runtimes)",
    "Muon in backward": "parts.muon(parameters, runtimes=runtimes)",
}

# Between steps; those of AFTER also between the last backward and the optimizer's step, when gradients are there.
BEFORE = {
    "load state dict": """
values = model.state_dict()
model.load_state_dict({name: value * 0.5 if value.is_floating_point() else value for name, value in values.items()})
""",
    "load full state dict": """
full = StateDictOptions(full_state_dict=True)
values = {name: value * 0.5 if value.is_floating_point() else value
          for name, value in get_model_state_dict(model, options=full).items()}
set_model_state_dict(model, values, options=full)
""",
    "load optimizer state": """
if wraps:
    states = type(model).optim_state_dict(model, optimizers[0])
    optimizers[0].load_state_dict(type(model).optim_state_dict_to_load(model, optimizers[0], states))
else:
    not_strict = StateDictOptions(strict=False)  # parameters without gradients so far have no states
    set_optimizer_state_dict(
        model, optimizers[0], get_optimizer_state_dict(model, optimizers[0]), options=not_strict
    )
""",
    "copy the model": """
if ours:  # torch cannot copy
    copied = copy.deepcopy(model)
    for mine, given in zip(copied.parameters(), model.parameters()):
        assert torch.equal(getattr(mine, "_local_tensor", mine), getattr(given, "_local_tensor", given))
    step.loss(copied).backward()
""",
    "freeze": "model.entry.weight.requires_grad_(False)",
    "thaw": "model.entry.weight.requires_grad_(True)",
    "reshard after forward": "control.set_reshard_after_forward(True)",
    "keep after forward": "control.set_reshard_after_forward(False)",
    "reset": """
if ours:
    model.reset_iter_state()
""",
    "write whole parameters": """
whole = type(model).summon_full_params if wraps else fsdp2.unsharded if ours else contextlib.nullcontext
with whole(model), torch.no_grad():
    for param in model.parameters():
        param.mul_(0.5)
""",
    "save and load": """
if sharded:
    with parts.shared_folder() as folder:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.zero_()
        loaded = {"model": get_model_state_dict(model)}
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(model, loaded["model"])
""",
    "save and load safetensors": """
if ours:
    with parts.shared_folder() as folder:
        save_safetensors(model, folder)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.zero_()
        load_safetensors(model, folder)
""",
    "pickle": """
if sharded:
    written = io.BytesIO()
    torch.save((model.state_dict(), optimizers[0].state_dict()), written)
    written.seek(0)
    values, states = torch.load(written, weights_only=False)
    model.load_state_dict(values)
    optimizers[0].load_state_dict(states)
""",
    "checkpointable": """
if ours:
    values = to_checkpointable(model, model.state_dict())
    model.load_state_dict(from_checkpointable(model, values))
""",
    "float8 scales": """
if ours:
    tensors.precompute_float8_scales(model)
""",
    "stream": """
if ours:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in stream_full_params(model):
        assert torch.equal(value, whole[name]), name
""",
    "to one rank and back": """
if ours:
    mesh = next(param.device_mesh for param in model.parameters() if hasattr(param, "device_mesh"))
    reshard_to(model, optimizers, parts.first_rank(mesh.device_type))
    reshard_to(model, optimizers, mesh)
""",
    "outer root": """
outer = parts.Around(model)
if ours:
    fsdp2.fully_shard(outer, mesh=meshes[0])
losses.append(step.loss(parts.Called(model, outer), 6) if ours or not sharded else step.loss(model, 6))
losses[-1].backward()
""",
    "another root": """
head = parts.Around(model.block0)
if ours:
    fsdp2.fully_shard(head, mesh=meshes[0])
elif sharded:
    raise parts.LacksError("torch's units have one root")
given = step.batch(model, 6)[0].to({dtype})
losses.append(head(given).float().square().mean())
if losses[-1].requires_grad:
    losses[-1].backward()
""",
    "schedule": "torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda _: 0.5)",
    "evaluate an average": """
with torch.no_grad():
    if ours and not wraps:
        names = dict(model.named_parameters(remove_duplicate=False))
        average = {name: value.clone().mul_(0.5) for name, value in model.state_dict().items() if name in names}
        with fsdp2.weights_of(model, average):
            losses.append(step.loss(model, 9))
    else:
        trained = [param.detach().clone() for param in model.parameters()]
        shards = list(model.parameters())
        for param in shards:
            param.mul_(0.5)
        losses.append(step.loss(model, 9))
        for param, value in zip(shards, trained, strict=True):
            param.copy_(value)
""",
    "initialise again": """
control.reshard()
parts.initialise(model, runtimes=runtimes)
""",
    "save in the background": """
if ours and not wraps:
    with parts.shared_folder() as folder:
        states = get_optimizer_state_dict(model, optimizers[0])
        frozen = {param: state for param, state in optimizers[0].state.items() if not param.requires_grad}
        async_save({"model": get_model_state_dict(model), "optimizer": states}, folder / "saved").result()
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.zero_()
        states = optimizer_state_to_load(model, optimizers[0], folder / "saved", key="optimizer")
        loaded = {"model": get_model_state_dict(model), "optimizer": states}
        dcp.load(loaded, checkpoint_id=folder / "saved")
        set_model_state_dict(model, loaded["model"])
        set_optimizer_state_dict(model, optimizers[0], loaded["optimizer"], options=StateDictOptions(strict=False))
        optimizers[0].state.update(frozen)  # which torch's function drops, and which zeros for gradients still need
""",
    "mirror and restore": """
if ours and not wraps:
    with parts.shared_folder() as folder:
        with mirrored(model, optimizers, every=1, job="program", folder=folder) as mirror:
            mirror.restore()
            mirror.after_step(step.index)
            mirror.wait()
            with torch.no_grad():
                for param in model.parameters():
                    if param.requires_grad:
                        param.zero_()
            mirrored(model, optimizers, every=1, job="program", folder=folder).restore()
""",
    "switch adapters": """
for each in model.modules():
    if isinstance(each, Adapters):
        each.switch(step.index % 2)
""",
    "merge adapters": """
for each in model.modules():
    if isinstance(each, Adapters):
        whole = type(model).summon_full_params if wraps else fsdp2.unsharded if ours else contextlib.nullcontext
        with whole(model), torch.no_grad():
            each.merge()
""",
}
WIRES = {
    "bf16": "tensors.wrap_parameters(model.block{index}, tensors.BFloat16AllGatherTensor)",
    "halved": "extensions.wrap(model.block{index}, extensions.Halved)",
    "scaled": "extensions.wrap(model.block{index}, extensions.Scaled)",
    "int8": "tensors.wrap_parameters(model.block{index}, tensors.Int8AllGatherTensor)",
    "float8": "tensors.wrap_parameters(model.block{index}, tensors.Float8AllGatherTensor)",
    "mxfp8": "tensors.wrap_parameters(model.block{index}, tensors.MXFP8AllGatherTensor)",
    "nf4": """
frozen = getattr(model.block{index}, "base", model.block{index})  # adapters are trained, and are not of 4 bits
for param in frozen.parameters():
    param.requires_grad_(param.ndim != 2)
tensors.wrap_parameters(frozen, tensors.NF4Tensor.quantise)
""",
}
REFERENCE = """\
def reference(step, model, block, *given, **more):
    flags = {name: param.requires_grad for name, param in block.named_parameters()}
    block.requires_grad_(False)
    with torch.no_grad():
        loss = step.loss(model, *given, **more)
    for name, param in block.named_parameters():
        param.requires_grad_(flags[name])
    return loss


"""
BETWEEN = {
    "reference": "losses.insert(0, reference(step, model, model.block0, 7{given}))",
    "freeze": "model.entry.weight.requires_grad_(False)",
    "thaw": "model.entry.weight.requires_grad_(True)",
    "freeze a block": "model.block0.requires_grad_(False)",
    "thaw all": "model.requires_grad_(True)",
    "freeze and restore": """
flags = [param.requires_grad for param in model.parameters()]
model.requires_grad_(False)
for param, flag in zip(model.parameters(), flags, strict=True):
    param.requires_grad_(flag)
""",
    "freeze listed": """
for param in shards[1:3]:
    param.requires_grad_(False)
""",
    "forward in vain": "losses.insert(0, step.loss(model, 8{given}).detach())",
    "infer": """
with torch.inference_mode():
    value = step.loss(model, 8{given}).item()
losses.insert(0, torch.tensor(value))
""",
    "reshard": "control.reshard()",
    "unshard": "control.unshard()",
    "another adapter": """
for each in model.modules():
    if isinstance(each, Adapters):
        each.switch(1 - each.active)
""",
    "another root": """
head = parts.Around(model.block0)
if ours:
    fsdp2.fully_shard(head, mesh=meshes[0])
elif sharded:
    raise parts.LacksError("torch's units have one root")
x = step.batch(model, 6)[0].to({dtype})
losses.insert(0, head(x).float().square().mean())
if losses[0].requires_grad:
    losses[0].backward()
""",
    "evaluate": "with torch.no_grad():\n    losses.insert(0, step.loss(model, 8{given}))",
    "state dict": """
if sharded:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    step.note(f"state dict {index}", {name: value.clone() for name, value in whole.items()})
""",
}
# The root stays unsharded after a forward; without _RESHARD, model.parameters() would not be those with gradients.
_RESHARD = """
for each in model.modules():
    if hasattr(each, "reshard"):
        each.reshard()
"""
AFTER = {
    "evaluate": f"""
with torch.no_grad():
    losses.append(step.loss(model, 7))
{_RESHARD}""",
    "infer": f"""
with torch.inference_mode():
    value = step.loss(model, 7).item()
losses.append(torch.tensor(value))
{_RESHARD}""",
    **{name: BEFORE[name] for name in ("load state dict", "load full state dict", "load optimizer state", "reset")},
    **{name: BEFORE[name] for name in ("write whole parameters", "save and load", "save and load safetensors")},
    **{name: BEFORE[name] for name in ("save in the background", "stream", "copy the model", "evaluate an average")},
    "to one rank and back": BEFORE["to one rank and back"],
}
CHECKPOINTED = """\
def keeps_products(ctx, op, *args, **kwargs):
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVELY = functools.partial(create_selective_checkpoint_contexts, keeps_products)


def checkpointed(block, x, uses_side, **how):
    if not torch.is_grad_enabled():  # torch would warn
        return block(x, uses_side)
    return checkpoint(block, x, uses_side, **how)


"""
CHECKPOINTS = {
    "reentrant": "use_reentrant=True",
    "not reentrant": "use_reentrant=False",
    "selective": "use_reentrant=False, context_fn=SELECTIVELY",
}
SAVED_TENSORS = {
    "kept": "torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda kept: kept)",
    "copied": "torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept)",
}
MEMORY = {
    "large limit": "model.set_temporary_memory_limit('1GiB')",
    "tight limit": "model.set_temporary_memory_limit(fsdp2.memory.memory_plan(model).peak)",
    "budget": """
planned = fsdp2.memory.memory_plan(model)
nbytes = torch.tensor(planned.peak + 2 * sum(unit.shards for unit in planned.units))  # a step takes 4 times its shards
dist.all_reduce(nbytes, dist.ReduceOp.MAX)
fsdp2.memory.offload_by_budget(model, int(nbytes), offload_policy=offload_policy(runtime))
""",
}
AUTOCAST = "torch.autocast('cpu', torch.bfloat16)"
SEVERAL_BACKWARDS = "torch._functorch.config.patch(donated_buffer=False)"  # of a compiled graph
# A program that fails does so under fsdp2 only: torch has no call to recover by.
FAILS = {
    "forward": "model.exit.register_forward_pre_hook(parts.stop)",
    "block": "model.block0.register_forward_hook(parts.stop)",
    "root": "model.register_forward_hook(parts.stop)",
    "backward": "model.block0.register_full_backward_pre_hook(parts.stop)",
    "backward of entry": "model.entry.register_full_backward_pre_hook(parts.stop)",
}
# What is refused, and changes nothing: where, what, and a part of the error. "": before a forward; else in that pass.
REFUSED = {
    "shard again": ("", "fsdp2.fully_shard(model)", "was given to fully_shard before"),
    "shard with FSDP1": ("", "fsdp2.FullyShardedDataParallel(model)", "fully_shard was called on this"),
    "move to nowhere": ("", "reshard_to(model, optimizers, None)", "new_mesh must be"),
    "divide by a negative number": ("", "model.set_gradient_divide_factor(-1.0)", "expected a finite number above 0"),
    "limit without a number": ("", "model.set_temporary_memory_limit('none')", "expected a number of bytes"),
    "gather by a function": ("", "model.set_custom_all_gather(print)", "expected an fsdp2.core.comms.AllGather"),
    "prefetch a plain module": (
        *(
            "",
            "model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])",
            "expected one that fully_shard was called on",
        ),
    ),
    "load what is not there": ("", "load_safetensors(model, '/not/there')", "does not exist on this rank"),
    "flatten LBFGS": (
        *(
            "",
            "fsdp2.optim.flatten_optimizer(torch.optim.LBFGS(model.parameters()))",
            "is not known to be element-wise",
        ),
    ),
    "fit into a byte": ("", "fsdp2.memory.offload_by_budget(model, 1)", "device_nbytes is 1"),
    "wrap shards": ("", "tensors.wrap_parameters(model, tensors.Int8AllGatherTensor)", "is already sharded"),
    "unshard in forward": ("forward", "contextlib.ExitStack().enter_context(fsdp2.unsharded(model))", "is running"),
    "move in forward": ("forward", "reshard_to(model, optimizers, meshes[0])", "is running"),
    "stream in backward": ("backward", "list(stream_full_params(model))", "is running"),
    "copy in backward": ("backward", "copy.deepcopy(model)", "is running"),
}
SETTINGS = {
    "keep memory": "model.set_keep_unsharded_storage(True)",
    "another group": "model.set_separate_reduce_scatter_group()",
    "two reductions": "model.set_reduce_scatter_max_input_buffers(2)",
    "ranks may differ": "model.set_ranks_may_differ(True)",
    "inner losses": "fsdp2.allow_inner_losses(model)",
    "finalized by hand": "model.set_manual_backward_finalization(True)",
    "own all-gather": "model.set_custom_all_gather(comms.CountingAllGather())",
    "own reduce-scatter": "model.set_custom_reduce_scatter(comms.CountingReduceScatter())",
    "all-reduce hook": "model.set_all_reduce_hook(lambda gradient: gradient.mul_(1))",
    "gather on the compute stream": "model._set_unshard_async_op(True)",
    "memory of the group": "model.set_allocate_memory_from_process_group_for_comm(True)",
    "entry is not gathered in backward": "model.entry.set_unshard_in_backward(False)",
    "one context": "runtime.share_comm_ctx([model])",
    "activations on the host": "fsdp2.memory.offload_activations(model, min_nbytes=1)",
}
# Around each step.
CONTEXTS = {
    "report": "fsdp2.report.report(model, steps=1)",
    "trace": "fsdp2.report.trace.record(model)",
    "joined": "parts.in_joined(model)",
}
# What is called as the model in a forward.
CALLED = {
    "": "model",
    "functionally": "parts.functionally(model)",
    "method": "parts.Called(model, model.also)",
}
