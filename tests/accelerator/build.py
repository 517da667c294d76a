"""Compile ``device.cpp`` once: the result lies in ``build/`` of the checkout, by the hash of all that went into it."""

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

NAME = "simulated_device"
SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(__file__).parents[2] / "build" / "simulated_device"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}"]
TIMEOUT_S = 600


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


@functools.cache
def library() -> Path:
    """Where the compiled device lies, or will lie."""
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(repr((torch.__version__, sys.version, FLAGS, compiler())).encode())
    return CACHE / f"{NAME}-{key.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the device, unless that was done; processes that ask at the same time wait for one of them.

    Raises:
        RuntimeError: there is no compiler, or it refuses the source.
    """
    target = library()
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler")
    includes = [f"-I{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    made = target.with_suffix(".tmp")
    command = [found, *FLAGS, *includes, str(SOURCE), "-o", str(made), *libraries]
    command += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        raise RuntimeError(f"{found} refuses {SOURCE.name}:\n{result.stderr[-4000:]}")
    os.replace(made, target)
