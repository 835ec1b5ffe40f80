"""Keys that are the first allocation of a process, with nothing mapped before them: whatever is read, it is not from
there.

Boxes of TMA that lay outside of a pool with all their rows, of a descriptor that started some rows before it, were
illegal accesses in such a process and in no other (H200): whichever test of paged prefill came first failed. Dense keys
had no such boxes; they are here because they share the copies.
"""

import pytest

from helpers import process

CODE = """
import torch
pools = [torch.randn(2, 8192, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
from cuteforge import gqa_prefill_wrapper, paged_gqa_prefill_wrapper
q = torch.randn(2, 150, 32, 128, dtype=torch.bfloat16, device="cuda")
cu_q = torch.arange(3, dtype=torch.int32, device="cuda") * 150
table = torch.arange(1024, dtype=torch.int32, device="cuda").view(2, 512)

def attend(kind, keys):
    lengths = torch.full((2,), keys, dtype=torch.int32, device="cuda")
    k, v = (pool[:, :keys] for pool in pools)
    if kind == "batch":
        return k, v, gqa_prefill_wrapper(q, k, v)["out"]
    if kind == "packed":
        packed = [pool.flatten(0, 1)[: 2 * keys] for pool in pools]
        cu_k = torch.arange(3, dtype=torch.int32, device="cuda") * keys
        out = gqa_prefill_wrapper(q.flatten(0, 1), *packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)["out"]
        return *(x.view(2, keys, 8, 128) for x in packed), out
    pages = [pool.view(1024, 16, 8, 128) for pool in pools]
    return k, v, paged_gqa_prefill_wrapper(q.flatten(0, 1), *pages, table, cu_q, seqlens_k=lengths)["out"]

for keys in (5, 1003, 1024):
    k, v, out = attend({kind!r}, keys)
    torch.cuda.synchronize()
    wide = [x.float().transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.view_as(want).float(), want, atol=1e-2, rtol=1e-2)
print("right")
"""


@pytest.mark.parametrize("kind", ["batch", "packed", "pages"])
def test_nothing_before_the_keys_is_read(kind):
    assert process.run(CODE.format(kind=kind)).strip() == "right"
