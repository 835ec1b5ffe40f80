"""A KV cache in any order of calls, against lists of tokens: steps that are stored, fail, are rolled back or given up,
prefixes, refusals, graphs.

Attention over the cache is compared with dense attention in fp64 over each request's own history. All memory that holds
no token is NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cuteforge import CacheFull, ContractError, DecodeGraph, KVCache, UnsupportedError, attention
from helpers.kv_cache import snapshot
from helpers.nonsense import NONSENSE

KV_HEADS, D, DV = 2, 4, 3
FP64 = torch.float64
REFUSALS = (ContractError, UnsupportedError)


class Failure(Exception):
    """What a model raises in the middle of a step."""


@dataclass
class Sequence:
    """What the model knows of a request: the ids of its tokens, and how many pages of its prompt others find."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    found: int = 0
    # A step of it was given up half-way: some of its keys were never stored.
    has_hole: bool = False


@dataclass
class Step:
    """The last bind: where each of its requests was and is now, in order, and the layers that have the new tokens."""

    spans: dict[int, tuple[int, int]]
    num_rows: int
    is_decode: bool
    stored: set[int] = field(default_factory=set)
    is_final: bool = False


def draw_token(layer: int, prefix: tuple[int, ...], group: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of the last token of `prefix`: like a model, they depend on all tokens up to it."""
    generator = np.random.default_rng([layer, len(prefix), *[token + 1 for token in prefix]])
    shapes = (KV_HEADS * group, D), (KV_HEADS, D), (KV_HEADS, DV)
    return tuple(torch.from_numpy(generator.standard_normal(shape)) for shape in shapes)


def dense(q, k, v, mask, is_causal=False, window=None, softcap=None, sinks=None, scale=None):
    """``(L, Hq, Dv)`` of q ``(L, Hq, D)``, k ``(S, Hkv, D)``, v ``(S, Hkv, Dv)`` and mask ``(L, S)``, as the definition
    says."""
    k, v = (x.repeat_interleave(q.shape[1] // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("lhd,shd->hls", q, k) * (D**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place, key = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    left, right = window or (None, None)
    keep = mask & (key <= place) if is_causal else mask
    keep = keep if left is None else keep & (key >= place - left)
    keep = keep if right is None else keep & (key <= place + right)
    weights = torch.exp(scores).masked_fill(~keep, 0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks)[:, None, None]
    # A row without a key gives 0.
    weights = weights / total.masked_fill(total == 0, 1)
    return torch.einsum("hls,shd->lhd", weights, v)


def draw_options(dice: random.Random, heads: int) -> dict:
    """What a call of attention may ask for: drawn from a seed, as draws of hypothesis take longer than the call."""
    given = {
        "is_causal": True,
        "window": tuple(dice.choice([None, *range(6)]) for _ in range(2)),
        "softcap": dice.choice([0.5, 3.0]),
        "scale": dice.choice([0.0, -0.7, 1.0]),
        "sinks": torch.linspace(-1, 1, heads, dtype=FP64),
    }
    return {name: value for name, value in given.items() if dice.random() < 0.4}


# Of few kinds, so that many start alike.
PROMPTS = st.builds(
    lambda kind, length, last: [*kind[: length - 1], *[last][:length]],
    st.sampled_from([[0] * 20, [0, 1] * 10]),
    st.integers(0, 14),
    st.integers(0, 1),
)


class Machine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def make(self, data):
        def number(low, high):
            return data.draw(st.integers(low, high))

        self.layers, self.group = number(1, 3), number(1, 2)
        self.page_size = data.draw(st.sampled_from([2, 3, 1, 4, 5]))
        self.max_requests, self.max_seqlen = number(4, 7), number(14, 28)
        sizes = {"num_layers": self.layers, "num_kv_heads": KV_HEADS, "head_dim": D, "v_head_dim": DV, "dtype": FP64}
        limits = {"page_size": self.page_size, "max_seqlen": self.max_seqlen, "device": "cpu"}
        self.has_runs = data.draw(st.integers(0, 9)) == 0
        if self.has_runs:
            self.cache = KVCache.contiguous(**sizes, **limits, batch=self.max_requests)
        else:
            self.num_pages = number(6, 60)
            self.cache = KVCache(**sizes, **limits, num_pages=self.num_pages, max_requests=self.max_requests)
        self.sequences: dict[int, Sequence] = {}
        self.step: Step | None = None
        self.is_bound = False
        self.raise_at: int | None = None
        self.graph = self.make_graph()
        for prompt in data.draw(st.lists(PROMPTS, min_size=1, max_size=2)):
            self.add(prompt[: self.max_seqlen])

    def make_graph(self):
        return DecodeGraph(self.decode_step, self.cache)

    def decode_step(self, q, k, v):
        """Rows of every layer; raises where it is told to."""
        outs = []
        for layer in range(self.layers):
            if self.raise_at == layer:
                raise Failure
            outs.append(attention(q[:, layer], k[:, layer], v[:, layer], self.cache, layer))
        if self.raise_at == self.layers:
            raise Failure
        return torch.stack(outs, 1)

    # The model.

    def whole_pages(self, sequence):
        return min(len(sequence.prompt), len(sequence.tokens)) // self.page_size

    def cached(self, prompt):
        """Tokens of a new prompt that the cache must find."""
        best = 0
        for sequence in self.sequences.values() if not self.has_runs else ():
            for pages in range(1, min(sequence.found, (len(prompt) - 1) // self.page_size) + 1):
                if sequence.prompt[: pages * self.page_size] == prompt[: pages * self.page_size]:
                    best = max(best, pages * self.page_size)
        return best

    def end_step(self):
        """The next bind was served."""
        for number, (before, after) in self.step.spans.items() if self.step else ():
            sequence = self.sequences[number]
            if after > before and len(self.step.stored) < self.layers:
                sequence.has_hole = True
            elif not sequence.has_hole:
                sequence.found = self.whole_pages(sequence)
        self.step, self.is_bound = None, False

    def note_stored(self, layer):
        self.step.stored.add(layer)
        if len(self.step.stored) == self.layers:
            for number, (before, _) in self.step.spans.items():
                sequence = self.sequences[number]
                if before % self.page_size == 0 and not sequence.has_hole:
                    sequence.found = self.whole_pages(sequence)

    def note_refused_bind(self):
        if self.step and len(self.step.stored) == self.layers:
            self.step.is_final = True

    def undo(self):
        for number, (before, _) in self.step.spans.items():
            sequence = self.sequences[number]
            del sequence.tokens[before:]
            sequence.found = min(sequence.found, before // self.page_size)
        self.step, self.is_bound = None, False

    def refusal_of(self, numbers, counts):
        """The error that a bind must raise, or None."""
        needed = 0
        for number, count in zip(numbers, counts):
            length = len(self.sequences[number].tokens)
            if length + count > self.max_seqlen:
                return ContractError
            needed += -(-(length + count) // self.page_size) - -(-length // self.page_size)
        return CacheFull if needed > self.cache.num_free_pages and not self.has_runs else None

    def refused(self, call, *errors):
        before = snapshot(self.cache)
        try:
            call()
        except errors:
            assert snapshot(self.cache) == before
            return
        raise AssertionError(f"served, wanted {errors}")

    def pick(self, data):
        """Requests in any order; mostly all of them."""
        numbers = data.draw(st.permutations(sorted(self.sequences)))
        return numbers[: data.draw(st.integers(0, 2 * len(numbers)))]

    def pick_one(self, data):
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def next_tokens(self, data, number, count):
        """Ids of the next tokens: those of the prompt, and then any."""
        sequence = self.sequences[number]
        mine = sequence.prompt[len(sequence.tokens) : len(sequence.tokens) + count]
        return [*mine, *data.draw(st.lists(st.integers(0, 1), min_size=count - len(mine), max_size=count - len(mine)))]

    def bind(self, data, call, numbers, counts, num_rows, is_decode):
        """A bind, which must be served exactly if the model says so, and some layers of its step."""
        error = self.refusal_of(numbers, counts)
        if error is not None:
            self.refused(call, error)
            self.note_refused_bind()
            return
        call()
        self.begin(data, numbers, counts, num_rows, is_decode)
        # Mostly the whole step follows; the rest of its layers may do so later, or never. Meanwhile the same prompts
        # may come in.
        for layer in range(data.draw(st.sampled_from([*range(self.layers), *[self.layers] * 4]))):
            if data.draw(st.integers(0, 3)) == 0:
                self.add_prompt_of(data)
            self.attend_in(data, layer)
        if data.draw(st.integers(0, 3)) == 0:
            self.add_prompt_of(data)

    def begin(self, data, numbers, counts, num_rows, is_decode):
        self.end_step()
        spans = {}
        for number, count in zip(numbers, counts):
            tokens = self.sequences[number].tokens
            spans[number] = len(tokens), len(tokens) + count
            tokens += self.next_tokens(data, number, count)
        self.step, self.is_bound = Step(spans, num_rows, is_decode), True

    # What users do.

    def add_prompt_of(self, data):
        """The prompt of a request again, and one token more."""
        if self.sequences:
            self.add([*self.sequences[self.pick_one(data)].prompt, 1][: self.max_seqlen])

    @rule(tokens=st.none() | PROMPTS)
    def add(self, tokens):
        prompt = tuple(tokens or ())
        if len(prompt) > self.max_seqlen:
            self.refused(lambda: self.cache.add(tokens), ContractError)
        elif len(self.sequences) == self.max_requests:
            self.refused(lambda: self.cache.add(tokens), CacheFull)
        else:
            want, free = self.cached(prompt), self.cache.num_free_pages
            number = self.cache.add(tokens)
            assert self.cache.cached_tokens(number) == want
            assert self.has_runs or self.cache.num_free_pages == free
            self.sequences[number] = Sequence(prompt, list(prompt[:want]), want // self.page_size)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_free=st.booleans())
    def free_or_nonsense(self, data, is_free):
        """One rule, so that it is drawn less often than what fills a cache."""
        self.free(data) if is_free else self.refuse_nonsense(data)

    def free(self, data):
        number = self.pick_one(data)
        self.cache.free(number)
        del self.sequences[number]
        if self.step and number in self.step.spans:
            # The others of the step can still be rolled back, and no layer can be stored any more.
            del self.step.spans[number]
            self.is_bound = False
        self.refused(lambda: self.cache.seqlen(number), ContractError)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def bind_prefill(self, data):
        numbers = self.pick(data)
        rests = [len(s.prompt) - len(s.tokens) for s in map(self.sequences.get, numbers)]
        counts = [data.draw(st.integers(0, 5) | st.just(max(rest, 0))) for rest in rests]
        self.bind(data, lambda: self.cache.bind_prefill(numbers, counts), numbers, counts, len(numbers), False)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def bind_decode(self, data):
        numbers = self.pick(data)
        num_rows = data.draw(st.integers(len(numbers), self.max_requests))
        call = lambda: self.cache.bind_decode(numbers, pad_to=num_rows)  # noqa: E731
        self.bind(data, call, numbers, [1] * len(numbers), num_rows, True)

    @precondition(lambda self: self.is_bound and self.step.is_decode)
    @rule(data=st.data())
    def bind_the_same_again(self, data):
        numbers = list(self.step.spans)
        self.bind(data, self.cache.step, numbers, [1] * len(numbers), self.step.num_rows, True)

    @precondition(lambda self: self.is_bound)
    @rule(data=st.data())
    def attend(self, data):
        """Any layer, one that has the tokens already too."""
        self.attend_in(data, data.draw(st.integers(0, self.layers - 1)))

    @precondition(lambda self: self.is_bound)
    @rule(layer=st.none() | st.integers(0, 2))
    def store_otherwise_and_mark(self, layer):
        """As a kernel does that takes the new tokens: into the slots of the batch."""
        layers = range(self.layers) if layer is None else [layer % self.layers]
        for one in layers:
            _, k, v = self.new_tokens(one)
            for pool, new in ((self.cache.k_pool(one), k), (self.cache.v_pool(one), v)):
                pool.flatten(0, 1)[self.cache.batch.slots] = new
        self.cache.mark_stored(layer if layer is None else layers[0])
        for one in layers:
            self.note_stored(one)

    @rule()
    def rollback(self):
        self.cache.rollback()
        if self.step and not self.step.is_final:
            self.undo()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_new=st.booleans())
    def replay(self, data, is_new):
        """A decode graph, whose step raises before a layer or after the last one, or not."""
        numbers = self.pick(data)
        if is_new:
            self.graph = self.make_graph()
        error = self.refusal_of(numbers, [1] * len(numbers))
        self.raise_at = data.draw(st.none() | st.integers(0, self.layers))
        if error is not None:
            empty = [torch.zeros(len(numbers), self.layers, *shape, dtype=FP64) for shape in self.shapes()]
            self.refused(lambda: self.graph(numbers, *empty), error)
            self.note_refused_bind()
            return
        self.begin(data, numbers, [1] * len(numbers), len(numbers), True)
        inputs = [torch.stack(rows, 1) for rows in zip(*map(self.new_tokens, range(self.layers)))]
        if self.raise_at is None:
            out = self.graph(numbers, *inputs)
            for layer in range(self.layers):
                self.note_stored(layer)
                self.compare(layer, out[:, layer], inputs[0][:, layer], {}, None)
            size = next(size for size in self.graph.batch_sizes if size >= len(numbers))
            self.step.num_rows = size
            return
        try:
            self.graph(numbers, *inputs)
            raise AssertionError("the failure of the step was lost")
        except Failure:
            self.undo()

    def refuse_nonsense(self, data):
        what = data.draw(st.sampled_from(sorted(NONSENSE)))
        cache, value = self.cache, NONSENSE[what]
        numbers = sorted(self.sequences)
        calls = {
            "bind_prefill": lambda: cache.bind_prefill(value, [1]),
            "lengths": lambda: cache.bind_prefill(numbers, value),
            "bind_decode": lambda: cache.bind_decode([value]),
            "pad_to": lambda: cache.bind_decode(numbers, pad_to=[value]),
            "graph": lambda: self.graph(value, torch.zeros(7)),
            "inputs": lambda: self.graph(numbers, value),
            "free": lambda: cache.free([value]),
            "pool": lambda: cache.k_pool([value]),
            "append": lambda: cache.append(value, value, value),
            "attention": lambda: attention(*[torch.zeros(29, 5, D)] * 3, cache, 0),
        }
        name = data.draw(st.sampled_from(sorted(calls)))
        if name == "lengths" and not numbers and what in ("empty", "tuple"):
            return
        if name in ("graph", "inputs", "append", "attention") and not self.is_bound:
            self.refused(calls[name], *REFUSALS, RuntimeError)
        else:
            self.refused(calls[name], *REFUSALS)
        if name in ("bind_prefill", "lengths", "bind_decode", "pad_to", "graph", "inputs"):
            self.note_refused_bind()

    # What is compared.

    def shapes(self):
        return (KV_HEADS * self.group, D), (KV_HEADS, D), (KV_HEADS, DV)

    def new_tokens(self, layer):
        """q, k, v of the step, padding rows NaN."""
        rows = []
        for number, (before, after) in self.step.spans.items():
            tokens = tuple(self.sequences[number].tokens)
            rows += [draw_token(layer, tokens[: i + 1], self.group) for i in range(before, after)]
        num_padding = self.step.num_rows - len(self.step.spans)
        rows += [tuple(torch.full(shape, torch.nan, dtype=FP64) for shape in self.shapes())] * num_padding
        if not rows:
            return tuple(torch.zeros(0, *shape, dtype=FP64) for shape in self.shapes())
        return tuple(torch.stack(x) for x in zip(*rows))

    def attend_in(self, data, layer):
        q, k, v = self.new_tokens(layer)
        dice = random.Random(data.draw(st.integers(0, 2**16)))
        options, mask, has_graph = draw_options(dice, q.shape[1]), None, dice.random() < 0.3
        if dice.random() < 0.3:
            longest = max((after - before for before, after in self.step.spans.values()), default=1) or 1
            shape = self.step.num_rows, longest, dice.randint(1, self.max_seqlen + 1)
            mask = torch.from_numpy(np.random.default_rng(dice.getrandbits(32)).random(shape) > 0.3)
        leaves = [x.clone().requires_grad_(has_graph) for x in (q, k, v)]
        out = attention(*leaves, self.cache, layer, attn_mask=mask, **options)
        assert out.requires_grad == (has_graph and len(q) > 0) or not len(q)
        self.note_stored(layer)
        self.compare(layer, out, leaves[0], options, mask, leaves if has_graph else None)

    def compare(self, layer, out, q, options, mask, leaves=None):
        """Each request's rows with dense attention over its history, and their gradients; not those of requests with a
        hole."""
        start = 0
        for i, (number, (before, after)) in enumerate(self.step.spans.items()):
            rows, sequence = slice(start, start + after - before), self.sequences[number]
            start += after - before
            if sequence.has_hole or after == before:
                continue
            tokens = tuple(sequence.tokens)
            history = [draw_token(layer, tokens[: n + 1], self.group)[1:] for n in range(after)]
            k, v = (torch.stack(x) for x in zip(*history))
            mine = [q[rows].detach().requires_grad_(), *(x[before:].clone().requires_grad_() for x in (k, v))]
            kept = torch.ones(after - before, after, dtype=torch.bool)
            if mask is not None:
                kept = torch.zeros_like(kept)
                part = mask[i, : after - before, :after].expand(after - before, -1)
                kept[:, : part.shape[1]] = part
            k, v = (torch.cat((x[:before], new)) for x, new in zip((k, v), mine[1:]))
            want = dense(mine[0], k, v, kept, **options)
            torch.testing.assert_close(out[rows].detach(), want.detach(), atol=1e-9, rtol=0)
            if leaves is not None:
                weight = torch.linspace(-1, 2, want.numel(), dtype=FP64).view_as(want)
                got = torch.autograd.grad((out[rows] * weight).sum(), leaves, retain_graph=True)
                for a, b in zip(got, torch.autograd.grad((want * weight).sum(), mine)):
                    torch.testing.assert_close(a[rows], b, atol=1e-9, rtol=0)

    @invariant()
    def lengths_and_the_batch_are_those_of_the_model(self):
        for number, sequence in self.sequences.items():
            assert self.cache.seqlen(number) == len(sequence.tokens)
        batch = self.cache.batch
        assert (batch is not None) == self.is_bound
        assert self.cache.is_stored == (self.is_bound and len(self.step.stored) == self.layers)
        if batch is None:
            return
        padding = [0] * (self.step.num_rows - len(self.step.spans))
        assert batch.seqlens_k.tolist() == [after for _, after in self.step.spans.values()] + padding
        positions = [i for before, after in self.step.spans.values() for i in range(before, after)]
        assert batch.positions.tolist() == positions + padding
        assert batch.is_decode == self.step.is_decode

    @invariant()
    def what_holds_no_token_is_nan(self):
        """Also where the step's tokens go, in layers that do not have them yet."""
        for layer in range(self.layers):
            kept = torch.zeros(self.cache.k_pool(layer).shape[:2], dtype=torch.bool)
            for number, sequence in self.sequences.items():
                length = len(sequence.tokens)
                if self.step and number in self.step.spans and layer not in self.step.stored:
                    length = self.step.spans[number][0]
                pages = self.cache._allocator[number].pages
                for position in range(length):
                    kept[pages[position // self.page_size], position % self.page_size] = True
            for pool in (self.cache.k_pool(layer), self.cache.v_pool(layer)):
                pool[~kept] = torch.nan

    @invariant()
    def every_page_is_free_or_held_and_no_request_has_more_than_it_needs(self):
        if self.has_runs:
            return
        pages = {number: self.cache._allocator[number].pages for number in self.sequences}
        for number, sequence in self.sequences.items():
            assert len(pages[number]) == -(-len(sequence.tokens) // self.page_size)
        held = {page for mine in pages.values() for page in mine}
        assert self.cache.num_free_pages == self.num_pages - len(held)

    def teardown(self):
        for number in list(self.sequences):
            self.cache.free(number)


def test_any_order_of_calls_is_right(fuzz):
    fuzz.machine(Machine, examples=22, steps=25)
