"""What is compiled and when: sizes, strides, direction and contents are no part of it.

Threads, processes, damaged directories and eviction belong to the run time all families share: fe_api/lifecycle.
"""

from helpers import process

RANDOM_SHAPES = """
import random
import torch
from helpers import rotary
from cuteforge import rotary_qk_wrapper
from cuteforge.runtime import compile_cache

rng, device, counts = random.Random(0), torch.device("cuda"), []
for config in (rotary.HALVES, rotary.BY_TOKEN):
    for call in range(200):
        layout = rotary.TWO_PACKED._replace(
            tokens=(rng.randrange(5000),), heads=rng.randrange(1, 40), kv_heads=rng.randrange(1, 9)
        )
        x = rotary.draw(config, layout, device, seed=call)
        q, k = x.x.clone(), x.k.clone()
        inverse, in_place = rng.random() < 0.5, rng.random() < 0.5
        targets = {"q_out": q, "k_out": k} if in_place else {}
        got = rotary_qk_wrapper(q, k, **x.lookup, interleaved=x.interleaved, inverse=inverse, **targets)
        counts.append(compile_cache.stats().compiles)
        if call % 40 == 0:
            rotary.check({"out": got["q"], "k_out": got["k"]}, x, inverse=inverse)
print(counts[0], counts[199], counts[200], counts[399], compile_cache.stats().size)
"""


def test_200_random_shapes_compile_once(device, tmp_path):
    """Tokens, head counts, direction and place are run-time values, for both kinds of table."""
    out = process.run(RANDOM_SHAPES, CUTEFORGE_CACHE_DIR=tmp_path / "cache")
    assert out.split() == ["1", "1", "2", "2", "2"]
