"""Who is compared with whom: the subject (fsdp2) and the oracle (torch), under the same names.

``FSDP2_TEST_SUBJECT=torch`` puts torch in the subject's place: the suite must pass with it, which shows that a failure
comes from fsdp2 and not from the tests.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest


@dataclass(frozen=True)
class Runtime:
    name: str
    fully_shard: Callable[..., Any]
    FSDPModule: type
    UnshardHandle: type
    MixedPrecisionPolicy: Callable[..., Any]
    OffloadPolicy: Callable[..., Any]
    CPUOffloadPolicy: Callable[..., Any]
    DataParallelMeshDims: Callable[..., Any]
    register_fsdp_forward_method: Callable[..., Any]
    share_comm_ctx: Callable[..., Any]
    FullyShardedDataParallel: Any


SUBJECT_IS_TORCH = os.environ.get("FSDP2_TEST_SUBJECT") == "torch"


def beyond_torch(reason: str) -> pytest.MarkDecorator:
    """Marks what fsdp2 must do and torch's own ``fully_shard`` does not; ``reason`` says what torch does."""
    return pytest.mark.skipif(SUBJECT_IS_TORCH, reason=f"beyond torch: {reason}")


def _runtime(module_name: str) -> Runtime:
    module = importlib.import_module(module_name)
    names = [name for name in Runtime.__dataclass_fields__ if name != "name"]
    absent = () if module_name == "fsdp2" else (None,)  # older versions of torch have fewer names
    return Runtime(module_name, **{name: getattr(module, name, *absent) for name in names})


@functools.cache
def oracle() -> Runtime:
    """torch's own FSDP2."""
    return _runtime("torch.distributed.fsdp")


@functools.cache
def subject() -> Runtime:
    """The package under test; an import that fails makes the test fail."""
    return oracle() if SUBJECT_IS_TORCH else _runtime("fsdp2")


@contextmanager
def quietly_installed() -> Iterator[None]:
    """Torch's names are fsdp2's meanwhile, without what ``install`` says about it."""
    import fsdp2

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fsdp2.install: these modules imported")
        logging.disable(logging.WARNING)
        fsdp2.install()
        logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        fsdp2.uninstall()


@contextmanager
def installed(runtime: Runtime) -> Iterator[Runtime]:
    """``runtime`` by torch's names; if it is fsdp2, it is installed as them meanwhile."""
    if runtime.name != "fsdp2":
        yield runtime
        return
    with quietly_installed():
        yield replace(_runtime("torch.distributed.fsdp"), name="fsdp2")
