"""``@client(...)``: a function that drives a client on every rank becomes a test that compares the two runtimes.

The function gets ``(rank, folder, **parameters)`` and returns what must be equal: numbers, tensors, texts, and lists or
dicts of these. ``folder`` is one empty folder for all ranks. The function calls nothing of fsdp2.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import inspect
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.clients.server import RUNTIMES, Call, serve
from tests.harness.compare import compare_values

TIMEOUT_S = 120.0
_SERVERS: dict[tuple[str, tuple[str, ...]], Connection] = {}


def client(*packages: str, num_ranks: int = 2, preload: Sequence[str] = ()) -> Callable[..., Any]:
    """Run the decorated ``body(rank, folder, ...)`` on ``num_ranks`` ranks, with torch's runtime and with ours.

    Skipped where one of ``packages`` is not installed. ``preload``: modules that the ranks find imported; tests with
    equal lists share their processes. Default: ``packages``.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]

    def decorate(body: Callable[..., Any]) -> Any:
        @pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; run `make clients`")
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            expected, found = run_both(body, tuple(preload or packages), num_ranks, kwargs)
            compare_values("fsdp2 differs from torch", found, expected)

        keyword = inspect.Parameter.KEYWORD_ONLY
        names = list(inspect.signature(body).parameters)[2:]
        test.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in names])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(body, name))
        test.pytestmark = [*getattr(body, "pytestmark", []), *test.pytestmark]  # type: ignore[attr-defined]
        return test

    return decorate


def run_both(
    body: Callable[..., Any], preload: tuple[str, ...], num_ranks: int, kwargs: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """The results of all ranks with torch's runtime and with ours; both run at the same time."""
    qualname = body.__qualname__ if "<locals>" not in body.__qualname__ else body.__name__
    call = Call(body.__module__, f"{qualname}.body", kwargs, num_ranks, TIMEOUT_S)
    connections = [_server(runtime, preload) for runtime in RUNTIMES]
    for connection in connections:
        connection.send(call)
    answers = [connection.recv() for connection in connections]
    for answer in answers:
        if isinstance(answer, str):
            pytest.fail("\n\n".join(text for text in answers if isinstance(text, str)), pytrace=False)
    return answers[0], answers[1]


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


# What cases return


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
    """Every file under ``folder``, with a hash of its contents if its name matches ``contents``."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        is_compared = any(path.match(pattern) for pattern in contents)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_compared else ""
        found[str(path.relative_to(folder))] = digest
    return found


def safetensors_in(folder: Path) -> dict[str, tuple[dict[str, str], dict[str, Tensor]]]:
    """Metadata and tensors of all safetensors files under ``folder``. The files order their metadata by chance."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}  # noqa: SIM118 (no mapping)
            found[str(path.relative_to(folder))] = (dict(sorted((file.metadata() or {}).items())), tensors)
    return found
