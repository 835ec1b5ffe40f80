"""What a cache stores and says of a batch: attention over it equals dense attention, steps in place equal binding
anew."""

import re

import numpy as np
import pytest
import torch

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.serving import kv_cache as module
from cuteforge.serving.kv_cache import CacheFull, KVCache
from helpers.kv_cache import Dense, facts, poisoned, snapshot
from helpers.nonsense import NONSENSE, refusal

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
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert snapshot(cache) == before
    cache.bind_decode(requests)
    assert cache.batch.seqlens_k.tolist() == [4, 5]


def test_full_in_a_steady_loop_changes_nothing():
    cache = make(num_pages=2)
    requests = [cache.add(), cache.add()]
    cache.bind_prefill(requests, [2, 3])
    cache.bind_decode(requests)
    before = snapshot(cache)
    with pytest.raises(CacheFull, match=r"^num_pages: needed 1 more, 0 of 2 free$"):
        cache.step()
    assert snapshot(cache) == before


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


# Steps that fail, and what becomes of their requests and of others.


class Failure(Exception):
    """What a model raises between two layers."""


def fail(cache, dense, requests, counts, layers):
    """The first `layers` layers of a bound step, then an exception."""

    def step():
        for layer in range(layers):
            cache.append(layer, *dense.bring(layer, requests, counts)[1:])
        raise Failure

    with pytest.raises(Failure):
        step()


def prompted(cache, dense, *prompts, like=None):
    requests = [cache.add(prompt) for prompt in prompts]
    for request in requests:
        dense.add(request, like=like, cached=cache.cached_tokens(request))
    return requests


def test_a_prefix_is_shared_only_once_every_layer_has_it():
    """Bound is not stored: who would share it would read what nobody wrote."""
    cache, dense, prompt = make(), make_dense(), [1] * 9
    (first,) = prompted(cache, dense, prompt)
    cache.bind_prefill([first], [9])
    for layer in range(LAYERS):
        assert not cache.is_stored
        assert cache.cached_tokens(cache.add(prompt)) == 0
        cache.append(layer, *dense.bring(layer, [first], [9])[1:])
    assert cache.is_stored
    (second,) = prompted(cache, dense, prompt, like=first)
    assert cache.cached_tokens(second) == 8
    cache.free(first)
    prefill(cache, dense, [second], [1])


@pytest.mark.parametrize("layers", range(LAYERS + 1))
@pytest.mark.parametrize("kind", ["prefill", "decode", "step"])
def test_a_step_that_fails_is_rolled_back_and_can_be_done_again(kind, layers):
    """Between any two layers and after the last one; pages, lengths, table and prefixes are those of before."""
    cache, dense = make(), make_dense()
    a, b = prompted(cache, dense, list(range(20)), [7] * 11)
    prefill(cache, dense, [a, b], [7, 3])
    for _ in range(2):
        decode(cache, dense, [b, a])
    before, free = [cache.seqlen(r) for r in (a, b)], cache.num_free_pages
    requests, counts = {"prefill": ([a, b], [11, 9]), "decode": ([a, b], [1, 1]), "step": ([b, a], [1, 1])}[kind]
    cache.bind_prefill(requests, counts) if kind == "prefill" else cache.bind_decode(requests)
    fail(cache, dense, requests, counts, layers)
    cache.rollback()
    assert ([cache.seqlen(r) for r in (a, b)], cache.num_free_pages, cache.batch) == (before, free, None)
    poison_what_is_free(cache, [a, b])
    cache.rollback()  # there is nothing more to undo
    assert [cache.seqlen(r) for r in (a, b)] == before
    prefill(cache, dense, [b, a], [9, 11])
    for _ in range(6):
        decode(cache, dense, [a, b])


def poison_what_is_free(cache, requests):
    """NaN wherever no request has a token."""
    kept = torch.zeros(cache.k_pool(0).shape[:2], dtype=torch.bool)
    for request in map(cache._allocator.__getitem__, requests):
        for position in range(request.num_tokens):
            kept[request.pages[position // cache.page_size], position % cache.page_size] = True
    for layer in range(cache.num_layers):
        for pool in (cache.k_pool(layer), cache.v_pool(layer)):
            pool[~kept.to(pool.device)] = torch.nan


@pytest.mark.parametrize("layers", range(LAYERS))
def test_a_failed_step_that_nobody_rolls_back_poisons_nobody_else(layers):
    """Not in the next bind either, nor when its request goes on: it has a hole, behind which nothing is shared."""
    cache, dense, prompt = make(), make_dense(), list(range(30))
    broken, fine = prompted(cache, dense, prompt, [5] * 9)
    prefill(cache, dense, [broken, fine], [4, 5])
    cache.bind_prefill([broken, fine], [8, 0])
    fail(cache, dense, [broken, fine], [8, 0], layers)
    prefill(cache, dense, [fine], [4])
    cache.bind_prefill([broken], [10])
    for layer in range(LAYERS):
        cache.append(layer, *dense.bring(layer, [broken], [10])[1:])
    decode(cache, dense, [fine])
    (other,) = prompted(cache, dense, prompt, like=broken)
    assert cache.cached_tokens(other) == 4
    prefill(cache, dense, [other, fine], [26, 3])


def test_a_full_cache_leaves_the_step_before_as_it_is():
    cache, dense = make(num_pages=4), make_dense()
    a, b = added(cache, dense, 2)
    prefill(cache, dense, [a, b], [8, 4])
    before = snapshot(cache)
    with pytest.raises(CacheFull):
        cache.bind_decode([a, b])
    assert snapshot(cache) == before


def test_a_refused_bind_leaves_nothing_of_a_stored_step_to_undo():
    """``try: bind, run the model; except: rollback`` must not take back the step before when the bind is what was
    refused."""
    cache, dense = make(num_pages=4), make_dense()
    a, b = added(cache, dense, 2)
    prefill(cache, dense, [a, b], [8, 4])
    with pytest.raises(CacheFull):
        cache.bind_decode([a, b])
    cache.rollback()
    assert [cache.seqlen(a), cache.seqlen(b)] == [8, 4]
    cache.bind_decode([b])
    with pytest.raises(CacheFull):
        cache.bind_decode([a])
    cache.rollback()  # of this one a layer is missing
    assert [cache.seqlen(a), cache.seqlen(b)] == [8, 4]
    decode(cache, dense, [b])


def test_a_request_freed_in_the_middle_of_a_step_leaves_the_others_to_roll_back():
    cache, dense = make(), make_dense()
    a, b = prompted(cache, dense, [1] * 9, [2] * 9)
    cache.bind_prefill([a, b], [9, 9])
    fail(cache, dense, [a, b], [9, 9], 1)
    cache.free(a)
    with pytest.raises(RuntimeError, match="append: no batch is bound"):
        cache.append(1, *dense.bring(1, [a, b], [9, 9])[1:])
    cache.rollback()
    assert (cache.seqlen(b), cache.num_free_pages) == (0, LIMITS["num_pages"])
    assert cache.cached_tokens(cache.add([1] * 9)) == 0
    prefill(cache, dense, [b], [9])


def test_what_fails_while_a_bind_is_written_is_undone(monkeypatch):
    """Memory of the host may run out, or the user press Ctrl-C."""
    cache, dense = make(), make_dense()
    (a,) = prompted(cache, dense, [1] * 9)
    prefill(cache, dense, [a], [8])
    for bind in (lambda: cache.bind_decode([a]), lambda: cache.bind_prefill([a], [7])):
        with monkeypatch.context() as patched:
            patched.setattr(cache._tensors, "_on_host", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                bind()
        assert (cache.seqlen(a), cache.batch, cache.num_free_pages) == (8, None, LIMITS["num_pages"] - 2)
    decode(cache, dense, [a])
    prefill(cache, dense, [a], [7])


def test_a_rollback_in_a_contiguous_cache_keeps_its_runs():
    kind = {"v_head_dim": DIMS[1], "dtype": torch.float32, "device": "cpu"}
    cache, dense = poisoned(KVCache.contiguous(**SIZES, batch=2, max_seqlen=10, page_size=4, **kind)), make_dense()
    a, b = added(cache, dense, 2)
    prefill(cache, dense, [a, b], [3, 1])
    cache.bind_decode([a, b])
    cache.rollback()
    prefill(cache, dense, [b, a], [9, 7])


def test_layers_that_something_else_stored_are_marked():
    cache = make()
    prompt, marks = [1] * 9, ((lambda c: [c.mark_stored(n) for n in range(LAYERS)]), lambda c: c.mark_stored())
    for mark in marks:
        first = cache.add(prompt)
        cache.bind_prefill([first], [9])
        assert cache.cached_tokens(cache.add(prompt)) == 0
        mark(cache)
        assert cache.is_stored
        assert cache.cached_tokens(cache.add(prompt)) == 8
        for number in list(cache._allocator._requests):
            cache.free(number)
    with pytest.raises(RuntimeError, match="mark_stored: no batch is bound"):
        cache.mark_stored()


# Arguments of every type.

OPERANDS = {
    "bind_prefill": {"requests": [0, 1], "lengths": [2, 3]},
    "bind_decode": {"requests": [0, 1], "pad_to": 3},
    "check_decode": {"requests": [0, 1], "pad_to": 3},
    "append": {"layer": 0, "k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 16)},
    "mark_stored": {"layer": 0},
    "add": {"tokens": [1, 2]},
    "free": {"request": 0},
    "seqlen": {"request": 0},
    "cached_tokens": {"request": 0},
    "k_pool": {"layer": 0},
    "v_pool": {"layer": 0},
}
# What is no nonsense there. Nothing is checked of ids of a prompt but that they are integers.
SERVED = {
    "requests": ("empty", "tuple"),
    "tokens": ("None", "empty", "tuple", "bytes", "huge_ints"),
    "pad_to": ("None",),
    "mark_stored": ("None",),
}
# How an error about an argument may begin: a length that is too large makes its request too long.
BEGINS = {"requests": "request(s|s\\[0\\])?:", "request": "request:", "lengths": "(lengths(\\[0\\])?|requests):"}


@pytest.mark.parametrize(("method", "argument"), [(m, a) for m, arguments in OPERANDS.items() for a in arguments])
def test_nonsense_is_refused_by_name_and_changes_nothing(method, argument):
    """One valid argument at a time is replaced."""
    cache = make()
    requests = [cache.add([1] * 6), cache.add()]
    cache.bind_prefill(requests, [6, 3])
    cache.mark_stored()
    cache.bind_decode(requests)
    before = snapshot(cache)
    begin = BEGINS.get(argument, rf"{argument}(\[0\])?:")
    for name, value in NONSENSE.items():
        if name in (*SERVED.get(argument, ()), *SERVED.get(method, ())):
            continue
        message = refusal(getattr(cache, method), **{**OPERANDS[method], argument: value})
        assert re.match(begin, message), (name, message)
        assert snapshot(cache) == before, name


@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8])
def test_integers_of_numpy_count_as_integers(number):
    sizes = {name: number(value) for name, value in {**SIZES, **LIMITS, "v_head_dim": DIMS[1]}.items()}
    cache = KVCache(**sizes, dtype=torch.float32, device="cpu")
    cache.add(np.arange(6, dtype=number))
    cache.add([number(3)] * 2)
    cache.bind_prefill([number(0), number(1)], np.array([2, 3], dtype=number))
    cache.bind_decode(np.array([0, 1], dtype=number), pad_to=number(4))
    cache.bind_decode([0, 1], pad_to=4)
    assert (cache.seqlen(number(0)), cache.k_pool(number(1)).shape[0]) == (4, 65)
    cache.free(number(1))


@pytest.mark.parametrize("name", [*SIZES, *LIMITS, "v_head_dim"])
def test_sizes_that_are_none_are_refused_by_name(name):
    for value in (0, 2.0, True, -1, "4", torch.tensor(4), np.float64(4), [4], 2**31, 2**63, 2**70):
        with pytest.raises(ContractError, match=rf"^{name}: wanted an int from 1 to \d+, got "):
            make(**{name: value})


def test_sizes_whose_product_is_past_all_memory_are_refused():
    with pytest.raises(
        ContractError, match=r"^num_pages: wanted a pool of at most \d+ bytes, got sizes that need \d+$"
    ):
        make(num_pages=2**30, head_dim=2**30, page_size=2**30)
    with pytest.raises(ContractError, match=r"^max_requests: wanted a page table of at most \d+ bytes"):
        make(max_requests=2**31 - 1, max_seqlen=2**31 - 1, page_size=1)
    with pytest.raises(ContractError, match=r"^batch: wanted .* at most \d+ pages, got \d+$"):
        KVCache.contiguous(**SIZES, batch=2**20, max_seqlen=2**20, device="cpu")
    for name in ("batch", "max_seqlen", "page_size"):
        with pytest.raises(ContractError, match=rf"^{name}: wanted an int"):
            KVCache.contiguous(**SIZES, **{"batch": 1, "max_seqlen": 9, "page_size": 4, name: None}, device="cpu")


def test_a_dtype_may_be_a_name_and_what_is_none_is_refused():
    assert make(dtype="bfloat16").dtype is make(dtype="torch.bfloat16").dtype is torch.bfloat16
    others = {"ints": "int32", "torch": torch.int8, "numpy": np.float32, "no_dtype": "Tensor"}
    for name, value in {**NONSENSE, **others}.items():
        message = refusal(make, dtype=value)
        assert message.startswith("dtype: wanted a floating torch.dtype or its name, got "), name


def test_a_device_that_is_none_is_refused_and_one_that_is_not_here_too():
    for name, value in {**NONSENSE, "typo": "cud", "index": "cuda:x"}.items():
        assert refusal(make, device=value).startswith("device: "), name
    for device in ("meta", "vulkan", "cuda:99"):
        with pytest.raises(UnsupportedError, match=r"^device: "):
            make(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_without_a_gpu_the_default_device_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"^device: torch cannot use cuda here: "):
        KVCache(**SIZES, **LIMITS)


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
