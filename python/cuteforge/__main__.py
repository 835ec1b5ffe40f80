"""The command line: `python -m cuteforge COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import cuteforge
from cuteforge.errors import ContractError, UnsupportedError

# Name -> (module with `run() -> exit status`, what it does). Imported when asked for, so the help needs no dependency.
COMMANDS = {
    "demo": ("cuteforge.cli.demo", "run real input through every kernel family and check it against fp64"),
    "doctor": ("cuteforge.cli.doctor", "say what is installed, what runs on this machine, and why not otherwise"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; without one print the help.

    Returns:
        The exit status: that of the command, or 1 after printing the sentence of a refusal.
    """
    parser = argparse.ArgumentParser(prog="python -m cuteforge", description="GPU kernels written in CuTe-DSL.")
    parser.add_argument("--version", action="version", version=f"cuteforge {cuteforge.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (_, meaning) in COMMANDS.items():
        commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return importlib.import_module(COMMANDS[args.command][0]).run()
    except (ContractError, UnsupportedError) as refusal:
        print(f"cuteforge: {refusal}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
