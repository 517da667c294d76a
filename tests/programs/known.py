"""Where fsdp2 and torch differ on purpose, or where torch is wrong. Each entry is counted in the report."""

from __future__ import annotations

from tests.programs.program import Program

FLAGS = {
    "reference",
    "freeze",
    "thaw",
    "freeze a block",
    "thaw all",
    "freeze and restore",
    "freeze listed",
    "another adapter",
}


def known_difference(program: Program) -> str | None:
    """Why the runtimes may differ on ``program``; None if they must not."""
    uses_twice = any(block.uses == 2 for block in program.blocks)
    if program.reduces_unused and any(block.skipped for block in program.blocks):
        return "with set_reduce_scatter_unused_params, a unit that all ranks skip gets gradients of zero, in torch None"
    if any(FLAGS & set(micro.between) for step in program.steps for micro in step.micros):
        return "torch does not follow requires_grad that changes between a forward and its backward"
    if program.autocast == "step" and any(len(step.micros) > 1 for step in program.steps):
        return "torch drops gradients that come late, through casts that autocast keeps from an earlier micro-batch"
    if any("evaluate an average" in (*step.before, step.after) for step in program.steps) or (
        program.way == "FSDP1" and any(step.after in ("evaluate", "infer") for step in program.steps)
    ):
        return "torch computes with what it gathered before parameters were written"
    if program.placement_dim and any(block.wire == "float8" for block in program.blocks):
        return "torch copies what hooks return for a parameter that is cut along dim 1, and later gathers miss the copy"
    if program.clips_by == "fsdp2":
        return "fsdp2.clip_grad_norm_ adds up squares in another order"
    if program.setting == "finalized by hand" and any(micro.apart for step in program.steps for micro in step.micros):
        return "the root's gradients of two backwards that end by hand are reduced together, rounded in another order"
    if program.way == "FSDP1":
        if any(block.frozen or block.kind == "adapters" for block in program.blocks) or any(
            "freeze" in step.before for step in program.steps
        ):
            return "torch's class gives frozen parameters gradients of zero"
        if program.clip_norm is not None or program.optimizer == "AdamW fused":
            return (
                "torch's class has its parameters in other memory: norms and fused steps are rounded in another order"
            )
        if program.mesh in ("hsdp", "one rank"):
            return "where one rank has all shards, torch's class neither averages nor reduces each micro-batch once"
        several = program.tied or uses_twice or any(len(step.micros) > 1 for step in program.steps)
        if several or any(micro.forwards == 2 for step in program.steps for micro in step.micros):
            return "torch's class adds up gradients in another order, and in the dtype of the parameters"
    for step in program.steps:
        two_forwards = any(micro.forwards == 2 for micro in step.micros)
        if any(block.checkpoint == "reentrant" and (two_forwards or block.uses == 2) for block in program.blocks):
            return "torch leaves a block unreduced that is checkpointed reentrantly and used twice before backward"
        again = uses_twice or any(micro.forwards == 2 or micro.backwards == 2 for micro in step.micros)
        keeps_partial = any(micro.sync == "no all-reduce" for micro in step.micros)
        if program.mesh in ("hsdp", "one replica", "experts") and keeps_partial and again:
            return "a block used twice after a backward without all-reduce: the same sum, rounded in another order"
        is_cut_off = program.listed and program.blocks[-2].detached  # torch notices the end of its backward only then
        keeps_gradients = any(micro.sync == "no reduction" for micro in step.micros)
        if is_cut_off and keeps_gradients and again:
            return "gradients stop at a unit of two modules, used twice: fsdp2 reduces after each use, torch at the end"
        ends_twice = program.listed and any(block.checkpoint == "reentrant" for block in program.blocks[-2:])
        if ends_twice and keeps_gradients:
            return "a unit of two modules, one checkpointed reentrantly: fsdp2 reduces units inside of it twice"
    return None
