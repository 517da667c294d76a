"""``muon_groups``: which parameters of a model Muon steps, and which AdamW steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.extras.checked import checked
from fsdp2.extras.plain_names import plain_name
from fsdp2.optim.matrices.run import Rule

_HEADS = ("lm_head", "head", "output", "unembed", "classifier", "score")


@checked()
def muon_groups(
    model: nn.Module,
    *,
    is_matrix: Callable[[str, Tensor], bool] | None = None,
    rule: Rule | None = None,
    verbose: bool = True,
    **adamw: Any,
) -> list[dict[str, Any]]:
    """Divide the parameters of ``model`` into param groups for ``Muon``: by the usual rule, or by ``is_matrix``.

    By the usual rule, Muon steps the matrices of hidden layers, and parameters for which ``rule`` returns a rule. AdamW
    steps the rest: embeddings, norms, biases, other parameters without exactly two dims, and the head, known by its
    name: ``lm_head``, ``head``, ``output``, ``unembed``, ``classifier`` or ``score``, at most one level deep.

    Args:
        is_matrix: takes a name and a parameter, and returns whether Muon steps the parameter.
        rule: as for ``Muon``.
        verbose: print on rank 0 which parameters went into which group.
        adamw: options of the AdamW group.

    Returns:
        At most two groups of named parameters, one for Muon and one for AdamW. Frozen parameters are in neither.
    """
    taken = is_matrix or _usual_rule(model, rule)
    named = [(plain_name(model, name), param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = [(name, param) for name, param in named if taken(name, param)]
    names = {name for name, _ in matrices}
    others = [(name, param) for name, param in named if name not in names]
    if verbose and (not dist.is_initialized() or dist.get_rank() == 0):
        print(_table(matrices, others))
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"params": matrices, "use_muon": True})
    if others:
        groups.append({"params": others, "use_muon": False, **adamw})
    return groups


def _usual_rule(model: nn.Module, rule: Rule | None) -> Callable[[str, Tensor], bool]:
    """Decides which parameters Muon steps by default."""
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for param in module.parameters(recurse=False)
    }

    def is_matrix(name: str, param: Tensor) -> bool:
        if rule is not None and rule(name, param) is not None:
            return True
        *path, leaf = name.split(".")
        is_head = 0 < len(path) <= 2 and path[-1] in _HEADS
        return param.ndim == 2 and leaf != "bias" and id(param) not in embeddings and not is_head

    return is_matrix


def _table(matrices: Sequence[tuple[str, Tensor]], others: Sequence[tuple[str, Tensor]]) -> str:
    """List the groups, with one line for all parameters whose names differ only in numbers."""
    lines = []
    for title, named in (("Muon", matrices), ("AdamW", others)):
        numel = sum(param.numel() for _, param in named)
        lines.append(f"{title}: {len(named)} parameters, {numel:,} elements")
        patterns: dict[str, list[Tensor]] = {}
        for name, param in named:
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            patterns.setdefault(f"{pattern} {tuple(param.shape)}", []).append(param)
        lines += [
            f"  {pattern}" + (f" x {len(found)}" if len(found) > 1 else "") for pattern, found in patterns.items()
        ]
    return "\n".join(lines)
