"""The command line: `python -m cuteforge COMMAND`.

A command is a module with `run() -> exit status`; it is imported only when it is asked for, so `--help` needs
none of the dependencies.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import cuteforge

# Name -> (module, what it does).
COMMANDS = {
    "demo": ("cuteforge.cli.demo", "run real input through every kernel family and check it against fp64"),
    "doctor": ("cuteforge.cli.doctor", "say what is installed, what runs on this machine, and why not otherwise"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; returns the exit status. No command prints the help."""
    parser = argparse.ArgumentParser(prog="python -m cuteforge", description="GPU kernels written in CuTe-DSL.")
    parser.add_argument("--version", action="version", version=f"cuteforge {cuteforge.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    return importlib.import_module(COMMANDS[args.command][0]).run()
