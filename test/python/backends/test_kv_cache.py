"""What a cache stores and says of a batch: attention over it equals dense attention, steps in place equal binding anew."""

import pytest
import torch

from cuteforge.backends import kv_cache as module
from cuteforge.backends.kv_cache import CacheFull, KVCache
from cuteforge.errors import ContractError
from helpers.kv_cache import Dense, facts, poisoned

LAYERS, HEADS, DIMS = 2, (4, 2), (8, 16)
SIZES = {"num_layers": LAYERS, "num_kv_heads": HEADS[1], "head_dim": DIMS[0]}
LIMITS = {"num_pages": 64, "page_size": 4, "max_requests": 5, "max_seqlen": 48}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])


def make(device="cpu", **changed):
    kind = {"v_head_dim": DIMS[1], "dtype": torch.float32, "device": device}
    return poisoned(KVCache(**{**SIZES, **LIMITS, **kind, **changed}))


def make_dense(device="cpu", length=48):
    return Dense(LAYERS, HEADS, DIMS, length, dtype=torch.float32, device=device)


def added(cache, dense, count):
    requests = [cache.add() for _ in range(count)]
    for request in requests:
        dense.add(request)
    return requests


def prefill(cache, dense, requests, lengths):
    cache.bind_prefill(requests, lengths)
    dense.check(cache, requests, lengths)


def decode(cache, dense, requests, **how):
    cache.bind_decode(requests, **how)
    dense.check(cache, requests, [1] * len(requests))


@devices
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48])
def test_prefill_in_parts_and_decode_equal_dense_attention(page_size, device):
    """Ragged, with a request that brings nothing, and batches that change in members and order."""
    cache, dense = make(device, page_size=page_size, num_pages=192), make_dense(device)
    a, b, c, d = added(cache, dense, 4)
    prefill(cache, dense, [a, b, c], [5, 1, 17])
    prefill(cache, dense, [d, b, a], [16, 0, 3])
    for requests in ([a, b, c, d], [a, b, c, d], [a, b, c, d], [d, a], [d, a], [b]):
        decode(cache, dense, requests)
    prefill(cache, dense, [b, d], [20, 2])
    for _ in range(18):
        decode(cache, dense, [c, b])
    assert [cache.seqlen(r) for r in (a, b, c, d)] == [13, 43, 38, 23]


def test_a_shared_prefix_is_read_by_both_and_written_by_none():
    cache, dense = make(), make_dense()
    prompt = list(range(100, 111))
    first = cache.add(prompt)
    dense.add(first)
    prefill(cache, dense, [first], [11])
    free = cache.num_free_pages
    second = cache.add([*prompt[:10], 7])
    assert (cache.cached_tokens(second), cache.seqlen(second)) == (8, 8)
    dense.add(second, like=first, cached=8)
    prefill(cache, dense, [second], [3])
    assert cache.num_free_pages == free - 1
    shared = [cache.k_pool(layer)[cache.batch.page_table[1, :2].long()].clone() for layer in range(LAYERS)]
    for _ in range(9):
        decode(cache, dense, [first, second])
    for layer, before in enumerate(shared):
        assert torch.equal(cache.k_pool(layer)[cache.batch.page_table[1, :2].long()], before)
    cache.free(first)
    decode(cache, dense, [second])
    cache.free(second)
    assert cache.num_free_pages == LIMITS["num_pages"]


@devices
def test_batch_says_where_new_tokens_go(device):
    cache = make(device)
    a, b, c = (cache.add() for _ in range(3))
    cache.bind_prefill([a, c], [6, 2])
    cache.bind_prefill([c, b, a], [3, 0, 2])
    assert facts(cache) == {
        "pages": [[3, 4], [], [1, 2]],
        "page_table_rows": [2, 1, 0],
        "seqlens_k": [5, 0, 8],
        "cu_seqlens_q": [0, 3, 3, 5],
        "positions": [2, 3, 4, 6, 7],
        "slots": [14, 15, 16, 10, 11],
        "is_decode": False,
        "max_new": 3,
    }
    cache.bind_decode([a, c], pad_to=4)
    assert facts(cache) == {
        "pages": [[1, 2, 5], [3, 4], [], []],
        "page_table_rows": [0, 2, 0, 0],
        "seqlens_k": [9, 6, 0, 0],
        "cu_seqlens_q": [0, 1, 2, 3, 4],
        "positions": [8, 5, 0, 0],
        "slots": [20, 17, 0, 0],
        "is_decode": True,
        "max_new": 1,
    }
    dtypes = {name: value.dtype for name, value in vars(cache.batch).items() if isinstance(value, torch.Tensor)}
    assert dtypes.pop("slots") is torch.int64
    assert set(dtypes.values()) == {torch.int32}


@devices
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_steps_in_place_say_what_binding_anew_says(page_size, device):
    """Requests that start pages at different steps; one batch object and its memory throughout."""
    caches = [make(device, page_size=page_size) for _ in range(2)]
    for cache in caches:
        requests = [cache.add() for _ in range(3)]
        cache.bind_prefill(requests, [5, 1, 8])
        cache.bind_decode(requests, pad_to=4)
    stepped, bound = caches
    batch = stepped.batch
    places = [x.data_ptr() for x in vars(batch).values() if isinstance(x, torch.Tensor)]
    for i in range(12):
        stepped.step() if i % 2 else stepped.bind_decode(requests, pad_to=4)
        bound._decode_key = None
        bound.bind_decode(requests, pad_to=4)
        assert facts(stepped) == facts(bound)
    assert stepped.batch is batch
    assert [x.data_ptr() for x in vars(batch).values() if isinstance(x, torch.Tensor)] == places


def test_other_batches_use_the_same_memory():
    """What a graph captured for a size stays right whatever is bound between its replays."""
    cache = make()
    requests = [cache.add() for _ in range(4)]
    cache.bind_decode(requests)
    want = [x.data_ptr() for x in vars(cache.batch).values() if isinstance(x, torch.Tensor)]
    for bind in (
        lambda: cache.bind_prefill(requests[:1], [9]),
        lambda: cache.bind_decode(requests[1:]),
        lambda: cache.bind_decode((), pad_to=5),
    ):
        bind()
        assert [x.data_ptr() for x in vars(cache.batch).values() if isinstance(x, torch.Tensor)] == want


def test_padding_rows_store_to_the_scratch_page_only():
    cache, dense = make(), make_dense()
    requests = added(cache, dense, 3)
    prefill(cache, dense, requests, [4, 4, 4])
    cache.bind_decode(requests)
    dense.check(cache, requests, [1] * 3)
    cache.bind_decode(requests[:1], pad_to=4)
    before = cache.k_pool(0).clone()
    new = [torch.full((4, HEADS[1], dim), 3.0) for dim in DIMS]
    cache.append(0, *new)
    changed = (cache.k_pool(0) != before).logical_and(~before.isnan() | ~cache.k_pool(0).isnan()).any(-1).any(-1)
    page = int(cache.batch.page_table[0, 1])
    assert changed.nonzero().tolist() == [[0, 0], [page, 1]]


@devices
def test_contiguous_is_a_dense_cache(device):
    """Tokens of request r lie in row r of the view, in order, and the cache takes max_seqlen tokens of each."""
    kind = {"v_head_dim": DIMS[1], "dtype": torch.float32, "device": device}
    cache = poisoned(KVCache.contiguous(**SIZES, batch=3, max_seqlen=10, page_size=4, **kind))
    dense = make_dense(device, 10)
    requests = added(cache, dense, 3)
    assert cache.num_free_pages == 0
    prefill(cache, dense, requests, [3, 8, 1])
    for _ in range(2):
        decode(cache, dense, requests)
    prefill(cache, dense, [requests[2]], [7])
    rows = cache.v_pool(1)[1:].reshape(3, 12, HEADS[1], DIMS[1])
    for request, row, length in zip(requests, rows, (5, 10, 10)):
        dense.brought[request] = 0
        assert torch.equal(row[:length], dense.bring(1, [request], [length])[2])
        assert row[length:].isnan().all()
    with pytest.raises(CacheFull, match=r"^max_requests"):
        cache.add()


def test_pools_are_one_allocation_with_aligned_parts():
    cache = make(dtype=torch.bfloat16)
    pools = [pool(layer) for pool in (cache.k_pool, cache.v_pool) for layer in range(LAYERS)]
    assert len({pool.untyped_storage().data_ptr() for pool in pools}) == 1
    assert [tuple(pool.shape) for pool in pools] == [(65, 4, 2, 8)] * 2 + [(65, 4, 2, 16)] * 2
    assert sum(pool.numel() * 2 for pool in pools) == pools[0].untyped_storage().nbytes()
    assert all(pool.is_contiguous() and pool.data_ptr() % 16 == 0 for pool in pools)


def state(cache):
    tensors = [cache._page_table, *(x for x in vars(cache.batch).values() if isinstance(x, torch.Tensor))]
    return [cache.batch, cache.num_free_pages, *(x.tolist() for x in tensors)], [cache.seqlen(r) for r in (0, 1)]


REFUSED = {
    "unknown": (lambda c: c.bind_decode([0, 7]), ContractError, r"^request: wanted one that was added .* got 7$"),
    "freed": (lambda c: c.bind_prefill([2], [1]), ContractError, r"^request: wanted one that was added .* got 2$"),
    "twice": (lambda c: c.bind_decode([1, 0, 1]), ContractError, r"^requests: wanted each once, got request 1 at 0 "),
    "too_long": (
        lambda c: c.bind_prefill([0, 1], [2, 45]),
        ContractError,
        r"^requests: wanted at most max_seqlen = 48 tokens in request 1, got 4 \+ 45$",
    ),
    "too_many_lengths": (lambda c: c.bind_prefill([0], [1, 1]), ContractError, r"^lengths: wanted 1, .* got 2$"),
    "negative": (lambda c: c.bind_prefill([0, 1], [1, -1]), ContractError, r"^lengths\[1\]: wanted an int of 0 or"),
    "no_int": (lambda c: c.bind_prefill([0, 1], [1, 1.0]), ContractError, r"^lengths\[1\]: wanted an int .* got 1.0$"),
    "short_pad": (lambda c: c.bind_decode([0, 1], pad_to=1), ContractError, r"^pad_to: wanted from 2 to max_requests"),
    "long_pad": (lambda c: c.bind_decode([0, 1], pad_to=6), ContractError, r"^pad_to: .* = 5, got 6$"),
    "full": (lambda c: c.bind_prefill([0, 1], [24, 40]), CacheFull, r"^num_pages: needed 16 more, 10 of 12 free$"),
    "prompt": (lambda c: c.add(range(49)), ContractError, r"^tokens: wanted at most max_seqlen = 48 tokens, got 49$"),
    "tensor": (lambda c: c.add(torch.arange(3)), ContractError, r"^tokens: .* got Tensor; pass tokens.tolist\(\)$"),
    "layer": (lambda c: c.k_pool(2), ContractError, r"^layer: wanted one in \[0, 2\), got 2$"),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_named_and_changes_nothing(call, error, message):
    cache = make(num_pages=12)
    requests = [cache.add() for _ in range(3)]
    cache.free(requests.pop())
    cache.bind_prefill(requests, [2, 3])
    cache.bind_decode(requests)
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert state(cache) == before
    cache.bind_decode(requests)
    assert cache.batch.seqlens_k.tolist() == [4, 5]


def test_full_in_a_steady_loop_changes_nothing():
    cache = make(num_pages=2)
    requests = [cache.add(), cache.add()]
    cache.bind_prefill(requests, [2, 3])
    cache.bind_decode(requests)
    before = state(cache)
    with pytest.raises(CacheFull, match=r"^num_pages: needed 1 more, 0 of 2 free$"):
        cache.step()
    assert state(cache) == before


APPENDED = {
    "shape": ({"k": (3, 2, 8)}, r"^k: wanted float32 of shape \(2, 2, 8\) on cpu, got float32 of shape \(3, 2, 8\)"),
    "dtype": ({"v": torch.float16}, r"^v: wanted float32 of shape \(2, 2, 16\) on cpu, got float16"),
    "device": ({"k": "meta"}, r"^k: wanted .* on cpu, got .* on meta$"),
    "kind": ({"v": None}, r"^v: wanted a torch.Tensor, got NoneType$"),
}


@pytest.mark.parametrize(("change", "message"), APPENDED.values(), ids=APPENDED)
def test_append_names_what_does_not_fit_and_stores_nothing(change, message):
    cache = make()
    cache.bind_decode([cache.add(), cache.add()])
    new = {"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 16)}
    for name, to in change.items():
        new[name] = torch.ones(to) if isinstance(to, tuple) else to and new[name].to(to)
    with pytest.raises(ContractError, match=message):
        cache.append(0, **new)
    assert cache.k_pool(0).isnan().all()


def test_append_refuses_gradients_it_could_not_keep():
    cache = make()
    cache.bind_decode([cache.add()])
    k, v = torch.ones(1, 2, 8, requires_grad=True), torch.ones(1, 2, 16)
    with pytest.raises(ContractError, match=r"^k: wanted a tensor that does not require grad"):
        cache.append(0, k, v)
    with torch.no_grad():
        cache.append(0, k, v)
    assert not cache.k_pool(0).requires_grad


def test_a_cache_made_in_inference_mode_serves_outside_and_the_other_way():
    with torch.inference_mode():
        cache = make()
        cache.bind_decode([cache.add()])
    new = [torch.ones(1, 2, dim) for dim in DIMS]
    for mode in (False, True):
        with torch.inference_mode(mode):
            cache.step()
            cache.append(1, *new)
    assert cache.seqlen(0) == 3


def test_nothing_is_appended_to_a_batch_with_a_freed_request():
    cache = make()
    requests = [cache.add(), cache.add()]
    cache.bind_decode(requests)
    cache.free(requests[1])
    assert cache.batch is None
    with pytest.raises(RuntimeError, match="no batch is bound"):
        cache.append(0, torch.ones(2, 2, 8), torch.ones(2, 2, 16))
    with pytest.raises(RuntimeError, match="no decode is bound"):
        cache.step()


def test_binding_under_capture_is_refused_before_anything(monkeypatch):
    cache = make()
    request = cache.add()
    monkeypatch.setattr(module, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="not under capture"):
        cache.bind_decode([request])
    assert cache.seqlen(request) == 0


@pytest.mark.parametrize("name", ["num_layers", "num_pages", "page_size", "max_seqlen", "v_head_dim"])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_sizes_that_are_none_are_refused_by_name(name, value):
    with pytest.raises(ContractError, match=rf"^{name}: wanted an int of 1 or more, got {value}$"):
        make(**{name: value})


@pytest.mark.gpu
@needs_gpu
def test_nothing_waits_for_the_gpu():
    cache, dense = make("cuda"), make_dense("cuda")
    requests = added(cache, dense, 3)
    new = [[x.contiguous() for x in dense.bring(0, requests, counts)[1:]] for counts in ([9, 2, 4], [1] * 3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.bind_prefill(requests, [9, 2, 4])
        cache.append(0, *new[0])
        for _ in range(9):
            cache.bind_decode(requests)
            cache.append(0, *new[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.batch.seqlens_k.tolist() == [18, 11, 13]
