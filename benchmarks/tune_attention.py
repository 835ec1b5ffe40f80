"""Tiles of dense attention side by side, with the peers and the tile that the library chooses.

    python benchmarks/tune_attention.py --tiles 1,1,4,16,4,1 1,1,8,16,2,1 --cases 4096
    python benchmarks/tune_attention.py --waves 2 4 --cases 4096
    python benchmarks/tune_attention.py --prefill --tiles 1,8,1,160,2,1 --cases d128
    python benchmarks/tune_attention.py --prefill --arch sm_90 --tiles 2,4,1,32,2,2,1 1,8,1,64,2,1 --cases d128

The third line is two warpgroups of sm_90a, the fourth the portable kernel beside it. A tile is
m_blocks,row_warps,key_warps,tile_n,num_stages,ctas_per_sm[,queries_in_smem]. `shares` after a tile's name is the same
tile without clusters, `one` one CTA a unit. What came out, and what was expected before, belongs in
docs/dev/tuning/attention.md. Every tile passes the check against fp64 before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import harness
import peers
from attention_problem import DECODE, Dense, build_rivals, dense_rivals
from bench_attention import DECODE_PEERS, PREFILL, PREFILL_PEERS


def tiled(problem: Dense, change: Callable, waves: int = 1, arch: str | None = None, **config) -> Callable[[], object]:
    """A bound launch of the problem's op with other traits, and CTAs for so many waves of a GPU that they fill."""
    import torch

    import cuteforge

    base = getattr(cuteforge, problem.op_name)

    class Tiled(base):
        def _traits(self, dims, arch):
            return change(super()._traits(dims, arch))

        def _scalars(self, arch):
            ctas, *others = super()._scalars(arch)
            return ctas * waves, *others

    operands = (*problem.inputs, problem.out)
    op = Tiled(*operands, **problem.config, **config).compile(arch)
    size_bytes = op.workspace_bytes()
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device="cuda") if size_bytes else None
    return op.bind(*operands, workspace=workspace)


def with_tile(problem: Dense, text: str, clusters: bool, arch: str | None) -> Callable[[], object]:
    """A bound launch with the tile `text`.

    Raises:
        ValueError: this GPU does not hold the tile.
    """
    from cuteforge.families.attention.forward.config import Tile
    from cuteforge.families.attention.forward_sm90a.config import WARPGROUP, WarpgroupTile, WarpgroupTraits
    from cuteforge.families.attention.work.traits import why_not
    from cuteforge.runtime.arch import resolve_arch

    numbers = [int(field) for field in text.split(",")]
    tile = Tile(*numbers[:6], queries_in_smem=numbers[6:] == [1])

    def change(traits):
        if isinstance(traits, WarpgroupTraits):
            traits = replace(traits, tile=WarpgroupTile(tile.row_warps // WARPGROUP, tile.tile_n, tile.num_stages))
        else:
            traits = replace(traits, tile=tile, cluster=traits.cluster if clusters else 0)
        if refusal := why_not(traits, resolve_arch(arch, 0)):
            raise ValueError(refusal)
        return traits

    return tiled(problem, change, arch=arch)


def candidates(problem: Dense, args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """The chosen tile first, then those of the arguments that fit this GPU and compile."""
    is_decode = not args.prefill
    yield "chosen", problem.bound(args.arch)
    if is_decode:
        yield "one", tiled(problem, lambda traits: traits, arch=args.arch, num_splits=1)
        for count in args.waves:
            yield f"{count} waves", tiled(problem, lambda traits: traits, count, args.arch)
    for text in args.tiles:
        for suffix, clusters in (("", True), (" shares", False))[: 1 + is_decode]:
            try:
                launch = with_tile(problem, text, clusters, args.arch)
            except Exception as error:  # a tile that the GPU or the compiler refuses has no figure
                print(f"{problem.name} {text}{suffix}: {str(error).splitlines()[0]}", file=sys.stderr)
            else:
                yield text + suffix, launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="store_true", help="prefill instead of decode")
    parser.add_argument("--tiles", nargs="*", default=[], metavar="TILE")
    parser.add_argument("--arch", help="compile for it: sm_90 is the portable prefill on an H200")
    parser.add_argument("--waves", nargs="*", type=int, default=[], help="decode: shares for so many waves of CTAs")
    parser.add_argument("--cases", nargs="*", default=[], help="only shapes whose name contains one of these")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    libraries, _ = peers.find_attention()
    shapes, names = (PREFILL, PREFILL_PEERS) if args.prefill else (DECODE, DECODE_PEERS)
    for shape in shapes:
        if args.cases and not any(text in shape.name for text in args.cases):
            continue
        problem = Dense(shape)
        timed = dict(candidates(problem, args))
        for name, launch in timed.items():
            harness.require_green(functools.partial(problem.check_ours, launch, name))
        timed |= build_rivals(dense_rivals(libraries, names, problem), problem)
        times = harness.measure_group(timed, repeats=args.repeats)
        print(f"{shape.name}: {', '.join(f'{name} {us:.1f}' for name, us in times.items())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
