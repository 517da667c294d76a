"""A program as Python: this text is what runs, and what is printed if runtimes differ."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from tests.programs import blocks, operations
from tests.programs.program import ON_HOST, Block, Micro, Precision, Program, Step

_BLOCKS: dict[str, type] = {
    "mlp": blocks.Mlp,
    "attention": blocks.Attention,
    "norms": blocks.Norms,
    "side": blocks.Side,
    "odd": blocks.Odd,
    "itself": blocks.Itself,
    "adapters": blocks.Adapters,
}
_IMPORTS = """
import contextlib
import copy
import functools
import io
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
)
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fsdp2
from fsdp2.checkpoint import (
    async_save, from_checkpointable, load_safetensors, mirrored, optimizer_state_to_load, reshard_to,
    save_safetensors, stream_full_params, to_checkpointable
)
from fsdp2 import tensors
from tests.harness import comms, extensions
from tests.harness.models import ParityModel
from tests.harness.offload import offload_policy
from tests.harness.runtimes import installed
from tests.programs import parts

optimizers, runtimes, meshes = [], [], []


def is_ours():
    return bool(runtimes) and runtimes[0].name == "fsdp2"
"""
_MAIN = """
if __name__ == "__main__":
    from tests.programs.check import main
    main({mesh!r}, with_torch={with_torch}, **{settings})
"""


def source(program: Program) -> str:
    """A module with ``build()``, ``shard(runtime, model, mesh)``, ``run(step, model)`` and ``optimizer(parameters)``,
    as ``harness.training.Case`` takes them. Run as a script, it compares: see ``check.main``."""
    classes = dict.fromkeys(_BLOCKS[block.kind] for block in program.blocks)
    parts = [_IMPORTS, *(inspect.getsource(cls) for cls in classes), _model(program), _shard(program), _run(program)]
    main = _MAIN.format(mesh=program.mesh, with_torch=not program.ranks_differ, settings=settings(program))
    return "\n\n".join(part.strip("\n") for part in [*parts, main]) + "\n"


def settings(program: Program) -> dict[str, Any]:
    """What a case has besides its functions; ``is_low`` and ``has_reference`` say how it is compared."""
    own = {"clip_norm": program.clip_norm, "set_to_none": program.set_to_none, "num_steps": len(program.steps)}
    own["is_wrapped"] = program.way == "FSDP1"
    taken = ("gradients", "parameters") if "overlapped" in program.optimizer else ("gradients",)
    own["not_recorded"] = taken if program.optimizer in ON_HOST else ()
    return {**own, "is_low": is_low(program), "has_reference": has_reference(program)}


def is_low(program: Program) -> bool:
    """Whether something is computed in less than fp32."""
    precision = program.precision
    named = (precision.param, precision.reduce, precision.output)
    is_rounded = not {"bfloat16", "float16"}.isdisjoint(named) or precision.wire is not None
    return bool(program.autocast) or is_rounded or any(block.wire for block in program.blocks)


def has_reference(program: Program) -> bool:
    """Whether the unsharded model computes the same: not if gradients are not averaged, or are rounded and cut."""
    return not (
        program.divide_factor is not None
        or program.mesh == "experts"
        or program.ignored
        or any(block.wire == "nf4" for block in program.blocks)
        or program.reduces_unused
        or (program.way == "FSDP1" and _leaves_out(program))
        or (is_low(program) and (program.clip_norm is not None or program.optimizer.startswith("AdamW")))
    )


def _num_losses(step: Step) -> int:
    """How many losses a step has gradients of, each as often as it has backwards."""
    return sum(micro.backwards * max(micro.forwards, 1 + micro.apart) for micro in step.micros)


def _leaves_out(program: Program) -> bool:
    """Whether some parameters get no gradient in a step: a wrapper has gradients for all of its own, or for none."""
    uses_side = all(micro.uses_side for step in program.steps for micro in step.micros)
    return any(block.skipped or block.detached or (block.kind == "side" and not uses_side) for block in program.blocks)


def _indented(text: str, by: int = 4) -> Iterator[str]:
    for line in text.strip("\n").splitlines():
        yield " " * by + line if line else ""


def _model(program: Program) -> str:
    dim = program.dim
    lines = ["class Model(ParityModel):", "    def __init__(self):", "        super().__init__()"]
    lines.append(f"        self.entry = nn.Linear({dim}, {dim})")
    for index, block in enumerate(program.blocks):
        lines.append(f"        self.block{index} = {_BLOCKS[block.kind].__name__}({dim}){'.double()' * block.double}")
        if block.frozen:
            lines.append(f"        next(self.block{index}.parameters()).requires_grad_(False)")
    lines.append(f"        self.exit = nn.Linear({dim}, {dim})")
    if program.tied:
        lines.append("        self.exit.weight = self.entry.weight")
    if program.buffer:
        lines.append('        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))')
    if program.scalar:
        lines.append("        self.gain = nn.Parameter(torch.tensor(1.25))")
    lines += ["", "    def batch(self, generator):", f"        return (torch.randn(6, {dim}, generator=generator),)"]
    lines += ["", "    def forward(self, x, skipped=(), left_out=(), uses_side=True):"]
    if program.precision.param and not program.precision.casts_inputs:
        lines += ['        if hasattr(self, "unshard"):', f"            x = x.to(torch.{program.precision.param})"]
    lines.append("        x = self.entry(x)")
    for index, block in enumerate(program.blocks):
        lines += _indented("\n".join(_calls(index, block)), 8)
    lines.append("        x = self.exit(x) * self.gain" if program.scalar else "        x = self.exit(x)")
    if program.buffer:
        lines.append("        self.calls += 1")
    lines.append("        return x")
    if any(micro.called == "method" for step in program.steps for micro in step.micros):
        lines += ["", "    def also(self, *inputs, **options):", "        return self.forward(*inputs, **options)"]
    lines += ["", ""]
    if any(block.checkpoint for block in program.blocks):
        lines += operations.CHECKPOINTED.splitlines()
    if any("reference" in micro.between for step in program.steps for micro in step.micros):
        lines += operations.REFERENCE.splitlines()
    lines += ["def build():", "    runtimes.clear()", "    return Model()", "", ""]
    made = operations.OPTIMIZERS[program.optimizer].replace("{sum}", str(max(map(_num_losses, program.steps))))
    lines += ["def optimizer(parameters):", f"    optimizers[:] = [{made}]"]
    lines.append("    return optimizers[0]")
    if program.clips_by == "fsdp2":
        lines += ["", "", "def clip(parameters, most):"]
        lines.append("    clips = fsdp2.clip_grad_norm_ if is_ours() else nn.utils.clip_grad_norm_")
        lines.append("    return clips(parameters, most)")
    return "\n".join(lines)


def _calls(index: int, block: Block) -> Iterator[str]:
    """The lines of forward that call a block."""
    given = f"x.to(next(self.block{index}.parameters()).dtype)" if block.double else "x"
    value = f"self.block{index}({given}, uses_side)"
    if block.checkpoint:
        value = f"checkpointed(self.block{index}, {given}, uses_side, {operations.CHECKPOINTS[block.checkpoint]})"
    if block.double:
        value += ".to(x.dtype)"
    call = f"x = {value}"
    if block.detached:
        value += ".detach()"
        call = f"x = x + {value}"
    if block.left_out:
        yield f"if {index} in left_out:"
        yield '    if not hasattr(self, "unshard"):  # the unsharded model has gradients of zero, to be averaged'
        yield f"        x = x + 0 * {value}"
    if block.left_out or block.skipped:
        yield f"{'elif' if block.left_out else 'if'} {index} not in skipped:"
        yield from [f"    {call}"] * block.uses
    else:
        yield from [call] * block.uses


def _policy(precision: Precision, *, is_root: bool) -> str:
    given = {"param_dtype": precision.param, "reduce_dtype": precision.reduce}
    if is_root:
        given["output_dtype"] = precision.output
    said = [f"{name}=torch.{dtype}" for name, dtype in given.items() if dtype]
    if not precision.casts_inputs:
        said.append("cast_forward_inputs=False")
    if precision.wire:
        said.append(f"reduce_wire={'tensors.Int8Wire()' if precision.wire == 'int8' else f'torch.{precision.wire}'}")
    return f"runtime.MixedPrecisionPolicy({', '.join(said)})"


def _shard(program: Program) -> str:
    own = 'mesh["dp"]' if program.mesh == "tp" else "mesh"
    lines = ["def shard(runtime, model, mesh):", f"    runtimes[:], meshes[:] = [runtime], [{own}]"]
    for index, block in enumerate(program.blocks):
        if program.mesh == "tp":
            plan = '{"up": ColwiseParallel(), "down": RowwiseParallel()}'
            lines.append(f'    parallelize_module(model.block{index}, mesh["tp"], {plan})')
        if block.wire:
            lines += _indented(operations.WIRES[block.wire].format(index=index))
    lines.append('    kwargs = {"mesh": mesh["dp"]}' if program.mesh == "tp" else '    kwargs = {"mesh": mesh}')
    if program.precision != Precision():
        lines.append(f'    kwargs["mp_policy"] = {_policy(program.precision, is_root=False)}')
    if program.offload:
        lines.append('    kwargs["offload_policy"] = offload_policy(runtime)')
    if program.placement_dim:
        lines.append('    kwargs["shard_placement_fn"] = lambda param: Shard(param.dim() - 1)')
    listed = range(len(program.blocks))[-2:] if program.listed else range(0)
    for index, block in enumerate(program.blocks):
        mesh = ' | {"mesh": mesh["shard"]}' if program.mesh == "experts" and index == 0 else ""
        given = f"**(kwargs{mesh})" if mesh else "**kwargs"
        if block.inner:
            lines.append(f"    runtime.fully_shard(next(model.block{index}.children()), {given})")
        if block.alone and index not in listed:
            lines.append(f"    runtime.fully_shard(model.block{index}{_reshard(block.reshard)}, {given})")
    if program.listed:
        named = ", ".join(f"model.block{index}" for index in listed)
        lines.append(f"    runtime.fully_shard([{named}]{_reshard(program.blocks[-1].reshard)}, **kwargs)")
    if program.covered:
        lines += [f"    runtime.fully_shard({end}, **kwargs)" for end in ("model.entry", "model.exit")]
    if program.precision.output:
        lines.append(f'    kwargs["mp_policy"] = {_policy(program.precision, is_root=True)}')
    ignored = ", ignored_params={model.exit.bias}" if program.ignored else ""
    lines.append(f"    runtime.fully_shard(model{_reshard(program.root_reshard)}{ignored}, **kwargs)")
    units = [f"model.block{index}" for index, block in enumerate(program.blocks) if block.alone and index not in listed]
    if program.covered:
        units = ["model.entry", *units, "model.exit"]
    if program.prefetch:
        for first, second in itertools.pairwise(units):
            lines.append(f"    {first}.set_modules_to_forward_prefetch([{second}])")
            lines.append(f"    {second}.set_modules_to_backward_prefetch([{first}])")
    if program.divide_factor is not None:
        lines += [f"    {unit}.set_gradient_divide_factor({program.divide_factor})" for unit in ["model", *units]]
    if program.force_sum:
        lines += [f"    {unit}.set_force_sum_reduction_for_comms(True)" for unit in ["model", *units]]
    if program.reduces_unused:
        lines.append("    model.set_reduce_scatter_unused_params(True)")
    if program.ranks_differ:
        lines.append("    model.set_ranks_may_differ(True)")
    lines += [f"    model.block{i}.compile(backend='aot_eager')" for i, b in enumerate(program.blocks) if b.compiled]
    if program.compiled:
        lines.append("    model.compile(backend='aot_eager')")
    if any(micro.called == "method" for step in program.steps for micro in step.micros):
        lines.append("    runtime.register_fsdp_forward_method(model, 'also')")
    if operations.SETTINGS.get(program.setting):
        lines += ['    if runtime.name == "fsdp2":', f"        {operations.SETTINGS[program.setting]}"]
    if program.optimizer in ON_HOST:
        lines.append("    model.set_is_last_backward(False)")
    if program.memory:
        lines.append('    if runtime.name == "fsdp2":  # torch has no such limit')
        lines += _indented(operations.MEMORY[program.memory], 8)
    if program.way == "FSDP1":
        return _wrap(program)
    if program.way == "install":
        lines = [*lines[:1], "    with installed(runtime) as runtime:", *(f"    {line}" for line in lines[1:])]
    return "\n".join(lines)


def _wrap(program: Program) -> str:
    """The model under FSDP1's class."""
    lines = [
        "def shard(runtime, model, mesh):",
        "    runtimes[:], meshes[:] = [runtime], [mesh]",
        "    wrapped = functools.partial(",
        "        runtime.FullyShardedDataParallel,",
    ]
    lines.append("        device_mesh=mesh, device_id=torch.device(mesh.device_type), use_orig_params=True,")
    if program.precision != Precision():
        own = _policy(program.precision, is_root=False).partition("(")[2]
        own = own.replace("cast_forward_inputs=False", "cast_root_forward_inputs=False")
        lines.append(f"        mixed_precision=MixedPrecision({own},")
    if program.offload:
        lines.append("        cpu_offload=CPUOffload(offload_params=True),")
    if program.ignored:
        lines.append("        ignored_states=[model.exit.bias],")
    lines.append("    )")
    for index, block in enumerate(program.blocks):
        if block.inner:
            lines.append(f"    name, inner = next(model.block{index}.named_children())")
            lines.append(f"    setattr(model.block{index}, name, wrapped(inner{_strategy(program, block.reshard)}))")
        if block.alone:
            lines.append(f"    model.block{index} = wrapped(model.block{index}{_strategy(program, block.reshard)})")
    if program.covered:
        lines += [f"    model.{end} = wrapped(model.{end}{_strategy(program, None)})" for end in ("entry", "exit")]
    lines += [f"    model.block{i}.compile(backend='aot_eager')" for i, b in enumerate(program.blocks) if b.compiled]
    return "\n".join([*lines, f"    return wrapped(model{_strategy(program, program.root_reshard)})"])


def _strategy(program: Program, reshard: Any) -> str:
    keeps = reshard is False
    if program.mesh in ("hsdp", "one replica"):
        return f", sharding_strategy=ShardingStrategy.{'_HYBRID_SHARD_ZERO2' if keeps else 'HYBRID_SHARD'}"
    return f", sharding_strategy=ShardingStrategy.{'SHARD_GRAD_OP' if keeps else 'FULL_SHARD'}"


def _reshard(value: Any) -> str:
    return "" if value is None else f", reshard_after_forward={value}"


def _run(program: Program) -> str:
    control = "None" if program.way == "FSDP1" else "step.control(model)"
    lines = ["def run(step, model):", f"    losses, control = [], {control}", "    sharded = step.runtime is not None"]
    lines.append("    shards = list(model.parameters())  # before any forward of the step")
    lines.append('    ours = sharded and step.runtime.name == "fsdp2"')
    lines.append("    wraps = sharded and isinstance(model, step.runtime.FullyShardedDataParallel)")
    if program.mesh == "tp":
        lines.append("    step.rank = dist.get_rank() // 2  # ranks that share a layer take the same batch")
    for index, step in enumerate(program.steps):
        if len(program.steps) > 1:
            lines.append(f"    if step.index == {index}:")
        contexts = [operations.AUTOCAST] if program.autocast == "step" else []
        contexts += ["parts.Watching()"] if program.watched == "step" else []
        compiles = program.compiled or any(block.compiled for block in program.blocks)
        if compiles and any(micro.backwards == 2 for micro in step.micros):
            contexts.append(operations.SEVERAL_BACKWARDS)
        if program.setting in operations.CONTEXTS:
            contexts.append(f"{operations.CONTEXTS[program.setting]} if ours else contextlib.nullcontext()")
        body = "\n".join(_under(contexts, "\n".join(_step(index, step, program))))
        lines += _indented(body, 8 if len(program.steps) > 1 else 4)
    return "\n".join([*lines, "    return losses"])


def _with_cast(text: str, program: Program) -> str:
    """``text``, with what a block is given in the dtype that it computes in."""
    given = f"torch.{program.precision.param}" if not program.precision.casts_inputs else ""
    own = "next(model.block0.parameters()).dtype"
    return text.replace("{dtype}", f"{given} if sharded else {own}" if given else own)


def _step(number: int, step: Step, program: Program) -> Iterator[str]:
    all_blocks = program.blocks
    if program.scaled:
        yield "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)"
    for each in step.before:
        yield _with_cast(operations.BEFORE[each].strip("\n"), program)
    skipped = tuple(index for index, block in enumerate(all_blocks) if number in block.skipped)
    left_out = tuple(i for i, block in enumerate(all_blocks) if number in block.left_out and i not in skipped)
    num_micros = len(step.micros)
    syncs = {micro.sync for micro in step.micros}
    for index, micro in enumerate(step.micros):
        text = "\n".join(_micro(index, micro, program, skipped, left_out, is_last=index == num_micros - 1))
        if program.way == "FSDP1":
            whole = "model.no_sync() if sharded else contextlib.nullcontext()"
            yield from _under([whole] if micro.sync == "no reduction" else [], text)
            continue
        if "no_sync" in syncs:
            yield f"if not ours:\n    control.set_requires_gradient_sync({micro.sync != 'no_sync'})"
        if "no reduction" in syncs:
            yield f"control.set_requires_gradient_sync({micro.sync != 'no reduction'})"
        if "no all-reduce" in syncs:
            yield f"control.set_requires_all_reduce({micro.sync == 'all'})"
        if any(each.keep for each in step.micros):
            yield f"control.set_reshard_after_backward({not micro.keep})"
        if any(each.marks_last for each in step.micros):
            yield f"control.set_is_last_backward({index == num_micros - 1})"
        whole = "fsdp2.no_sync(model) if ours else contextlib.nullcontext()"
        yield from _under([whole] if micro.sync == "no_sync" else [], text)
    if step.after:
        yield _with_cast(operations.AFTER[step.after].strip("\n"), program)
    if program.scaled:
        yield "scaler.unscale_(optimizers[0])"


def _micro(
    index: int, micro: Micro, program: Program, skipped: tuple[int, ...], left_out: tuple[int, ...], *, is_last: bool
) -> Iterator[str]:
    """The forwards and backwards of a micro-batch."""
    given = f"{index}"
    given += f", skipped={skipped}" if skipped else ""
    given += f", left_out={left_out} if step.rank % 2 else ()" if left_out else ""
    given += "" if micro.uses_side else ", uses_side=False"
    if micro.fails:
        failing = f"{operations.FAILS[micro.fails]}, model, lambda: step.loss(model, {given})"
        failing += f", in_backward={micro.fails.startswith('backward')}"
        yield f"if ours:\n    parts.fail({failing})"
    if micro.evaluates:
        yield f"with torch.no_grad():\n    losses.append(step.loss(model, 5{given}))"
    if micro.by_hand == "reshard":
        yield "control.reshard()"
    elif micro.by_hand:
        yield f"handle = control.unshard(async_op={micro.by_hand == 'unshard async'})"
        if micro.by_hand == "unshard async":
            yield "handle.wait()"
    place, call, error = operations.REFUSED.get(micro.refused, ("", "", ""))
    tried = f'parts.refused(lambda: {call}, "{error}")'
    if call and not place:
        yield f"if ours:\n    {tried}"
    elif call:
        hook = {"forward": "register_forward_hook", "backward": "register_full_backward_pre_hook"}[place]
        yield f"handles = [model.block0.{hook}(lambda *_: {tried})] if ours else []"
    yield from _forwards(index, micro, program, given)
    yield from _backwards(micro, program, is_last=is_last)
    if place:
        yield "for handle in handles:\n    handle.remove()"
    if program.setting == "finalized by hand":
        yield "if ours:\n    model.finalize_backward()"


def _forwards(index: int, micro: Micro, program: Program, given: str) -> Iterator[str]:
    """The forwards, and what happens between them and the backwards."""
    called = operations.CALLED[micro.called]
    contexts = [operations.AUTOCAST] if program.autocast == "forward" else []
    contexts += ["parts.Watching()"] if program.watched == "forward" else []
    contexts += [operations.SAVED_TENSORS[program.saved_tensors]] if program.saved_tensors else []
    between = [operations.BETWEEN[each].strip("\n").replace("{index}", str(index)) for each in micro.between]
    between = [_with_cast(each.replace("{given}", given), program) for each in between]
    more = f" + step.loss({called}, 2{given})" if micro.forwards == 2 and not micro.apart else ""
    yield from _under(contexts, f"losses.append(step.loss({called}, {given}){more})")
    yield from between
    if micro.apart:
        yield from _under(contexts, f"losses.append(step.loss({called}, 2{given}))")


def _backwards(micro: Micro, program: Program, *, is_last: bool) -> Iterator[str]:
    losses = ["losses[-1]", "losses[-2]"] if micro.apart else ["losses[-1]"]
    losses = [f"scaler.scale({each})" for each in losses] if program.scaled else losses
    for loss in losses:
        ends = is_last and loss is losses[-1]
        if micro.backwards == 2:
            yield f"{loss}.backward(retain_graph=True)"
        if ends and program.optimizer in ON_HOST:
            yield "control.set_is_last_backward(True)"
        begins = ends and program.optimizer == "Muon in backward"
        whole = ["optimizers[0].overlap_backward() if ours else contextlib.nullcontext()"] if begins else []
        yield from _under(whole, "\n".join(_backward(micro, loss)))
        if ends and program.optimizer in ON_HOST:
            yield "control.set_is_last_backward(False)"


def _backward(micro: Micro, loss: str) -> Iterator[str]:
    if micro.in_thread:
        # As many threads for an operation as elsewhere: else sums are rounded in another order.
        yield "with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as other:"
        yield f"    other.submit({loss}.backward).result()"
    else:
        yield f"{loss}.backward()"


def _under(contexts: list[str], text: str) -> Iterator[str]:
    """``text``, executed under ``contexts``."""
    yield f"with {', '.join(contexts)}:\n" + "\n".join(_indented(text)) if contexts else text
