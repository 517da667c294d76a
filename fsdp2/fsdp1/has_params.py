"""The parameters of ``FullyShardedDataParallel``: the methods of torch's class that list, show and change them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fsdp2.core import GroupState, Slot, Unit, unit_of, units_under
from fsdp2.extras.plain_names import clean_name, inside_checkpoint
from fsdp2.fsdp1 import full_params
from fsdp2.fsdp1.flat_param import FlatParameter, flat_parameter
from fsdp2.fsdp1.search import FLAT, wrappers_in
from fsdp2.fsdp1.settings import Settings


class HasParams(nn.Module):
    """Shows parameters under the names that they had before wrapping, or one flat parameter per wrapper."""

    _settings: Settings

    @property
    def _unit(self) -> Unit:
        """The unit of the module that was wrapped. Users may later wrap that module in another one, such as a
        ``checkpoint_wrapper``."""
        unit = unit_of(self)
        assert unit is not None  # __init__ sets it
        return unit

    summon_full_params = staticmethod(full_params.summon_full_params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those from ``no_sync`` that have not been reduced yet, which ``zero_grad`` of
        an optimizer or of another module does not find."""
        super().zero_grad(set_to_none)
        for wrapper in wrappers_in(self):
            for group in wrapper._unit.groups:
                group.gradients.drop()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers with their names; inside ``summon_full_params``, without the names of wrappers."""
        unit = unit_of(self)  # none yet, while the wrapper itself is made a unit
        cleans = unit is not None and unit.is_whole is not None
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_name(name) if cleans else name, buffer

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names. With ``use_orig_params``, these are the original ones; otherwise one
        ``_flat_param`` per wrapper stands for all parameters of its unit. Names contain those of wrappers, as names of
        modules do. Inside ``summon_full_params``, the original parameters have their original names. Outside of it,
        these are always the sharded parameters, which optimizers step."""
        seen: set[nn.Parameter] = set()
        for name, param in self._parameters_in(prefix, recurse):
            if not remove_duplicate or param not in seen:
                seen.add(param)
                yield name, param

    def _parameters_in(self, prefix: str, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        cleans = self._unit.is_whole is not None
        flats = {
            Slot(each._flat_owner, FLAT): flat
            for each in wrappers_in(self)
            if each._unit.is_whole is None and (flat := each._listed_flat_param) is not None
        }
        hidden = {slot for flat in flats.values() for param in flat._group.params for slot in param.slots}
        shards = {  # instead of what units that stay unsharded have bound
            slot: param.sharded
            for _, unit in units_under(self)
            for group in unit.groups
            if group.state not in (GroupState.SHARDED, GroupState.LENT)
            for param in group.params
            for slot in param.slots
        }
        shown: dict[Slot, nn.Parameter] = shards | flats
        modules = list(self.named_modules(prefix=prefix, remove_duplicate=False)) if recurse else [(prefix, self)]
        for path, module in modules:
            name = path and f"{path}."
            for short, own in module._parameters.items():
                slot = Slot(module, short)
                param = shown.get(slot, own)
                if param is not None and slot not in hidden:
                    yield clean_name(f"{name}{short}") if cleans else f"{name}{short}", param

    @property
    def _flat_param(self) -> FlatParameter | None:
        """All parameters of the unit as one; None if there are none, or if they have several dtypes."""
        groups = self._unit.groups
        if not groups or len(groups[0].shards.flats) != 1:
            return None
        before: nn.Parameter | None = self.__dict__.get("_flat")  # a plain one after a deepcopy
        if isinstance(before, FlatParameter) and before.is_away:
            return before
        if groups[0].is_stale and groups[0].state is GroupState.SHARDED:
            groups[0].take_replaced()
        flat = self.__dict__["_flat"] = flat_parameter(groups[0], before)
        return flat

    @property
    def _listed_flat_param(self) -> FlatParameter | None:
        """The flat parameter, if it stands for the original ones."""
        return None if self._settings.use_orig_params else self._flat_param

    @property
    def _flat_owner(self) -> nn.Module:
        """The module that owns the flat parameter. It holds the name only, since the shards are bound."""
        return inside_checkpoint(self._unit.modules[0])
