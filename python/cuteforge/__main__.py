"""The command line: `cuteforge COMMAND`, or `python -m cuteforge COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import cuteforge
from cuteforge.cli.commands import COMMANDS
from cuteforge.errors import ContractError, UnsupportedError

_INTERRUPTED = 130  # as a shell says of a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; without one print the help.

    Returns:
        The exit status: that of the command, 1 after printing the sentence of a refusal, 130 after an interrupt.
    """
    parser = argparse.ArgumentParser(prog=_program(), description="GPU kernels written in CuTe-DSL.")
    parser.add_argument("--version", action="version", version=f"cuteforge {cuteforge.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sentence = f"{command.meaning[0].upper()}{command.meaning[1:]}."
        command.add_options(commands.add_parser(name, help=command.meaning, description=sentence))
    options = vars(parser.parse_args(argv))
    name = options.pop("command")
    if name is None:
        parser.print_help()
        return 0
    try:
        return importlib.import_module(COMMANDS[name].module).run(**options)
    except (ContractError, UnsupportedError) as refusal:
        print(f"cuteforge: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cuteforge: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _program() -> str:
    """What the user typed before the command."""
    return "python -m cuteforge" if Path(sys.argv[0]).name == "__main__.py" else "cuteforge"


if __name__ == "__main__":
    sys.exit(main())
