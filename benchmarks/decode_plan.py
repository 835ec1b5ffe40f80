"""What the plan of decode loses: measured times of every way to cut the keys, and the one that the plan takes.

    python benchmarks/decode_plan.py            a line for each tile, and the worst cases
    python benchmarks/decode_plan.py --all      a line for each size

The times are in points/decode_h200.json: for each size and tile a CTA for each row tile (cluster 1), clusters of 2, 4
and 8, equal shares, and pieces that a second kernel joins. The plan is that of the host function itself, compiled for
this machine's CPU, for a GPU with 120 SMs in reach of clusters. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from dataclasses import replace

POINTS = pathlib.Path(__file__).parent / "points" / "decode_h200.json"


class Planner:
    """The plan of one tile for one kind of keys."""

    def __init__(self, keys_are: str, d: int, tile: list[int]) -> None:
        from cuteforge.families.attention.forward import config
        from cuteforge.families.attention.problem import Problem
        from cuteforge.runtime.arch import resolve_arch

        self.arch, self.is_paged = resolve_arch("sm_90a", None), keys_are == "paged"
        kind = {"keys": "pages", "given": ("seqlens_k",), "queries": "single"} if self.is_paged else {"keys": "batch"}
        problem = Problem("bfloat16", d, d, **{"queries": "batch", **kind})
        traits = config.select_decode(problem, 1, self.arch, True)
        self.traits = replace(traits, tile=config.Tile(*tile))
        self.workspace = config.workspace_bytes(self.traits, self.arch)

    def way(self, requests: int, keys: int, heads: int, kv_heads: int) -> str:
        """As the points name it."""
        from cuteforge.families.attention.work.host_call import HostPlan
        from cuteforge.families.attention.work.traits import limits_of
        from cuteforge.runtime.compile_cache import KernelKey
        from cuteforge.runtime.kernel_facts import host_numbers

        if self.is_paged:
            pages = -(-keys // 16)
            extents = (0, requests, heads, requests * pages, 16, kv_heads, requests, pages)
        else:
            extents = (requests, 1, heads, requests, keys, kv_heads, 0, 0)
        numbers = (*extents, 0, self.workspace, 0, 0, *limits_of(self.traits, self.arch, 0))
        key = KernelKey("cuteforge.families.attention.work.host_plan:build", self.traits, self.arch.name)
        plan = HostPlan(*host_numbers(key, numbers, len(HostPlan._fields)))
        return f"cluster {plan.pieces}" if plan.pieces else f"shares {plan.splits}"


def losses(points: list[dict]) -> list[tuple[float, str, str]]:
    """For each point: time of the plan's way over that of the best, the tile, and a sentence. Points without the plan's
    way are left out."""
    planners: dict[tuple, Planner] = {}
    found = []
    for point in points:
        key = point["keys_are"], point["d"], tuple(point["tile"])
        if key not in planners:
            planners[key] = Planner(*key)
        sizes = [point[name] for name in ("requests", "keys", "heads", "kv_heads")]
        way, us = planners[key].way(*sizes), point["us"]
        if way not in us:
            print(f"not measured: {way} of {key} {sizes}")
            continue
        best = min(us, key=us.get)
        title = f"{point['keys_are']} d{point['d']} tile {','.join(map(str, point['tile']))}"
        size = "{}x{} h{}/{}".format(*sizes)
        found.append((us[way] / us[best], title, f"{size}: {way} {us[way]:.1f}, best {best} {us[best]:.1f}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--all", action="store_true", help="a line for each size")
    args = parser.parse_args()
    found = losses(json.loads(POINTS.read_text())["points"])
    for title in dict.fromkeys(title for _, title, _ in found):
        ratios = sorted((ratio, text) for ratio, other, text in found if other == title)
        mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
        print(f"{title}: {len(ratios)} sizes, {mean:.3f} of the best way (geometric mean)")
        for ratio, text in ratios if args.all else ratios[-3:]:
            if ratio > 1.02 or args.all:
                print(f"    {ratio:.2f}  {text}")


if __name__ == "__main__":
    main()
