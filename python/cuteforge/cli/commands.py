"""The commands and their options.

Imports nothing that a command needs, so that the help works where something is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cuteforge.cli.families import FAMILIES
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime.arch import resolve_arch


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        module: has `run(**options) -> exit status`; imported when the command is asked for.
        meaning: what it does, as the help says it.
        add_options: adds its options to a parser; their names are the keywords of `run`.
    """

    module: str
    meaning: str
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def _add_warmup_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=(), help="only these; default: all")
    parser.add_argument(
        "--arch", nargs="+", type=_arch, default=(), metavar="ARCH", help="e.g. sm_90a; default: those of the GPUs here"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a JSON list of configurations in place of the presets"
    )
    parser.add_argument(
        "--head-dim", nargs="+", type=_positive(int), default=(), metavar="D", help="in place of the presets' own"
    )
    parser.add_argument("--dtype", nargs="+", default=(), metavar="DTYPE", help="in place of the presets' own")
    parser.add_argument("--jobs", type=_positive(int), metavar="N", help="processes; default: one a core, at most 8")


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("ls", help="list the entries, the one used last first")
    clear = actions.add_parser("clear", help="remove the entries, all of them without an option")
    clear.add_argument("--older-than", type=_positive(float), metavar="DAYS", help="only those not used for so long")
    clear.add_argument("--arch", type=_arch, metavar="ARCH", help="only those compiled for it, e.g. sm_90a")
    clear.add_argument(
        "--stale", action="store_true", help="only those of other sources or of another toolchain than those here"
    )
    verify = actions.add_parser("verify", help="check the digest of every file; status 1 if an entry is damaged")
    verify.add_argument("--remove", action="store_true", help="remove the damaged entries")


# Of each function of `explain` its sizes, with defaults.
_EXPLAINED = {
    "attention": {"requests": 1, "tokens": 1, "keys": 4096, "heads": 32, "kv-heads": 8, "head-dim": 128},
    "rotary": {"tokens": 4096, "heads": 32, "head-dim": 128},
    "compress": {"tokens": 4096, "head-dim": 128, "ratio": 4, "coff": 2},
}


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    functions = parser.add_subparsers(dest="function", metavar="FUNCTION", required=True)
    for name, sizes in _EXPLAINED.items():
        options = functions.add_parser(name, help=", ".join(sizes))
        options.add_argument("--arch", type=_arch, metavar="ARCH", help="e.g. sm_90a; default: that of the GPU here")
        options.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="default: bfloat16")
        for size, default in sizes.items():
            options.add_argument(f"--{size}", type=_positive(int), default=default, metavar="N", help=f"{default}")
        if name == "attention":
            options.add_argument("--causal", action="store_true")
            options.add_argument("--page-size", type=_positive(int), metavar="N", help="keys in pages of N tokens")
        elif name == "rotary":
            options.add_argument("--rotary-dim", type=_positive(int), metavar="N", help="default: the head dim")
            options.add_argument("--halves", action="store_true", help="pairs (i, i + N/2) instead of (2i, 2i+1)")


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="e.g. csa; default: all, or none with --plots alone"
    )
    parser.add_argument("--quick", action="store_true", help="few cases; writes a record only with --json")
    parser.add_argument("--json", type=Path, metavar="DIR", help="where records go; default: benchmarks/results")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the records as PNG and SVG into DIR")


def _arch(text: str) -> str:
    """The name of an architecture; a refusal lists those that are known."""
    try:
        return resolve_arch(text, None).name
    except (ContractError, UnsupportedError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("arch: ")) from error


def _positive(number: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not value > 0:
            raise ValueError(text)
        return value

    parse.__name__ = f"positive {number.__name__}"
    return parse


COMMANDS = {
    "demo": Command("cuteforge.cli.demo", "run real input through every kernel family and check it against fp64"),
    "doctor": Command(
        "cuteforge.cli.doctor", "say what is installed, what runs on this machine, and why not otherwise"
    ),
    "warmup": Command(
        "cuteforge.cli.warmup", "compile kernels ahead, in parallel, into the disk cache", _add_warmup_options
    ),
    "explain": Command(
        "cuteforge.cli.explain",
        "say what a call would run on an architecture: backend, tile, plan",
        _add_explain_options,
    ),
    "cache": Command("cuteforge.cli.cache", "list, clear or verify the compiled kernels on disk", _add_cache_options),
    "bench": Command(
        "cuteforge.cli.bench", "run the benchmarks of a source checkout, draw their records", _add_bench_options
    ),
}
