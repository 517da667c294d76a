"""``AdamW8bit``: which parameters are quantised, their steps, and checkpoints that are AdamW's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, door, is_plain, plans
from fsdp2.extras import torch_names
from fsdp2.extras.checked import NOT_NEGATIVE, Limit, checked
from fsdp2.extras.plain_names import without
from fsdp2.optim.adamw8bit.blocks import Blocks, blocks_of, dim_of_blocks
from fsdp2.optim.adamw8bit.states import MEAN, ROOT, SCALES, Code, Loaded, Shard, Step, agree, dithers_of, new_state
from fsdp2.optim.adamw_options import check_adamw_options
from fsdp2.optim.own_states import States, loading_itself

_STATES = ("step", "exp_avg", "exp_avg_sq")


class AdamW8bit(optim.Optimizer):
    """AdamW whose two moments take about one byte per element each, and are the same on any mesh.

    Update, options and defaults are those of ``torch.optim.AdamW``, computed in fp32 whatever the dtype of parameters;
    the moments are rounded after each step. With equal gradients, FSDP, HSDP, tensor parallelism and no sharding at all
    give the same parameters and states, bit for bit, with uneven shards, too, and on shards of torch's ``fully_shard``.

    A parameter is quantised if it has two or more dims, at least ``16 * block_size`` elements, and a dim of at least
    half a block: blocks run along the last such dim, and end with it. ``torch.optim.AdamW`` steps all others, with its
    own states. A quantised parameter takes 2 bytes per element and 8 per block, at most 2.07 per element in blocks of
    256. If a mesh cuts blocks, as ``Shard(1)`` of 1000 columns does, ``step`` communicates their scales in one message
    per mesh axis, and each rank of such a block keeps its scale. All ranks then pass the same parameters in the same
    order, and each parameter has a gradient on all of its ranks, or on none.

    ``state_dict`` has the names and shapes of AdamW's, with moments in fp32. So checkpoints load on any mesh, and into
    ``torch.optim.AdamW`` and back; what has been loaded is saved again, bit for bit. It takes 8 bytes per element for
    as long as it lives.

    Args:
        params: parameters, or param groups. Named parameters are named in errors.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        block_size: the number of elements that share a scale; at least 16. It is not part of checkpoints.

    Raises:
        TypeError: ``block_size`` is not an integer.
        ValueError: an option is out of range, or is ``amsgrad``, ``maximize`` or ``differentiable``; a parameter to be
            quantised is not a plain tensor inside, or is a flat parameter of ``FullyShardedDataParallel``.
    """

    @checked(lr=NOT_NEGATIVE, eps=NOT_NEGATIVE, weight_decay=NOT_NEGATIVE, block_size=Limit(16))
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block_size: int = 256,
    ) -> None:
        self.block_size = block_size
        self._forget()
        # torch checks the options, and knows which keys the checkpoints of this version have.
        plain = optim.AdamW([torch.zeros(1, device="cpu")], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, dict(plain.defaults))

    def _forget(self) -> None:
        self._planned: dict[object, Blocks | None] = {}  # by shape and placements
        self._adamw: optim.AdamW | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "block_size": self.block_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            group.update({**self.defaults, **group, "decoupled_weight_decay": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters.

        Raises:
            ValueError: for the same reasons as in the constructor.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            check_adamw_options("AdamW8bit", group)
            _check_options("AdamW8bit", [group])
            for index, param in enumerate(group["params"]):
                self._check_param(_name_of(group, index), param)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_param(self, name: str, param: Tensor) -> None:
        if hasattr(type(param), "_is_flat_param"):
            raise ValueError(
                f"AdamW8bit: {name} is a flat parameter of FullyShardedDataParallel, of which only this rank's part is "
                "known. Wrap the model with use_orig_params=True, or with fully_shard."
            )
        if self._blocks_of(param) is None:
            return
        is_placed = not isinstance(param, DTensor) or all(
            each.is_replicate() or torch_names.sharded_dim(each) is not None for each in param.placements
        )
        local = plans.local_part(param)
        if not is_placed or not is_plain(local) or not local.is_floating_point():
            what = f"a {type(local).__name__} of {local.dtype}" if is_placed else f"placed as {param.placements}"  # type: ignore[attr-defined]
            raise ValueError(
                f"AdamW8bit: {name}, of shape {tuple(param.shape)}, is {what}, expected plain floating-point values "
                "that are sharded or replicated. Step it with torch.optim.AdamW, or freeze it and leave it out."
            )

    def _blocks_of(self, param: Tensor) -> Blocks | None:
        """The blocks of this rank's shard; None if ``torch.optim.AdamW`` steps the parameter."""
        dim = dim_of_blocks(param.shape, self.block_size)
        if dim is None or param.dtype.itemsize > 4:
            return None
        where = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        key = tuple(param.shape), where, param.device
        if key not in self._planned:
            self._planned[key] = blocks_of(param, dim, self.block_size)
        return self._planned[key]

    @door.entry
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of ``closure``, called first.

        Raises:
            ValueError: a gradient is not placed like its parameter, or states are of another mesh. Nothing has changed.
            CommunicationError: a rank is lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: list[tuple[Tensor, Blocks, Tensor | None, dict[str, Any]]] = []
        others: list[dict[str, Any]] = []
        for group in self.param_groups:
            others.append({**group, "params": []})
            for index, param in enumerate(group["params"]):
                blocks = self._blocks_of(param)
                if blocks is None:
                    others[-1]["params"].append(param)
                else:
                    found.append((param, blocks, self._grad_of(param, blocks, _name_of(group, index)), group))
        shards = [self._shard_in_step(*each) for each in found]
        agree(shards)
        dithers: dict[object, dict[Code, Tensor]] = {}
        for shard in (each for each in shards if isinstance(each, Step)):
            key = shard.number, shard.device
            shard.dithers = dithers.get(key) or dithers.setdefault(key, dithers_of(self.block_size, *key))
            shard.write()
        if any(group["params"] for group in others):
            self._step_others(others)
        return loss

    def _grad_of(self, param: Tensor, blocks: Blocks, name: str) -> Tensor | None:
        """The gradient on this rank. Checks it, and the state."""
        grad = param.grad
        local = torch_names.locals_placed_like([param], [grad])[0] if isinstance(param, DTensor) else grad
        if grad is not None and (local is None or local.layout is not torch.strided):
            placed = grad.placements if isinstance(grad, DTensor) else f"none, in a {type(grad).__name__}"
            wanted = param.placements if isinstance(param, DTensor) else "a dense tensor"
            raise ValueError(f"AdamW8bit: the gradient of {name} has placements {placed}, expected {wanted}.")
        scale = self.state[param][SCALES[MEAN]] if self.state.get(param) else None
        if scale is not None and scale.shape != (blocks.shape[0], blocks.num_scales, blocks.shape[2]):
            raise ValueError(
                f"AdamW8bit: {name} has states with scales of shape {tuple(scale.shape)}, which are those of another "
                "mesh. Take state_dict() before the parameter is sharded in another way, and load it afterwards."
            )
        return local

    def _shard_in_step(self, param: Tensor, blocks: Blocks, grad: Tensor | None, group: dict[str, Any]) -> Shard:
        if grad is None:
            return Shard(param, replace(blocks, pieces=()), {})  # its ranks expect its place in the message
        if not self.state.get(param):
            self.state[param] = new_state(param, blocks)
        return Step(param, blocks, self.state[param], grad, group)

    def _step_others(self, groups: list[dict[str, Any]]) -> None:
        """Step the parameters of ``groups`` as ``torch.optim.AdamW`` does, with this optimizer's states."""
        if self._adamw is None:
            self._adamw = optim.AdamW([nn.Parameter(torch.empty(0))])
        self._adamw.param_groups, self._adamw.state = groups, self.state
        torch_names.unhooked_step(optim.AdamW)(self._adamw)

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim.AdamW``, with moments in fp32, which take memory of their own."""
        kept = self.state
        self.state = self._all_widened()
        try:
            return super().state_dict()
        finally:
            self.state = kept

    @torch.no_grad()
    def _all_widened(self) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]  # the order of AdamW's states
        wide = {param: self._widened(param, self.state[param]) for param in params if param in self.state}
        return type(self.state)(dict, wide)

    def _widened(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        blocks = self._blocks_of(param)
        if blocks is None or not state:
            return state
        shard, found = Shard(param, blocks, state), {"step": state["step"]}
        for code in SCALES:
            value = torch.empty_like(state[code.name], dtype=torch.float32)
            for piece in blocks.pieces:
                wide = shard.decoded(code, piece)
                blocks.of_shard(value, piece).copy_(wide.square_() if code is ROOT else wide)
            found[code.name] = _torch.dtensors_like([param], [value])[0] if isinstance(param, DTensor) else value
        return found

    @door.entry
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.optim.AdamW``. All ranks call it: it communicates as ``step``
        does.

        Raises:
            ValueError: a state is not one of AdamW, or has another shape or placement than its parameter; an option is
                not supported. Nothing has changed.
            CommunicationError: a rank is lost.
        """
        _check_options("AdamW8bit.load_state_dict", state_dict["param_groups"])
        states = {key: state for key, state in state_dict["state"].items() if state}  # some write {} for no state
        with loading_itself(self, self._is_quantised, self._check_states, self._load_states):
            super().load_state_dict({**state_dict, "state": states})

    def _is_quantised(self, param: Tensor, _: str) -> bool:
        return self._blocks_of(param) is not None

    def _check_states(self, found: States) -> None:
        names = {
            param: _name_of(group, index) for group in self.param_groups for index, param in enumerate(group["params"])
        }
        for param, state in found.items():
            if state and state.keys() != {*_STATES}:
                raise ValueError(
                    f"AdamW8bit.load_state_dict: the state of {names[param]} has the entries {sorted(state)}, expected "
                    f"those of AdamW: {list(_STATES)}."
                )
            for value in (state[code.name] for code in SCALES if state):
                local = torch_names.locals_placed_like([param], [value])[0] if isinstance(value, DTensor) else value
                if local is None or local.shape != plans.local_part(param).shape:
                    where = f"placements {value.placements}" if isinstance(value, DTensor) else "no placements"
                    raise ValueError(
                        f"AdamW8bit.load_state_dict: a state of {names[param]} has shape {tuple(value.shape)} and "
                        f"{where}, expected those of the parameter, of shape {tuple(param.shape)}. Load with "
                        "torch.distributed.checkpoint, which cuts states as this model is cut."
                    )

    @torch.no_grad()
    def _load_states(self, found: States) -> None:
        shards: list[Shard] = []
        for param in (param for group in self.param_groups for param in group["params"]):  # in one order on all ranks
            blocks, state = self._blocks_of(param), found.get(param)
            if state and blocks is not None:
                self.state[param] = new_state(param, blocks, float(state["step"]))
                shards.append(Loaded(param, blocks, self.state[param], state))
        agree(shards)
        for shard in shards:
            shard.write()


@contextmanager
def in_full_precision(optimizers: Iterable[object]) -> Iterator[None]:
    """In the block, each ``AdamW8bit`` among ``optimizers`` has the states of AdamW, so that other code can move them
    to another mesh. Afterwards it has its own again, which communicates as ``load_state_dict`` does."""
    kept = {each: each.state for each in optimizers if isinstance(each, AdamW8bit)}
    for each in kept:
        each.state = each._all_widened()
    try:
        yield
    except BaseException:
        for each, state in kept.items():
            each.state = state
        raise
    for each in kept:
        each._load_states(
            {param: each.state.get(param, {}) for group in each.param_groups for param in group["params"]}
        )


def _name_of(group: Mapping[str, Any], index: int) -> str:
    names = group.get("param_names")
    return f"parameter '{without(names[index])}'" if names else f"parameter {index} of its param group"


def _check_options(where: str, groups: Sequence[Mapping[str, Any]]) -> None:
    for index, group in enumerate(groups):
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise ValueError(
                    f"{where}: param group {index} has {name}={group[name]!r}, expected False. Use torch.optim.AdamW."
                )
