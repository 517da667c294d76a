"""Compile a C++ source against torch, once: the result lies in ``build/`` of the checkout, by the hash of all that went
into it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

CACHE = Path(__file__).parents[2] / "build"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared"]
TIMEOUT_S = 600


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


@functools.cache
def library(name: str, source: Path) -> Path:
    """Where the library ``name``, compiled from ``source``, lies, or will lie."""
    key = hashlib.sha256(source.read_bytes())
    key.update(repr((torch.__version__, sys.version, _flags(name), compiler())).encode())
    return CACHE / name / f"{name}-{key.hexdigest()[:16]}.so"


def build(name: str, source: Path, *, links_torch: bool = True) -> Path:
    """Compile ``source``, unless that was done; processes that ask at the same time wait for one of them.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    target = library(name, source)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(name, source, target, links_torch)
    return target


def _flags(name: str) -> list[str]:
    return [*FLAGS, f"-DTORCH_EXTENSION_NAME={name}"]


def _compile(name: str, source: Path, target: Path, links_torch: bool) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler")
    includes = [f"-I{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    made = target.with_suffix(".tmp")
    command = [found, *_flags(name), *includes, str(source), "-o", str(made), *libraries]
    command += ["-lc10", "-ltorch_cpu", "-ltorch_python"] if links_torch else ["-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        raise RuntimeError(f"{found} refuses {source.name}:\n{result.stderr[-4000:]}")
    os.replace(made, target)
