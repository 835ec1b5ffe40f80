"""Tiles of the CSA/HCA compressor side by side, with the peer and the tile that the library chooses.

    python benchmarks/tune_csa.py --direction bwd --cases d512 --tiles 16,2,2,1 8,2,2,2 8,2,3,2

A tile is num_warps,cols_per_lane,num_stages,ctas_per_sm; windows longer than 32 entries are split over the warps. What
came out, and what was expected before, belongs in docs/dev/tuning/csa.md. Results are compared with those of the chosen
tile, so a wrong tile has no figure.
"""

from __future__ import annotations

import argparse
import sys

import bench_csa
import harness
import peers

BUILDERS = {
    direction: f"cuteforge.families.csa.compressor.{name}:build"
    for direction, name in (("fwd", "forward"), ("bwd", "backward"))
}


def parse_tile(text: str, split_window: bool):
    """`8,2,3,2` as a Tile."""
    from cuteforge.families.csa.compressor.config import Tile

    return Tile(*(int(field) for field in text.split(",")), split_window=split_window)


class Candidate:
    """One tile on one problem: a launch on the problem's buffers."""

    def __init__(self, problem: bench_csa.Problem, direction: str, traits, arch) -> None:
        import torch

        from cuteforge.families.csa.compressor.config import max_ctas, workspace_bytes
        from cuteforge.runtime.compile_cache import KernelKey, load_kernel

        self.entry = load_kernel(KernelKey(BUILDERS[direction], traits, arch.name)).entry
        self.num_ctas = max_ctas(traits, arch)
        if direction == "fwd":
            self.outputs = (torch.empty_like(problem.out),)
            self.operands = (*problem.inputs, *self.outputs)
        else:
            self.outputs = tuple(torch.empty_like(t) for t in (problem.kv, problem.score, problem.ape))
            workspace = torch.empty(workspace_bytes(traits, self.num_ctas), dtype=torch.uint8, device="cuda")
            self.operands = (*problem.inputs, problem.grad_out, *self.outputs, workspace)

    def __call__(self) -> None:
        from cuteforge.runtime.streams import current_stream_handle

        self.entry(*self.operands, self.num_ctas, current_stream_handle(0))


def candidates(problem: bench_csa.Problem, direction: str, tiles: list[str]) -> dict[str, Candidate]:
    """The chosen tile first, then those of `tiles` that fit this GPU."""
    from cuteforge.families.csa.compressor import config
    from cuteforge.runtime.arch import resolve_arch

    arch, shape = resolve_arch(None, 0), problem.shape
    facts = config.Problem("bfloat16", shape.d, shape.ratio, shape.coff)
    chosen = config.select_traits(facts, arch, direction == "bwd")
    found = {"chosen": Candidate(problem, direction, chosen, arch)}
    for text in tiles:
        tile = parse_tile(text, chosen.tile.split_window)
        traits = config.Traits(facts, tile, chosen.backward, chosen.deterministic, chosen.dependent_launch)
        refusal = config.why_not(traits, arch)
        if refusal is None:
            found[text] = Candidate(problem, direction, traits, arch)
        else:
            print(f"{shape.name} {direction} {text}: {refusal}", file=sys.stderr)
    return found


def check_same(found: dict[str, Candidate]) -> None:
    """Every tile gives what the chosen one gives: the same bits for ratio <= 16, and grad_ape to the order of a sum."""
    import torch

    for candidate in found.values():
        candidate()
    for name, candidate in found.items():
        for got, want in zip(candidate.outputs, found["chosen"].outputs):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", choices=("fwd", "bwd"), required=True)
    parser.add_argument("--tiles", nargs="*", default=[], metavar="W,C,S,N")
    parser.add_argument("--cases", default="", help="only shapes whose name contains this")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    peer, _ = peers.find_cudnn_compressor()
    for shape in bench_csa.SPEED:
        if args.cases not in shape.name:
            continue
        problem = bench_csa.Problem(shape)
        found = candidates(problem, args.direction, args.tiles)
        harness.require_green(lambda found=found: check_same(found))
        timed = dict(found)
        if peer is not None:
            launch = peer.forward if args.direction == "fwd" else peer.backward
            timed["peer"] = launch(*problem.operands(args.direction), **problem.config)
        times = harness.measure_group(timed, repeats=args.repeats)
        rates = (f"{name} {us:.1f} ({shape.bytes(args.direction) / us / 1e6:.2f} TB/s)" for name, us in times.items())
        print(f"{shape.name} {args.direction}: {', '.join(rates)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
