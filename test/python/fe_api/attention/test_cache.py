"""What is compiled and when: sizes, strides, lengths, scales and head counts are no part of it.

Threads, processes, damaged directories and eviction belong to the run time all families share: fe_api/lifecycle.
"""

from helpers import process

RANDOM_SHAPES = """
import random
import torch
from helpers import attention as attn
from cuteforge.runtime import compile_cache

rng, device, counts = random.Random(0), torch.device("cuda"), []

def decode(call):
    batch, size = rng.randrange(1, 9), rng.randrange(1, 3000)
    lengths = [rng.randrange(size + 1) for _ in range(batch)]
    return attn.draw(attn.MAIN, batch, 1, size, rng.randrange(1, 9), device=device, lengths=lengths, seed=call)

def prefill(call):
    lengths = [rng.randrange(300) for _ in range(rng.randrange(1, 6))]
    keys = [n + rng.randrange(100) for n in lengths]
    return attn.draw_ragged(attn.MAIN, lengths, keys, rng.randrange(1, 5), device=device, seed=call)

for kind, draw in (("decode", decode), ("prefill", prefill)):
    for call in range(200):
        x = draw(call)
        if rng.random() < 0.3:
            x = attn.LAYOUTS[rng.choice(list(attn.LAYOUTS))](x)
        x = x.with_(softmax_scale=rng.choice([None, 0.05, 0.1]))
        got = attn.wrapped(kind, x)
        counts.append(compile_cache.stats().compiles)
        if call % 40 == 0:
            attn.check(attn.Results(*got), x)
print(counts[0], counts[199], counts[200], counts[399])
"""


def test_200_random_shapes_compile_once(device, tmp_path):
    """Requests, tokens, heads, lengths, strides and scale are run-time values; the same group and one query token."""
    out = process.run(RANDOM_SHAPES, CUTEFORGE_CACHE_DIR=tmp_path / "cache")
    first, after_decode, first_prefill, last = map(int, out.split())
    assert first == after_decode and first_prefill == last, out
    assert last <= 4, "decode, its merge, and prefill"


CALL_ORDER = """
import torch
from helpers import attention as attn
from cuteforge.runtime import compile_cache

device, counts = torch.device("cuda"), []
shapes = [(3, 1, 100), (2, 3, 1000), (5, 2, 64)]
for order in (shapes, shapes[::-1], shapes[1:] + shapes[:1]):
    for shape in order:
        for kind in attn.CLASSES:
            x = attn.draw(attn.MAIN, *shape, device=device)
            attn.check(attn.Results(*attn.wrapped(kind, x)), x)
    counts.append(compile_cache.stats().compiles)
print(*counts)
"""


def test_shapes_in_another_order_compile_nothing_new(device):
    """What a shape is served by does not depend on what came before it."""
    counts = process.run(CALL_ORDER).split()
    assert len(set(counts)) == 1, counts
