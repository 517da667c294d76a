"""Replaces torch's names for ``fully_shard`` and ``FullyShardedDataParallel`` with those of fsdp2, so that a client
needs no change.

A client is a library that calls ``torch.distributed.fsdp`` itself. Three kinds of torch modules hold the names. Homes
only re-export them: there, ours replace torch's. Sources define and use them: importers get ours, while torch's own
stay in the globals, since ``replicate`` is built on them. In all other loaded modules of torch that hold a name, ours
replaces it. Names that a client imported earlier are not changed; a warning lists them.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    comms,
    fully_shard,
    share_comm_ctx,
    unit_of,
)
from fsdp2.extras import torch_names
from fsdp2.extras.forward_methods import register_fsdp_forward_method
from fsdp2.extras.plain_names import plain_named_modules

TRIED_IN = "2.13"

# Where torch has the names of its ``fully_shard``. First, modules that only re-export names:
_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
# Modules that define names and also use them, so that torch's own must stay in their globals:
_SOURCES = (
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp._flat_param",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
# Modules that build on torch's own classes.
_INTERNALS = ("torch.distributed.fsdp.", "torch.distributed._composable.replicate_with_fsdp")
# (module, name) of the function that checks a module before torch shards or replicates it.
_CHECKS = (
    ("torch.distributed.fsdp._fully_shard._fully_shard", "_validate_module"),
    ("torch.distributed._composable.replicate_with_fsdp", "_validate_module_common"),
)
# (module, name) of the functions by which torch's checkpoints, and clients, ask for the state of a
# FullyShardedDataParallel: torch's class is its own state.
_FSDP1_STATES = (
    ("torch.distributed.fsdp._common_utils", "_get_module_fsdp_state_if_fully_sharded_module"),
    ("torch.distributed.fsdp._common_utils", "_get_module_fsdp_state"),
    ("torch.distributed._composable_state", "_get_module_state"),
)
# The same for the function by which clients make a FullyShardedDataParallel a root.
_FSDP1_LAZY_INIT = ("torch.distributed.fsdp._runtime_utils", "_lazy_init")
# The same for the function by which torch's checkpoints list the parameters of a model.
_LISTED_STATE = ("torch.distributed.checkpoint.state_dict", "_iterate_valid_model_state")
# The method by which torch's pipelining, since 2.15, and clients ask a sharded module for its state.
_STATE_OF_MODULE = "_get_fsdp_state"

# The names in this version of torch, and those added since. A name that is not here stays torch's.
_NAMES: dict[str, Any] = {
    "AllGather": comms.AllGather,  # this one and ReduceScatter are in sources only
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "DataParallelMeshDims": DataParallelMeshDims,
    "FSDPModule": FSDPModule,
    "GradientReductionHandle": GradientReductionHandle,  # since torch 2.15
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OffloadPolicy": OffloadPolicy,
    "ReduceScatter": comms.ReduceScatter,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_NAMES_OF_FSDP1 = ("FlatParameter", "FullyShardedDataParallel", "ShardedGradScaler")

_logger = logging.getLogger("fsdp2")


class _Source(ModuleType):
    """A torch module whose importers get our names, while its own functions read torch's from its globals."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return _NAMES.get(name, found)


class _Installation:
    """What ``install`` has replaced, and how to put it back."""

    def __init__(self) -> None:
        self.theirs: dict[str, Any] = {}  # torch's object for each name
        self._undo: list[Callable[[], None]] = []

    def replace(self) -> None:
        from fsdp2 import fsdp1  # imports torch's FSDP1, so import it only here

        _NAMES.update({name: getattr(fsdp1, name) for name in _NAMES_OF_FSDP1})
        for name in _INTERNALS[1:]:  # they must import torch's own names, so load them before the names are replaced
            _imported(name)
        homes = [module for name in _HOMES if (module := _imported(name)) is not None]
        sources = [module for name in _SOURCES if (module := _imported(name)) is not None]
        for module in (*sources, *homes):
            for name in _NAMES.keys() & vars(module).keys():
                self.theirs.setdefault(name, vars(module)[name])
        for place in _CHECKS:
            self._replace(place, _refusing_our_modules)
        for module in sources:
            self._undo.append(partial(setattr, module, "__class__", type(module)))
            module.__class__ = _Source
        self._answer_for_our_modules()
        self._swap([(found, _NAMES[name]) for name, found in self.theirs.items()], in_runtime=False)

    def restore(self) -> None:
        """Undo everything. If this is interrupted, it can be repeated."""
        while self._undo:
            self._undo[-1]()
            del self._undo[-1]

    def _answer_for_our_modules(self) -> None:
        """Let torch's functions, and clients, find the state of our modules, and the flat parameters that optimizers
        have: ``torch.distributed.checkpoint.state_dict`` looks for them in the wrapped modules, although those keep the
        original parameters."""
        from fsdp2.extras.torch_view import registry, state  # importing this module alone does not need it
        from fsdp2.fsdp1.search import flat_params_in, is_wrapper

        for place in _FSDP1_STATES:
            self._replace(place, lambda of_torch: lambda module: module if is_wrapper(module) else of_torch(module))
        self._replace(
            _FSDP1_LAZY_INIT,
            lambda of_torch: lambda state, root: state._init_tree() if is_wrapper(state) else of_torch(state, root),
        )
        self._replace(
            _LISTED_STATE,
            lambda of_torch: lambda model, *rest, **kw: chain(of_torch(model, *rest, **kw), flat_params_in(model)),
        )
        setattr(FSDPModule, _STATE_OF_MODULE, state.state_of)
        self._undo.append(partial(delattr, FSDPModule, _STATE_OF_MODULE))
        self._undo.append(registry.show())

    def _replace(self, place: tuple[str, str], make: Callable[[Any], object]) -> None:
        """Replace torch's function at ``place``, (module, name), with ``make(function)``, if there is one."""
        of_torch = getattr(_imported(place[0]), place[1], None)
        if of_torch is not None:
            self._swap([(of_torch, make(of_torch))], in_runtime=True)

    def _swap(self, pairs: Sequence[tuple[object, object]], *, in_runtime: bool) -> None:
        """Replace the first object of each pair by the second one, until ``restore``."""
        self._undo.append(partial(_swap, [(new, old) for old, new in pairs], in_runtime=in_runtime))
        _swap(pairs, in_runtime=in_runtime)


def _swap(pairs: Sequence[tuple[object, object]], *, in_runtime: bool) -> None:
    """In all loaded modules of torch, replace the first object of each pair by the second one, whatever name it has
    there. Modules of torch's own runtime, rather than those that re-export its names, only if ``in_runtime``."""
    by_id = {id(old): new for old, new in pairs}
    for module in _loaded_modules():
        is_of_runtime = module.__name__ not in _HOMES and module.__name__.startswith(_INTERNALS)
        if _is_of_torch(module.__name__) and (in_runtime or not is_of_runtime):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])


def _refusing_our_modules(check: Callable[..., Any]) -> Callable[..., Any]:
    """``check`` of torch's ``fully_shard`` or ``replicate`` refuses modules that fsdp2 has sharded."""
    owners = [vars(module) for name, _ in _CHECKS if (module := _imported(name)) is not None]
    of_torch = [owner[name] for owner in owners for name in ("fully_shard", "replicate") if callable(owner.get(name))]

    def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _refuse_our_modules(given, args[0] if args else "fully_shard")
        except ValueError:
            for item in given if isinstance(given, (list, tuple)) else [given]:
                for function in of_torch:
                    torch_names.forget_composable_api(item, function)
            raise
        return check(given, *args, **kwargs)

    return checked


_current: _Installation | None = None
_lock = threading.RLock()  # threads that install at the same time would replace each other's names


def install() -> None:
    """Make clients of ``torch.distributed.fsdp.fully_shard`` use fsdp2, without changing the client.

    Call it on all ranks before the client is imported; ``python -m fsdp2 run script.py`` does so for a whole script.
    ``FullyShardedDataParallel`` is replaced, too. Rank 0 logs what was replaced. A second call does nothing.

    Warns:
        UserWarning: a module was imported earlier and still holds torch's names; or torch has names that are newer than
            fsdp2, which are not replaced.

    Raises:
        RuntimeError: this torch has no ``torch.distributed.fsdp.fully_shard``.
    """
    global _current
    with _lock:
        if _current is not None:
            return
        installation = _Installation()
        try:
            installation.replace()
            if "fully_shard" not in installation.theirs:
                raise RuntimeError(
                    f"fsdp2.install: torch {torch.__version__} has no torch.distributed.fsdp.fully_shard to replace. "
                    f"Install a torch build with distributed support; tried with torch {TRIED_IN}."
                )
            _report(installation)
            _current = installation
        except BaseException:  # also an interrupt, and a warning that the user has turned into an error
            installation.restore()
            raise


def uninstall() -> None:
    """Restore torch's names where :func:`install` has replaced them. Client modules that were imported in the meantime
    keep ours. Does nothing if fsdp2 is not installed."""
    global _current
    with _lock:
        if _current is not None:
            _current.restore()
            _current = None


@contextmanager
def installed() -> Iterator[None]:
    """Call :func:`install` for a ``with`` block, for tests. If fsdp2 was installed before, it stays installed."""
    was_installed = _current is not None
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _refuse_our_modules(given: Any, caller: str) -> None:
    """Refuse the arguments of torch's ``caller`` if fsdp2 has sharded a module in them.

    Raises:
        ValueError: fsdp2 has sharded a module. The error names the module and both runtimes.
    """
    for root in given if isinstance(given, (list, tuple)) else [given]:
        for name, module in plain_named_modules(root) if isinstance(root, nn.Module) else ():
            if unit_of(module) is not None:
                where = f"module '{name}'" if name else "this module"
                raise ValueError(
                    f"{caller} of torch.distributed: {where}, a {type(module).__name__}, was given to "
                    "fsdp2.fully_shard before. One of the two can shard a model, not both. Call fsdp2.install() before "
                    f"the module that calls torch's {caller} is imported."
                )


def _report(installation: _Installation) -> None:
    """On rank 0, log what was replaced, and warn about what was not."""
    if _rank() != 0:
        return
    _logger.warning(
        "fsdp2.install: in torch.distributed.fsdp, these names are fsdp2's now: %s. Tried with torch %s; this is %s.",
        ", ".join(sorted(installation.theirs)),
        TRIED_IN,
        torch.__version__,
    )
    newer = sorted(set(getattr(_imported(_HOMES[1]), "__all__", ())) - set(_NAMES))
    if newer:
        warnings.warn(
            f"fsdp2.install: torch {torch.__version__} has names that fsdp2 does not know: {', '.join(newer)}. They "
            "stay torch's, and do not work on modules that fsdp2 shards.",
            stacklevel=3,
        )
    holders = _holders(installation.theirs)
    if holders:
        found = "; ".join(f"{module} ({', '.join(names)})" for module, names in sorted(holders.items()))
        warnings.warn(
            f"fsdp2.install: these modules imported torch's names before, and still hold them: {found}. Call "
            "fsdp2.install() before they are imported.",
            stacklevel=3,
        )


def _holders(theirs: dict[str, Any]) -> dict[str, list[str]]:
    """Modules outside torch and fsdp2 that hold torch's names."""
    ids = {id(value) for value in theirs.values()}
    found: dict[str, list[str]] = {}
    for module in _loaded_modules():
        if not _is_of_torch(module.__name__) and module.__name__.split(".")[0] != "fsdp2":
            names = sorted(name for name, value in list(vars(module).items()) if id(value) in ids)
            if names:
                found[module.__name__] = names
    return found


def _loaded_modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _imported(name: str) -> ModuleType | None:
    """The module ``name``; None if this torch has no such module."""
    try:
        importlib.import_module(name)
    except ImportError:
        return None
    return sys.modules[name]


def _is_of_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


def _rank() -> int:
    """The rank of this process, even before the process group exists."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
