"""Damaged tables: CUTEFORGE_CHECK=1 names the argument and the first bad index; without it nothing outside is touched.

Numbers far outside fault where they are used as an address; writes just outside show in the guards around the outputs
and in the pools, which are compared bit for bit. Requests that are not damaged keep right answers.
"""

import pytest
import torch

from cuteforge import ContractError
from helpers import paged
from helpers.paged import CAUSAL, MAIN, Batch

ROWS = (3, 0, 2, 1)
LENGTHS = (100, 5, 16, 64)
COLUMNS = 9  # the longest request has 7 pages of 16


def at(kind, device, by_indptr=False):
    queries = {"prefill": (40, 3, 0, 64)}.get(kind, 2)
    batch = Batch(LENGTHS, 16, queries, rows=ROWS, by_indptr=by_indptr)
    x = paged.draw(CAUSAL if kind == "prefill" else MAIN, batch, device)
    return paged.appending(x) if kind == "append" else x


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


# (case, kinds it is for, what is damaged, how, index in the error, requests that stay whole).
ALL = ("decode", "append", "prefill")
DAMAGE = (
    ("page_just_past_the_pool", ALL, "page_table", lambda t: changed(t, (2, 0), 16), (2, 0), (0, 1, 3)),
    ("page_far_outside", ALL, "page_table", lambda t: changed(t, (3, 4), 2**30), (3, 4), (1, 2, 3)),
    ("page_of_the_largest_number", ALL, "page_table", lambda t: changed(t, (1, 1), 2**31 - 1), (1, 1), (0, 1, 2)),
    ("negative_page_before_the_last", ALL, "page_table", lambda t: changed(t, (1, 2), -1), (1, 2), (0, 1, 2)),
    ("most_negative_page", ALL, "page_table", lambda t: changed(t, (3, 5), -(2**31)), (3, 5), (1, 2, 3)),
    ("length_one_past_the_table", ALL, "seqlens_k", lambda t: changed(t, 1, 16 * COLUMNS + 1), (1,), (0, 2, 3)),
    ("length_far_past_the_table", ALL, "seqlens_k", lambda t: changed(t, 3, 2**31 - 1), (3,), (0, 1, 2)),
    ("row_past_the_table", ALL, "page_table_rows", lambda t: changed(t, 2, 5), (2,), (0, 1, 3)),
    ("row_far_outside", ALL, "page_table_rows", lambda t: changed(t, 2, 2**30), (2,), (0, 1, 3)),
    ("negative_row", ALL, "page_table_rows", lambda t: changed(t, 0, -1), (0,), (1, 2, 3)),
    ("last_offset_past_the_tokens", ("prefill",), "cu_seqlens_q", lambda t: changed(t, 4, 2**30), (4,), (0, 1, 2)),
    ("first_offset_negative", ("prefill",), "cu_seqlens_q", lambda t: changed(t, 0, -5), (0,), (1, 2, 3)),
    ("offsets_not_monotone", ("prefill",), "cu_seqlens_q", lambda t: changed(t, 2, 20), (2,), (3,)),
    ("offsets_far_outside", ("prefill",), "cu_seqlens_q", lambda t: changed(t, 2, -(2**31)), (2,), (3,)),
)  # fmt: skip
CASES = [(kind, *rest) for case, kinds, *rest in DAMAGE for kind in kinds]
IDS = [f"{kind}-{case}" for case, kinds, *_ in DAMAGE for kind in kinds]
damages = pytest.mark.parametrize(("kind", "name", "damage", "index", "whole"), CASES, ids=IDS)


def test_cases_damage_what_they_say(device):
    """The pool has 16 pages, the table 5 rows of 9."""
    x = at("decode", device)
    assert x.k_cache.shape[0] == 16 and x.page_table.shape == (5, COLUMNS)


class Prepared:
    """A compiled op with guarded results, to be called with damaged operands."""

    def __init__(self, x):
        self.outputs = paged.Outputs.of(x)
        self.op = paged.make_op(x, self.outputs.tensors).compile()
        self.scratch = paged.workspace_of(self.op, x.q.device)

    def arguments(self, x):
        positional, named = paged.arguments(x, self.outputs.tensors)
        return positional, {**named, "workspace": None if self.scratch is None else self.scratch.tensor}

    def execute(self, x):
        positional, named = self.arguments(x)
        self.op.execute(*positional, **named)

    def bind(self, x):
        positional, named = self.arguments(x)
        return self.op.bind(*positional, **named)

    def check_guards(self):
        torch.cuda.synchronize()
        for name, guard in self.outputs.guards.items():
            guard.check_guards(name)
        if self.scratch is not None:
            self.scratch.check_guards("workspace")


@damages
def test_checked_mode_names_the_argument_and_the_first_bad_index(kind, name, damage, index, whole, device, monkeypatch):
    good = at(kind, device)
    bad = good.with_(**{name: damage(getattr(good, name))})
    prepared, guard = Prepared(good), paged.PoolGuard(good.with_(new_k=None, new_v=None))
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    where = r"\D+".join(map(str, index))
    for attempt in (prepared.execute, prepared.bind, paged.call_wrapper):
        with pytest.raises(ContractError, match=rf"^{name}\b.*\b{where}\b"):
            attempt(bad)
    torch.cuda.synchronize()
    prepared.outputs.check_untouched()
    guard.check()
    prepared.execute(good)
    prepared.check_guards()
    paged.check(prepared.outputs.tensors, good)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_checked_mode_names_the_first_offset_that_falls(kind, device, monkeypatch):
    good = at(kind, device, by_indptr=True)
    prepared = Prepared(good)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    prepared.execute(good)
    bad = good.with_(kv_indptr=changed(good.kv_indptr, 2, 3))
    for attempt in (prepared.execute, prepared.bind, paged.call_wrapper):
        with pytest.raises(ContractError, match=r"^kv_indptr\b.*\b2\b"):
            attempt(bad)
    long = good.kv_indptr.clone()
    long[3:] += 16 * COLUMNS
    with pytest.raises(ContractError, match=r"^kv_indptr\b.*\b[23]\b"):
        prepared.execute(good.with_(kv_indptr=long))


@pytest.mark.parametrize("kind", ALL)
def test_checked_mode_takes_all_that_is_allowed(kind, device, monkeypatch):
    """Stale numbers past the lengths, rows that no request names, lengths of 0 and below."""
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    x = at(kind, device)
    paged.check(paged.run(x), x)
    x = x.with_(seqlens_k=changed(changed(x.seqlens_k, 1, 0), 2, -4))
    x.page_table[0] = -1
    paged.check(paged.run(x), x)


def test_checked_mode_takes_a_negative_slot(device, monkeypatch):
    """It says that nothing is to be stored."""
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    x = at("append", device)
    x = x.with_(seqlens_k=changed(x.seqlens_k, 0, 97), page_table=changed(x.page_table, (3, 6), -1))
    paged.check(paged.run(x), x)


def test_checked_mode_is_silent_under_capture(device, monkeypatch):
    """Contents cannot be read then."""
    x = at("decode", device)
    prepared = Prepared(x)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.execute(x)
    graph.replay()
    torch.cuda.synchronize()
    paged.check(prepared.outputs.tensors, x)


class Untouched:
    """The pools keep their bits but for the slots of new positions, which a damaged request may have stored or not."""

    def __init__(self, x):
        self._x, self._before = x, [cache.clone() for cache in x.pools]

    def check(self):
        x = self._x
        for cache, before in zip(x.pools, self._before):
            after = cache.clone()
            if x.new_k is not None:
                page = x.page_table[x.rows, (x.lens.long() - 1) // x.page_size].long()
                slot = (x.lens.long() - 1) % x.page_size
                after[page, slot] = before[page, slot]
            assert torch.equal(after.view(torch.int16), before.view(torch.int16)), (
                "pool: written outside the new positions"
            )


@pytest.mark.parametrize("entry", ["execute", "bind"])
@damages
def test_damage_stays_where_it_is(kind, name, damage, index, whole, entry, device):
    """Without checks: no fault, no write outside, and the other requests are right."""
    good = at(kind, device)
    bad = good.with_(**{name: damage(getattr(good, name))})
    prepared, pool = Prepared(good), Untouched(good)
    if entry == "bind":
        prepared.bind(bad)()
    else:
        prepared.execute(bad)
    prepared.check_guards()
    pool.check()
    paged.check(prepared.outputs.tensors, good, whole)
    prepared.execute(good)
    prepared.check_guards()
    paged.check(prepared.outputs.tensors, good)


@pytest.mark.parametrize("kind", ALL)
def test_tables_of_noise(kind, device):
    """Every table at once holds random numbers: no fault, no write outside the results, and the next call is right."""
    x = at(kind, device)
    prepared = Prepared(x)
    generator = torch.Generator(device=device).manual_seed(0)
    for _ in range(20):
        noise = {}
        for name in ("page_table", "seqlens_k", "page_table_rows", "cu_seqlens_q"):
            if (tensor := getattr(x, name)) is not None:
                high = torch.randint(0, 31, tensor.shape, generator=generator, device=device)
                number = torch.randint(-(2**31), 2**31, tensor.shape, generator=generator, device=device)
                noise[name] = (number >> high).to(torch.int32)
        prepared.execute(x.with_(**noise))
        prepared.check_guards()
    fresh = at(kind, device)
    prepared.execute(fresh)
    prepared.check_guards()
    paged.check(prepared.outputs.tensors, fresh)
