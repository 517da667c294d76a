"""``python -m fsdp2 run script.py ...``: run a script with :func:`fsdp2.install` in force.

``python -m fsdp2 plan module:function --gpus 64``: compare the ways to shard a model.
``python -m fsdp2 measure machine.json``: measure this machine for ``plan``.
``python -m fsdp2 compare before.json after.json``: put two reports side by side.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

import fsdp2
from fsdp2.extras.foreign_files import printable
from fsdp2.planner.command import add_plan
from fsdp2.planner.measure import add_measure
from fsdp2.report.comparison import add_compare

_WRONG = 2
_LONGEST = 1000  # characters of an error
_INTERRUPTED = 130  # the shell convention: 128 plus the signal number


class _Parser(argparse.ArgumentParser):
    """Prints errors as one line, without the usage, and without control characters from arguments and files."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if message is not None and status == _WRONG:
            line = printable(" ".join(message.split()))
            message = f"{line if len(line) <= _LONGEST else f'{line[:_LONGEST]} ...'}\n"
        super().exit(status, message)

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += ", which must not start with '-'"
        self.exit(_WRONG, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run the subcommand.

    Raises:
        SystemExit: the command line is wrong, or the script raised it.
    """
    parser = _Parser(prog="python -m fsdp2", description="Tools of fsdp2.")
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser(
        "run",
        help="run a script or module that uses torch.distributed.fsdp.fully_shard, with fsdp2 in its place",
        description="Calls fsdp2.install(), then runs the script as python does. With ranks: "
        "torchrun --nproc-per-node 2 -m fsdp2 run script.py ...",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="script is the name of a module")
    run.add_argument("script", help="a path, or the name of a module with -m")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    run.set_defaults(run=run_script)
    add_plan(commands)
    add_measure(commands)
    add_compare(commands)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.error(f"no command was given, expected one of {', '.join(commands.choices)}. --help says what they do.")
    try:
        options.run(parser, options)
    except KeyboardInterrupt:
        if options.command == "run":  # let the script's own interrupt propagate
            raise
        parser.exit(_INTERRUPTED, f"\n{parser.prog} {options.command}: interrupted\n")


def run_script(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Install fsdp2, then run ``options.script`` as ``__main__``."""
    inside = os.path.join(options.script, "__main__.py") if os.path.isdir(options.script) else options.script
    if not options.is_module and not os.path.isfile(inside):
        parser.error(f"found no script '{options.script}'. Pass the path of a Python file, or -m and a module's name.")
    if options.is_module and not _is_found(options.script):
        parser.error(f"found no module '{options.script}'. Write it as in an import statement.")
    fsdp2.install()
    sys.argv = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
        runpy.run_path(options.script, run_name="__main__")


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package does not exist, or this is no name of a module
        return False


if __name__ == "__main__":
    main()
