"""Which modules become units: the repeated blocks, and large embeddings and heads beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdp2 import _torch

SMALLEST_SHARE = 0.05  # of the model's elements: what a container of blocks holds at least
LARGE_SHARE = 0.25  # of the largest block's elements: from here on, a module beside the blocks is a unit


@dataclass(frozen=True)
class Stack:
    """Blocks that lie in one container. ``path``: that of the container; "" is the model. ``names``: of its children
    that are blocks, in order. ``is_mapping``: it is an ``nn.ModuleDict``. ``is_whole``: it has no other children."""

    path: str
    names: tuple[str, ...]
    is_mapping: bool = False
    is_whole: bool = True

    @property
    def block_paths(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names)


@dataclass(frozen=True)
class Units:
    """What gets a ``fully_shard`` call, besides the model: all blocks of ``stacks``, and modules by path.

    Attributes:
        tied: paths of large modules that share a parameter with another one; they stay with the model.
    """

    stacks: tuple[Stack, ...]
    large: tuple[str, ...]
    tied: tuple[str, ...] = ()

    @property
    def block_paths(self) -> tuple[str, ...]:
        return tuple(path for stack in self.stacks for path in stack.block_paths)

    def renamed(self, rename: Callable[[str], str]) -> Units:
        """The same with other paths."""
        stacks = tuple(replace(stack, path=rename(stack.path)) for stack in self.stacks)
        return Units(stacks, tuple(map(rename, self.large)), tuple(map(rename, self.tied)))


def find_units(model: nn.Module) -> Units:
    """Find the units of ``model`` by its structure.

    Raises:
        ValueError: no module list of ``model`` holds blocks of equal structure.
    """
    stacks = tuple(_stacks(model, "", SMALLEST_SHARE * _numel(model)))
    if not stacks:
        containers = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"plan: found no repeated blocks in this {type(model).__name__}, expected an nn.ModuleList, "
            "nn.Sequential or nn.ModuleDict with at least two children of equal structure that hold a large part of "
            f"the parameters. It has modules of the classes {', '.join(containers)}. Keep the blocks in an "
            "nn.ModuleList, or call fsdp2.fully_shard by hand."
        )
    blocks = {model.get_submodule(path) for stack in stacks for path in stack.block_paths}
    enough = LARGE_SHARE * max(map(_numel, blocks))
    owners = Counter(
        id(param)
        for module in model.modules()
        for param in _torch.parameters_dict(module).values()
        if param is not None
    )
    large: list[str] = []
    tied: list[str] = []
    for path, module in _outside(model, "", blocks):
        own = [param for param in _torch.parameters_dict(module).values() if param is not None]
        if path and sum(param.numel() for param in own) >= enough:
            (tied if any(owners[id(param)] > 1 for param in own) else large).append(path)
    return Units(stacks, tuple(large), tuple(tied))


def structure(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that compute alike, as far as classes and parameters tell."""
    params = tuple(
        (name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in module.named_parameters()
    )
    return type(module), params


def _stacks(module: nn.Module, path: str, enough: float) -> Iterator[Stack]:
    """The outermost ones; what they hold is not searched."""
    children = {name: child for name, child in module.named_children() if _numel(child)}
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and _numel(module) >= enough:
        callable_ones = {name: child for name, child in children.items() if not _is_mere_container(child)}
        counts = Counter(map(structure, callable_ones.values()))
        repeated = {kind for (kind, _), count in counts.items() if count > 1}  # others of the class are blocks, too
        if repeated:
            names = tuple(name for name, child in callable_ones.items() if type(child) in repeated)
            yield Stack(path, names, isinstance(module, nn.ModuleDict), names == tuple(dict(module.named_children())))
            return
    for name, child in children.items():
        yield from _stacks(child, f"{path}.{name}" if path else name, enough)


def _is_mere_container(module: nn.Module) -> bool:
    """It has no forward of its own."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _outside(module: nn.Module, path: str, blocks: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in blocks:
        return
    yield path, module
    for name, child in module.named_children():
        yield from _outside(child, f"{path}.{name}" if path else name, blocks)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
