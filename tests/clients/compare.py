"""``@client(...)``: a function that drives a client on every rank becomes a test that compares the two runtimes.

The function gets ``(rank, folder, **parameters)`` and returns what must be equal: numbers, tensors, texts, and lists or
dicts of these. ``folder`` is one empty folder for all ranks. The function calls nothing of fsdp2.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.clients.server import RUNTIMES, Call, serve
from tests.harness.compare import compare_values
from tests.harness.distributed import as_test_of
from tests.harness.patience import patient
from tests.harness.training import EXACT, Tolerance

TIMEOUT_S = 120.0
_SERVERS: dict[tuple[str, tuple[str, ...]], Connection] = {}


def client(
    *packages: str,
    num_ranks: int = 2,
    preload: Sequence[str] = (),
    fails: tuple[str, str] | None = None,
    tolerance: Tolerance = EXACT,
) -> Callable[..., Any]:
    """Run the decorated ``body(rank, folder, ...)`` on ``num_ranks`` ranks, with torch's runtime and with ours.

    Skipped where one of ``packages`` is not installed. ``preload``: modules that the ranks find imported; tests with
    equal lists share their processes. Default: ``packages``. ``fails``: what the errors say with torch's runtime and
    with ours, for what cannot work in torch either; docs/clients.md lists these. ``tolerance``: other than bit for bit,
    with a reason.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]

    def decorate(body: Callable[..., Any]) -> Any:
        @pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; run `make clients`")
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            expected, found = run_both(body, tuple(preload or packages), num_ranks, kwargs)
            if fails is not None:
                texts = [answer if isinstance(answer, str) else "no error" for answer in (expected, found)]
                assert [text for text, part in zip(texts, fails, strict=True) if part not in text] == []
                return
            failures = [answer for answer in (expected, found) if isinstance(answer, str)]
            if failures:
                pytest.fail("\n\n".join(failures), pytrace=False)
            compare_values("fsdp2 differs from torch", found, expected, tolerance)

        test.body = body  # type: ignore[attr-defined]
        return as_test_of(body, test, list(inspect.signature(body).parameters)[2:])

    return decorate


def run_both(
    body: Callable[..., Any], preload: tuple[str, ...], num_ranks: int, kwargs: dict[str, Any]
) -> list[list[Any] | str]:
    """With torch's runtime and with ours, what each rank returned, or a text if one failed; both run at once."""
    call = Call(body.__module__, f"{body.__qualname__}.body", kwargs, num_ranks, patient(TIMEOUT_S))
    connections = [_server(runtime, preload) for runtime in RUNTIMES]
    for connection in connections:
        connection.send(call)
    return [connection.recv() for connection in connections]


def _server(runtime: str, preload: tuple[str, ...]) -> Connection:
    key = (runtime, preload)
    if key not in _SERVERS:
        context = multiprocessing.get_context("spawn")  # nothing that pytest has imported
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(runtime, preload, theirs), daemon=True, name=f"clients-{runtime}").start()
        theirs.close()
        _SERVERS[key] = ours
        atexit.register(ours.close)
    return _SERVERS[key]


# What cases do, and what they return


def shard_each(*modules: nn.Module, **options: Any) -> None:
    """Give each to the ``fully_shard`` that torch names, on a mesh of all ranks."""
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh, **options)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A copy of ``tensor``; of a DTensor, all of it. All ranks must call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def layout_of(model: nn.Module) -> dict[str, str]:
    """How each parameter lies on the mesh, and what is trained."""
    return {
        name: f"{getattr(parameter, 'placements', None)} {tuple(parameter.shape)} {parameter.dtype} "
        f"{parameter.device} {parameter.requires_grad}"
        for name, parameter in model.named_parameters()
    }


def files_in(folder: Path, *, contents: Sequence[str] = ("*.safetensors", "*.json")) -> dict[str, str]:
    """Every file under ``folder``, with a hash of its contents if its name matches ``contents``. All ranks must call
    this."""
    dist.barrier()  # the others may still write
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        is_compared = any(path.match(pattern) for pattern in contents)
        found[str(path.relative_to(folder))] = _digest(path) if is_compared else ""
    return found


def _digest(path: Path) -> str:
    """A hash of the contents; of safetensors without their metadata, which torch writes in the order of a set."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        header.pop("__metadata__", None)
        data = json.dumps(header, sort_keys=True).encode() + data[size:]
    return hashlib.sha256(data).hexdigest()
