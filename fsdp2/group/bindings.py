"""Where a group's parameters are bound: writes one form of each into all slots, and leaves alone what users put there.

Knows slots, and what was bound in them last; not what the forms are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdp2 import _torch
from fsdp2.group.param import ShardedParam


class Bindings:
    """Writes one form of each parameter into all slots of a group, without ``nn.Module.__setattr__`` where possible.
    Remembers which, and leaves alone what the user has put there since."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._plain: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        self._custom: list[tuple[nn.Module, str, int]] = []
        for index, param in enumerate(params):
            for module, name in param.slots:
                if _torch.sets_attributes_plainly(module):
                    self._plain.append((_torch.parameters_dict(module), name, index))
                else:
                    self._custom.append((module, name, index))
        self._forms: Sequence[nn.Parameter] = ()

    def bind(self, forms: Sequence[nn.Parameter]) -> None:
        """Bind ``forms[i]`` in the slots of parameter i, whatever is there."""
        for parameters, name, index in self._plain:
            parameters[name] = forms[index]
        for module, name, index in self._custom:
            setattr(module, name, forms[index])
        self._forms = forms

    def rebind(self, forms: Sequence[nn.Parameter]) -> bool:
        """Bind ``forms[i]`` where the form before is still bound. Returns whether that was everywhere."""
        before, self._forms, is_intact = self._forms, forms, True
        for parameters, name, index in self._plain:
            if parameters.get(name) is before[index]:
                parameters[name] = forms[index]
            else:
                is_intact = False
        for module, name, index in self._custom:
            if getattr(module, name, None) is before[index]:
                setattr(module, name, forms[index])
            else:
                is_intact = False
        return is_intact

    def are_intact(self) -> bool:
        """Whether every slot still has what was bound last."""
        forms = self._forms
        for parameters, name, index in self._plain:
            if parameters.get(name) is not forms[index]:
                return False
        return not self._custom or all(
            getattr(module, name, None) is forms[index] for module, name, index in self._custom
        )
