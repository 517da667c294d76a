"""What programs do beyond forwards and backwards, as Python text by the name of the value or operation.

The text sees ``step``, ``model``, ``losses`` and ``optimizers`` of a printed program: see ``source``.
"""

from __future__ import annotations

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(parameters, lr=0.02, foreach=False)",
    "momentum": "torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=False)",
    # eps is well above the rounding noise of a gradient, so that noise stays noise in the update
    "AdamW": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)",
    "AdamW foreach": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=True)",
    "AdamW fused": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, fused=True)",
    "AdamW one by one": "torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=False)",
}
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
if step.runtime is not None and isinstance(model, step.runtime.FullyShardedDataParallel):
    states = type(model).optim_state_dict(model, optimizers[0])
    optimizers[0].load_state_dict(type(model).optim_state_dict_to_load(model, optimizers[0], states))
else:
    not_strict = StateDictOptions(strict=False)  # parameters without gradients so far have no states
    set_optimizer_state_dict(
        model, optimizers[0], get_optimizer_state_dict(model, optimizers[0]), options=not_strict
    )
""",
    "copy the model": """
if step.runtime is not None and step.runtime.name == "fsdp2":  # torch cannot copy
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
if step.runtime is not None and step.runtime.name == "fsdp2":
    model.reset_iter_state()
""",
    "write whole parameters": """
wrapper = step.runtime is not None and step.runtime.FullyShardedDataParallel
is_ours = step.runtime is not None and step.runtime.name == "fsdp2"
if step.runtime is not None and isinstance(model, wrapper):
    whole = wrapper.summon_full_params(model)
else:
    whole = fsdp2.unsharded(model) if is_ours else contextlib.nullcontext()
with whole, torch.no_grad():
    for param in model.parameters():
        param.mul_(0.5)
""",
    "save and load": """
if step.runtime is not None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    saved = get_model_state_dict(model)
    dcp.save({"model": saved}, checkpoint_id=folders[0])
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    loaded = {"model": get_model_state_dict(model)}
    dcp.load(loaded, checkpoint_id=folders[0])
    set_model_state_dict(model, loaded["model"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
""",
}
WIRES = {
    "bf16": "wrap_parameters(model.block{index}, BFloat16AllGatherTensor)",
    "halved": "extensions.wrap(model.block{index}, extensions.Halved)",
    "scaled": "extensions.wrap(model.block{index}, extensions.Scaled)",
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
    "evaluate": "with torch.no_grad():\n    losses.insert(0, step.loss(model, 8{given}))",
    "state dict": """
if step.runtime is not None:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    step.note(f"state dict {index}", {name: value.clone() for name, value in whole.items()})
""",
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
plan = fsdp2.memory.memory_plan(model)
nbytes = torch.tensor(plan.peak + 2 * sum(unit.shards for unit in plan.units))  # a step takes 4 times its shards
dist.all_reduce(nbytes, dist.ReduceOp.MAX)
fsdp2.memory.offload_by_budget(model, int(nbytes), offload_policy=offload_policy(runtime))
""",
}
AUTOCAST = "torch.autocast('cpu', torch.bfloat16)"
FAILS = """
if step.runtime is not None and step.runtime.name == "fsdp2":  # torch has no call to recover by
    def raises(*args):
        raise InterruptedError
    handle = model.exit.register_forward_pre_hook(raises)
    try:
        step.loss(model, {index})
    except InterruptedError:
        pass
    handle.remove()
    model.reset_iter_state(keep_unreduced=True)
"""
