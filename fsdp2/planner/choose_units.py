"""``auto_shard``: choose the units by an FSDP1 wrap policy, or by what fits into a memory budget. ``recompute``:
activation checkpointing of one of them."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp2.core import AfterForward, CPUOffloadPolicy, FSDPModule, expect, fully_shard, plans
from fsdp2.extras.arguments import as_ours
from fsdp2.extras.output import progress
from fsdp2.extras.sizes import text_of
from fsdp2.planner.blocks import Units
from fsdp2.planner.candidates import checked_inputs, compare
from fsdp2.planner.groups import placement_for
from fsdp2.planner.machine import Machine
from fsdp2.planner.machines import MACHINES
from fsdp2.planner.measure import device_name
from fsdp2.planner.plans import Candidate, Plan
from fsdp2.planner.scenario import Choice
from fsdp2.planner.work import Checkpointing
from fsdp2.planner.workload import Workload


@dataclass(frozen=True)
class AutoShard:
    """What :func:`auto_shard` chose for a budget; ``str()`` explains why.

    Attributes:
        model: the sharded model.
        plan: all choices that were compared. The one applied is ``plan.recommended``.
        device: the name of this rank's device.
    """

    model: FSDPModule
    plan: Plan
    device: str

    @property
    def applied(self) -> Candidate:
        chosen = self.plan.recommended
        assert chosen is not None  # otherwise auto_shard would have raised
        return chosen

    def __str__(self) -> str:
        result, budget = self.applied.result, self.plan.budget_nbytes
        lines = [
            f"chose {self.applied.choice.name}: {text_of(result.reserved_nbytes)} of {text_of(budget)}. On "
            f"{self.plan.num_gpus} x {self.plan.machine.name}, a step takes {1e3 * result.time.step:.1f} ms, of which "
            f"communication is {1e3 * result.time.exposed:.1f} ms",
            *self._other_machine(),
            *self.plan.warnings,
            self._units(),
        ]
        if self.plan.caches:
            lines.append(
                "use_cache of the model's config is False now: what runs again would keep keys and values twice"
            )
        for other in self.plan.choices:
            if other.choice.num_kept == 0 and other is not self.applied:
                lines.append(f"not {other.choice.name}: {self._why_not(other)}")
        lines.append(
            "no prefetch lists: each unit prefetches the next one of the last forward, and to look further ahead gains "
            "next to nothing"
        )
        return "\n".join(lines)

    def _other_machine(self) -> list[str]:
        if self.plan.machine.is_made_of(self.device):
            return []
        return [
            f"these are times of that machine, and this rank is on {self.device}. Pass machine=, one of "
            f"{', '.join(MACHINES)}, or a file of `python -m fsdp2 measure`"
        ]

    def _units(self) -> str:
        units, num_kept = self.plan.units, self.applied.choice.num_kept
        own = ", ".join([f"{len(units.block_paths)} blocks", *units.large])
        tied = f"{' and '.join(units.tied)}, which share weights, and " if units.tied else ""
        kept = f"; the last {num_kept} blocks stay unsharded after forward: more do not fit" if num_kept else ""
        return f"units: {own}; {tied}the rest with the model{kept}"

    def _why_not(self, other: Candidate) -> str:
        if not other.may_fit:
            return f"{text_of(other.missing_nbytes)} too much"
        if not other.fits:
            return "tight"
        slower = other.result.time.step / self.applied.result.time.step - 1
        return f"{100 * slower:.0f}% slower" if slower > 0.005 else "not faster, and asks more"


@overload
def auto_shard(model: nn.Module, policy: Any, **options: Any) -> FSDPModule: ...
@overload
def auto_shard(
    model: nn.Module,
    policy: DeviceMesh | None = ...,
    *,
    budget: str | int,
    workload: Workload,
    machine: Machine | str = ...,
    **options: Any,
) -> AutoShard: ...
def auto_shard(
    model: nn.Module,
    policy: Any = None,
    *,
    budget: str | int | None = None,
    workload: Workload | None = None,
    machine: Machine | str = "H100",
    **options: Any,
) -> FSDPModule | AutoShard:
    """Call :func:`fsdp2.fully_shard` on modules inside ``model``, inner ones first, then on ``model``.

    With ``policy``, these are the modules that it chooses. With ``budget``, they are repeated blocks and large
    embeddings and heads. The fastest configuration that fits into the budget is applied, with activation checkpointing
    if necessary; then ``use_cache`` in the model's config becomes False, as in Hugging Face's own checkpointing. No
    prefetch lists are set: each unit prefetches the one that followed it in the last forward.

    Args:
        model: the model. It is changed in place.
        policy: a policy of ``torch.distributed.fsdp.wrap``, such as ``ModuleWrapPolicy({Block})``, or a function
            ``(module, recurse, nonwrapped_numel)``. What a ``CustomPolicy`` returns for a module overrides ``options``.
            With ``budget``, you may pass a mesh here: ``auto_shard(model, mesh, budget=..., workload=...)``.
        budget: how many bytes may be used on one GPU, such as ``"70GiB"``, including activations and the optimizer.
        workload: what each GPU computes in a step. Only used with ``budget``.
        machine: the machine whose rates decide what is faster, as in :func:`fsdp2.planner.plan`. Only used with
            ``budget``.
        options: arguments of ``fully_shard``, such as ``mesh`` and ``mp_policy``. With ``budget``, ``mesh`` decides
            between FSDP and HSDP, and ``mp_policy`` is derived from ``workload`` unless you pass it.

    Returns:
        With ``policy``, ``model``; with ``budget``, an :class:`AutoShard`.

    Raises:
        TypeError: neither or both of ``policy`` and ``budget`` are given; ``policy`` is neither a policy nor a
            function; ``fully_shard`` has no such option.
        ValueError: ``policy`` chooses no module; nothing fits into ``budget``; ``fully_shard`` refuses a module. In
            the last case, modules inside the refused one stay sharded.
    """
    if isinstance(policy, DeviceMesh):
        if options.get("mesh") is not None:
            raise TypeError("auto_shard: mesh is given twice, by position and by name. Drop one of the two.")
        options["mesh"], policy = policy, None
    if (policy is None) == (budget is None):
        raise TypeError(
            "auto_shard: pass either policy or budget, such as auto_shard(model, budget='70GiB', workload=...)."
        )
    if budget is None:
        from fsdp2.fsdp1.auto_wrap import shard_by_policy  # imports torch's FSDP1, which is slow

        return shard_by_policy(model, policy, **options)
    if workload is None:
        raise TypeError("auto_shard: budget needs workload, such as fsdp2.planner.Workload(batch=2, sequence=8192).")
    _check_options(model, options)
    mesh = options["mesh"] = plans.default_mesh() if options.get("mesh") is None else options["mesh"]
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"auto_shard: mesh is {mesh!r}, expected a DeviceMesh.")
    machine, limit = checked_inputs("auto_shard", machine, workload, budget, mesh.size())
    options["mp_policy"] = as_ours(options.get("mp_policy", workload.policy))
    found = _compared(model, machine, workload, limit, options)
    assert found.recommended is not None  # otherwise it would have raised
    num_shards = found.recommended.choice.shard_size or mesh.size()
    options.setdefault("shard_placement_fn", placement_for(num_shards))
    sharded: Any = _apply(model, found.units, found.recommended.choice, options)
    for path in found.caches:
        sharded.get_submodule(path).config.use_cache = False
    return AutoShard(sharded, found, device_name(plans.mesh_device(mesh)))


def _check_options(model: nn.Module, options: dict[str, Any]) -> None:
    unknown = sorted(options.keys() - inspect.signature(fully_shard).parameters.keys())
    if unknown:
        raise TypeError(f"auto_shard: fully_shard has no option {', '.join(unknown)}.")
    if "reshard_after_forward" in options:
        raise TypeError("auto_shard: budget chooses reshard_after_forward. Drop one of the two.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"auto_shard: model is {model!r}, expected an nn.Module.")


def _compared(model: nn.Module, machine: Machine, workload: Workload, limit: int, options: dict[str, Any]) -> Plan:
    """Compare the choices that ``options`` leave open.

    Raises:
        ValueError: none fits; the model's dtype is not that of the workload.
    """
    mesh = options["mesh"]

    def compared(*, offloads: bool) -> Plan:
        def is_allowed(choice: Choice) -> bool:
            is_on_one_mesh = choice.after_forward is not AfterForward.RESHARD_TO_SMALLER_MESH
            return is_on_one_mesh and choice.is_exact and choice.offloads == offloads

        return compare(
            model,
            machine,
            workload,
            num_gpus=mesh.size(),
            limit=limit,
            shard_sizes=[mesh.size(1) if mesh.ndim == 2 else None],
            is_allowed=is_allowed,
            ignored=options.get("ignored_params") or (),
            mp_policy=options["mp_policy"],
        )

    offloads = isinstance(as_ours(options.get("offload_policy")), CPUOffloadPolicy)
    if offloads:
        machine.to_host()  # raises if the machine has no such figure
    found = compared(offloads=offloads)
    if found.built_in != found.sharded_in:
        raise ValueError(
            f"auto_shard: workload.master_dtype is {workload.master_dtype!r}, but the model is in "
            f"{' and '.join(str(each).removeprefix('torch.') for each in found.built_in)}. Cast it first, such as with "
            "model.float(), or leave master_dtype out."
        )
    if found.recommended is None:
        may_offload = not offloads and machine.host_bandwidth is not None
        fits_offloaded = may_offload and compared(offloads=True).recommended is not None
        remedy = " With offload_policy=fsdp2.CPUOffloadPolicy(), it fits." if fits_offloaded else ""
        raise ValueError(f"auto_shard: {found.why_nothing_fits()}{remedy}")
    return found


def _apply(model: nn.Module, units: Units, choice: Choice, options: dict[str, Any]) -> FSDPModule:
    paths, reshards = units.block_paths, choice.after_forward is AfterForward.RESHARD
    with progress("shard", len(paths) + len(units.large), "unit") as advance:
        for index, path in enumerate(paths):
            block = model.get_submodule(path)
            recompute(block, choice.checkpointing)
            fully_shard(block, reshard_after_forward=reshards and index < len(paths) - choice.num_kept, **options)
            advance(1)
        for path in units.large:
            fully_shard(model.get_submodule(path), reshard_after_forward=reshards, **options)
            advance(1)
    return fully_shard(model, **options)


def recompute(module: nn.Module, checkpointing: Checkpointing | str) -> None:
    """Let ``module`` recompute activations in its backward. Call it before ``fully_shard``.

    Args:
        checkpointing: ``"full"`` keeps only the inputs of ``module``. ``"selective"`` also keeps attention and every
            second matrix product; it counts only ``mm`` and ``addmm``. Batched and grouped products, such as those of
            experts, run again. ``"none"`` changes nothing.

    Raises:
        ValueError: ``checkpointing`` is none of these.
    """
    is_known = checkpointing in [*Checkpointing, *(each.value for each in Checkpointing)]
    expected = "'none', 'selective' or 'full'"
    expect(is_known, "recompute: checkpointing", checkpointing, expected, by_value=True)
    kind = Checkpointing(checkpointing)
    if kind is Checkpointing.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind is Checkpointing.SELECTIVE:
        options["context_fn"] = _selective_contexts
    module.forward = functools.partial(checkpoint, module.forward, **options)


def _selective_contexts() -> Any:
    num_products = {False: 0, True: 0}  # in forward, and in recomputation

    def policy(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = "scaled_dot_product" in str(function)
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):  # without and with a bias
            keeps = num_products[ctx.is_recompute] % 2 == 0
            num_products[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
