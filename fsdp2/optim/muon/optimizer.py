"""``Muon`` on sharded parameters: each matrix is orthogonalised once, on its owner; momentum stays sharded.

Arguments, defaults and numerics are those of ``torch.optim.Muon``. Rule: a step writes nothing before all ranks know
that all matrices have succeeded, so a step that raises has changed neither parameters nor states.

Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from fsdp2.core import door, expect, groups_by_slot
from fsdp2.extras import torch_names
from fsdp2.extras.checked import NOT_NEGATIVE, Limit, check, checked
from fsdp2.extras.plain_names import without
from fsdp2.extras.sizes import nbytes_of
from fsdp2.optim.adamw_options import check_adamw_options
from fsdp2.optim.matrices import Matrix, MatrixRule, WholeMatrices, whole_matrices
from fsdp2.optim.matrices.domains import Copies, subject_of
from fsdp2.optim.matrices.run import DEFAULT_BUCKET_NBYTES, Rule
from fsdp2.optim.muon.update import BUFFER, Coefficients, MatrixStep, Part, newton_schulz, parts_of
from fsdp2.optim.own_states import States, loading_itself

_STEPS = Limit(0, 99)
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MUON_KEYS = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_STATES_OF_ADAMW = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


class Muon(optim.Optimizer):
    """Muon for parameters of ``fully_shard``, this package's or torch's. Their storage does not change.

    Arguments, defaults and numerics are those of ``torch.optim.Muon``. A param group with ``use_muon=False`` is stepped
    by ``torch.optim.AdamW`` in the same call; it takes AdamW's options and has AdamW's defaults. ``muon_groups`` makes
    the groups of a model. All ranks call ``step``, since it exchanges shards.

    States are sharded like their parameters, so checkpoints are those of any sharded optimizer.

    A parameter without a gradient on all ranks is left alone. One that has a gradient on some ranks gets zeros on the
    others.

    Args:
        params: parameters, or param groups. Named parameters are named in errors.
        ns_dtype: the dtype in which matrices are communicated and orthogonalised.
        rule: takes a name and a parameter, and returns the matrices it consists of; None if it is a single matrix.
        bucket_nbytes, copies, last_first: see ``whole_matrices``.

    Raises:
        TypeError: a parameter is not a DTensor.
        ValueError: an option is out of range; a parameter is not a matrix and has no rule.
    """

    @checked(lr=NOT_NEGATIVE, weight_decay=NOT_NEGATIVE, momentum=NOT_NEGATIVE, eps=NOT_NEGATIVE, ns_steps=_STEPS)
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        rule: Rule | None = None,
        bucket_nbytes: int | str = DEFAULT_BUCKET_NBYTES,
        copies: Copies = "cheaper",
        last_first: bool = False,
    ) -> None:
        self._rule = rule
        self._settings: dict[str, Any] = {
            "dtype": ns_dtype,
            "bucket_nbytes": nbytes_of(bucket_nbytes, "Muon: bucket_nbytes", "64MiB"),
            "copies": copies,
            "last_first": last_first,
        }
        self._forget_plan()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    def _forget_plan(self) -> None:
        self._plan: WholeMatrices | None = None
        self._planned: list[object] = []  # parameters and their placements
        self._early: MatrixStep | None = None  # a step that began during backward
        self._parts: list[list[Part]] = []  # by position
        self._adamw: optim.AdamW | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rule": self._rule, "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plan()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Those of a group with ``use_muon=False`` need not be matrices.

        Raises:
            TypeError, ValueError: for the same reasons as in the constructor.
        """
        if not param_group.get("use_muon", True):
            param_group = _with_options_of_adamw(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["use_muon"]:
                _check_options(group)
                for name, param in _named(group, len(self.param_groups) - 1):
                    subject_of(0, name, param, self._rule_of(name, param))
                    if param.is_complex():
                        raise ValueError(f"Muon: '{name}' is complex.")
            else:
                for key in _MUON_KEYS:
                    if key != "eps":
                        group.pop(key, None)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def plan(self) -> WholeMatrices:
        """The owner rank of each matrix. Collective if parameters were added or moved since the last step."""
        params = [param for param, _ in self._params()]
        keys = [*params, *torch_names.specs_of(params)]
        is_planned = len(keys) == len(self._planned) and all(map(operator.is_, keys, self._planned))
        if self._plan is None or not is_planned:
            names = {
                name: param
                for index, group in enumerate(self.param_groups)
                if group["use_muon"]
                for name, param in _named(group, index)
            }
            self._plan = whole_matrices(names, rule=self._rule_of, **self._settings)
            self._planned = keys
            self._parts = parts_of(self._plan, len(params))
        return self._plan

    def _params(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """The parameters of the plan, by position, each with its param group."""
        return [(param, group) for group in self._muon_groups() for param in group["params"]]

    def _rule_of(self, name: str, param: Tensor) -> MatrixRule | None:
        return None if self._rule is None else self._rule(name, param)

    def _muon_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"]]

    @door.entry
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. Collective.

        Raises:
            RuntimeError: a matrix could not be orthogonalised. All ranks raise, and nothing has changed.
            ValueError: a gradient is not placed like its parameter, or has changed since ``overlap_backward``. The
                other ranks raise RuntimeError.
            CommunicationError: a rank is lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._muon_groups():
            early, self._early = self._early, None
            (early or self._new_step()).step()
        others = [group for group in self.param_groups if not group["use_muon"]]
        if others:
            self._step_others(others)
        return loss

    def _new_step(self) -> MatrixStep:
        return MatrixStep(self.plan, self._orthogonalised, self._params(), self._parts, self.state)

    def _orthogonalised(self, batch: Tensor, matrices: Sequence[Matrix]) -> Tensor:
        params = self._params()
        groups = [params[matrix.tensor][1] for matrix in matrices]
        options = [(each["ns_coefficients"], each["ns_steps"], each["eps"]) for each in groups]
        if all(each == options[0] for each in options):
            return newton_schulz(batch, *options[0])
        return torch.stack([newton_schulz(each, *option) for each, option in zip(batch, options, strict=True)])

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Wrap the last backward before ``step`` in this block, to send the first buckets as soon as their gradients
        are ready. Collective.

        Gradients must not change between the block and ``step``, so they cannot be clipped by their norm. Create the
        optimizer with ``last_first=True``, so that the first buckets hold the gradients that backward computes first.
        All ranks must use the same parameters.
        """
        self._drop_early()
        early = self._early = self._new_step()
        # After ``set_is_last_backward(False)``, gradients of the last backward arrive during this one.
        early.await_earlier(
            group.params[i].sharded for group, i in groups_by_slot().values() if group.gradients.in_flight
        )
        handles = [
            param.register_post_accumulate_grad_hook(lambda _, position=position: early.land(position))
            for position, (param, _) in enumerate(self._params())
            if param.requires_grad  # otherwise ``step`` sends its bucket
        ]
        try:
            yield
        except BaseException:
            self._drop_early()
            raise
        finally:
            for handle in handles:
                handle.remove()

    @property
    def has_begun(self) -> bool:
        """Whether a backward in ``overlap_backward`` has begun a step that ``step`` has not finished yet."""
        return self._early is not None

    def _drop_early(self) -> None:
        """Discard what an earlier backward has sent. Afterwards all ranks have sent the same buckets."""
        early, self._early = self._early, None
        if early is not None:
            early.drop()

    def _step_others(self, groups: list[dict[str, Any]]) -> None:
        """Step ``groups`` by AdamW, with this optimizer's states. One launch for many tensors, AdamW's default on an
        accelerator, takes no plain tensors beside DTensors."""
        if self._adamw is None:
            self._adamw = optim.AdamW([nn.Parameter(torch.empty(0))])
        kinds = [
            {**group, "params": [param for param in group["params"] if isinstance(param, DTensor) == is_sharded]}
            for group in groups
            for is_sharded in (True, False)
        ]
        self._adamw.param_groups, self._adamw.state = [group for group in kinds if group["params"]], self.state
        torch_names.unhooked_step(optim.AdamW)(self._adamw)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class, or of ``torch.optim.Muon``, has returned.

        Raises:
            ValueError: it belongs to another optimizer, or has different param groups. Nothing has changed.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):
            pairs = zip(groups, self.param_groups, strict=True)
            groups = [{**loaded, "use_muon": loaded.get("use_muon", own["use_muon"])} for loaded, own in pairs]
            self._check_states(groups, state_dict["state"])
        self._drop_early()
        with loading_itself(self, lambda _, name: name == BUFFER, lambda _: None, self._load_momentum):
            super().load_state_dict({**state_dict, "param_groups": groups})

    def _load_momentum(self, found: States) -> None:
        for param, state in found.items():
            for name, value in state.items():
                self.state[param][name] = value.to(param.device, param.grad_dtype or value.dtype)  # as gradients

    def _check_states(self, groups: Sequence[dict[str, Any]], states: Mapping[Any, Mapping[str, Any]]) -> None:
        for index, (loaded, own) in enumerate(zip(groups, self.param_groups, strict=True)):
            if loaded["use_muon"] != own["use_muon"]:
                raise ValueError(
                    f"Muon: param group {index} has use_muon={own['use_muon']}, but {loaded['use_muon']} in the state "
                    "dict. Make the same groups as the optimizer that was saved."
                )
            options, expected = (_MUON_KEYS, {BUFFER}) if own["use_muon"] else (("betas",), _STATES_OF_ADAMW)
            found = {name for key in loaded["params"] for name in states.get(key, ())}
            if found - expected or not loaded.keys() >= {*options}:
                raise ValueError(
                    f"Muon: the state dict is of another optimizer. Param group {index} has the states "
                    f"{sorted(found)}, expected {sorted(expected)}; and the options "
                    f"{sorted(loaded.keys() - {'params', 'use_muon'})}, expected {', '.join(options)} among them."
                )


def _named(group: Mapping[str, Any], index: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a group with their own names, without those of wrappers, or names made from their positions."""
    params = group["params"]
    names: Iterable[str] = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(params))]
    return zip(map(without, names), params, strict=True)


def _with_options_of_adamw(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in AdamW's defaults for options that ``group`` does not set.

    Raises:
        TypeError, ValueError: AdamW does not take an option, or its value is wrong.
    """
    given = {key: value for key, value in group.items() if key not in ("params", "use_muon", "param_names")}
    made = optim.AdamW([{"params": [nn.Parameter(torch.empty(0))], **given}]).param_groups[0]
    check_adamw_options("Muon", made)
    return {**made, **group}


def _check_options(options: Mapping[str, Any]) -> None:
    for key in ("lr", "momentum", "weight_decay", "eps"):
        check(f"Muon: {key}", options[key], "float | Tensor" if key == "lr" else "float", NOT_NEGATIVE)
    check("Muon: ns_steps", options["ns_steps"], "int", _STEPS)
    if options["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(f"Muon: adjust_lr_fn is {options['adjust_lr_fn']!r}, expected one of {_ADJUSTMENTS}.")
    coefficients = options["ns_coefficients"]
    is_right = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    expect(is_right, "Muon: ns_coefficients", coefficients, "three numbers")
    for coefficient in coefficients:
        check("Muon: ns_coefficients: a number", coefficient, "float")
