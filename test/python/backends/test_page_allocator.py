"""Any order of calls: no page is lent twice unless shared, none is lost, prefixes are shared exactly, refusals change
nothing."""

import pickle
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cuteforge.errors import ContractError
from cuteforge.serving.page_allocator import SCRATCH_PAGE, CacheFull, PageAllocator

NUM_PAGES, PAGE_SIZE, MAX_REQUESTS, MAX_SEQLEN = 12, 3, 4, 20


def snapshot(allocator):
    """All that a refused call must leave alone."""
    requests = allocator._requests
    lent = {n: (r.row, tuple(r.pages), r.num_tokens, r.num_cached, r.num_listed) for n, r in requests.items()}
    free = tuple(allocator._free_pages), tuple(allocator._free_rows)
    return lent, free, tuple(allocator._references), set(allocator._prefixes._node_of)


class Machine(RuleBasedStateMachine):
    """Adds, steps that are stored, rolled back or given up, and frees; prompts of two ids only, so that many start
    alike."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, PAGE_SIZE, MAX_REQUESTS, MAX_SEQLEN)
        self.prompts, self.table, self.ever = {}, {}, set()
        # How many pages of each request's prompt others can find; requests with a hole, of which no more will be found.
        self.found, self.holed = {}, set()
        # Of the step that may still be rolled back: request -> tokens before and after.
        self.step, self.is_stored = {}, False

    def refused(self, call, error):
        before = snapshot(self.allocator)
        with pytest.raises(error):
            call()
        assert snapshot(self.allocator) == before

    def pick(self, data, **how):
        return data.draw(st.lists(st.sampled_from(sorted(self.prompts)), unique=True, **how))

    def findable(self, number):
        """Whole pages of the prompt of a request."""
        return min(len(self.prompts[number]), self.allocator[number].num_tokens) // PAGE_SIZE

    def cached(self, tokens):
        """How much of `tokens` can be found in whole pages of some request, the last token aside."""
        best = 0
        for number, prompt in self.prompts.items():
            for pages in range(1, min(self.found[number], (len(tokens) - 1) // PAGE_SIZE) + 1):
                if prompt[: pages * PAGE_SIZE] == tokens[: pages * PAGE_SIZE]:
                    best = max(best, pages * PAGE_SIZE)
        return best

    def end_step(self):
        for number, (before, after) in self.step.items():
            if not self.is_stored and after > before:
                self.holed.add(number)
            elif number not in self.holed:
                self.found[number] = self.findable(number)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=10))
    def add(self, tokens):
        if len(self.prompts) == MAX_REQUESTS:
            self.refused(lambda: self.allocator.add(tokens), CacheFull)
            return
        want = self.cached(tokens)
        free = self.allocator.num_free_pages
        request = self.allocator.add(tokens)
        assert request.num_cached == request.num_tokens == want
        assert self.allocator.num_free_pages == free
        assert request.id not in self.ever
        self.prompts[request.id], self.found[request.id] = tokens, want // PAGE_SIZE
        self.ever.add(request.id)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def reserve(self, data):
        requests = [self.allocator[n] for n in self.pick(data)]
        counts = [data.draw(st.integers(0, 7)) for _ in requests]
        before = [r.num_tokens for r in requests]
        totals = [n + count for n, count in zip(before, counts)]
        needed = sum(-(-total // PAGE_SIZE) - len(r.pages) for r, total in zip(requests, totals))
        free = self.allocator.num_free_pages
        if max(totals, default=0) > MAX_SEQLEN:
            self.refused(lambda: self.allocator.reserve(requests, counts), ContractError)
            return
        if needed > free:
            self.refused(lambda: self.allocator.reserve(requests, counts), CacheFull)
            return
        self.end_step()
        for entry in self.allocator.reserve(requests, counts):
            self.table[entry.row, entry.column] = entry.page
        self.step, self.is_stored = {r.id: span for r, span in zip(requests, zip(before, totals))}, False
        assert [r.num_tokens for r in requests] == totals
        assert self.allocator.num_free_pages == free - needed
        for request, first in zip(requests, before):
            assert [self.table[request.row, column] for column in range(len(request.pages))] == request.pages
            written = request.pages[first // PAGE_SIZE : -(-request.num_tokens // PAGE_SIZE)]
            assert all(self.allocator._references[page] == 1 for page in written)

    @precondition(lambda self: self.step and not self.is_stored)
    @rule()
    def finish_step(self):
        self.allocator.finish_step()
        self.is_stored = True
        for number, (before, _) in self.step.items():
            if before % PAGE_SIZE == 0 and number not in self.holed:
                self.found[number] = self.findable(number)

    @rule()
    def rollback(self):
        self.allocator.rollback()
        for number, (before, _) in self.step.items():
            assert self.allocator[number].num_tokens == before
            assert len(self.allocator[number].pages) == -(-before // PAGE_SIZE)
            self.found[number] = min(self.found[number], before // PAGE_SIZE)
        self.step = {}

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def free(self, data):
        (number,) = self.pick(data, min_size=1, max_size=1)
        self.allocator.free(number)
        del self.prompts[number]
        self.step.pop(number, None)
        self.refused(lambda: self.allocator.free(number), ContractError)

    @invariant()
    def every_page_is_free_or_held_as_often_as_counted(self):
        held = Counter(page for n in self.prompts for page in self.allocator[n].pages)
        free = self.allocator._free_pages
        assert len(free) == self.allocator.num_free_pages == len(set(free))
        assert sorted([*free, *held]) == list(range(1, NUM_PAGES + 1))
        assert {page: n for page, n in enumerate(self.allocator._references) if n} == held
        assert SCRATCH_PAGE not in held

    @invariant()
    def shared_pages_are_the_same_place_of_the_same_prompt(self):
        first = {}
        for number, prompt in self.prompts.items():
            for column, page in enumerate(self.allocator[number].pages):
                start = prompt[: (column + 1) * PAGE_SIZE]
                assert first.setdefault(page, (column, start)) == (column, start)

    @invariant()
    def rows_are_distinct(self):
        rows = [self.allocator[n].row for n in self.prompts] + self.allocator._free_rows
        assert sorted(rows) == list(range(MAX_REQUESTS))

    def teardown(self):
        for number in list(self.prompts):
            self.allocator.free(number)
        assert self.allocator.num_free_pages == NUM_PAGES
        assert not self.allocator._prefixes.root.children
        assert not self.allocator._prefixes._node_of


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def stored(allocator, tokens):
    """A request whose prompt is all stored."""
    request = allocator.add(tokens)
    allocator.reserve([request], [len(tokens) - request.num_tokens])
    allocator.finish_step()
    return request


def test_a_prefix_outlives_the_request_that_was_found_first():
    """Two requests stored the same prompt apart: when one goes, the other's pages are found."""
    allocator = PageAllocator(8, 2, 4, 8)
    requests = [allocator.add([7, 8, 9, 9, 1]) for _ in range(2)]
    allocator.reserve(requests, [5, 5])
    allocator.finish_step()
    allocator.free(requests[0].id)
    assert allocator.add([7, 8, 9, 9, 2]).pages == requests[1].pages[:2]


def test_the_last_token_of_a_prompt_is_left_to_compute():
    allocator = PageAllocator(8, 2, 4, 8)
    stored(allocator, [1, 2, 3, 4])
    assert [allocator.add([1, 2, 3, 4][:n]).num_cached for n in (4, 3, 2)] == [2, 2, 0]


def test_what_was_added_or_reserved_but_not_stored_is_not_shared():
    allocator = PageAllocator(8, 2, 4, 8)
    request = allocator.add([1, 2, 3, 4, 5])
    assert allocator.add([1, 2, 3, 4, 5]).num_cached == 0
    allocator.reserve([request], [5])
    assert allocator.add([1, 2, 3, 4, 5]).num_cached == 0
    allocator.finish_step()
    assert allocator.add([1, 2, 3, 4, 5]).num_cached == 4


def test_a_page_that_a_step_only_filled_up_is_shared_from_the_next_one_on():
    """A rollback hands it back half full, and it is written again."""
    allocator = PageAllocator(8, 2, 4, 8)
    request = allocator.add([1, 2, 3, 4, 5])
    for count in (1, 3):
        allocator.reserve([request], [count])
        allocator.finish_step()
    assert allocator.add([1, 2, 3, 4, 5]).num_cached == 0
    allocator.reserve([], [])
    assert allocator.add([1, 2, 3, 4, 5]).num_cached == 4


def test_a_step_that_is_given_up_leaves_a_hole_behind_which_nothing_is_shared():
    """Bound, not stored, and bound again without a rollback."""
    allocator = PageAllocator(16, 2, 4, 16)
    request = allocator.add(range(1, 9))
    for is_stored in (True, False, True, True):
        allocator.reserve([request], [2])
        if is_stored:
            allocator.finish_step()
    assert allocator.add(range(1, 10)).num_cached == 2


@pytest.mark.parametrize("before", [0, 2, 3])
def test_a_prompt_that_was_rolled_back_is_shared_once_it_is_stored_again(before):
    """In its place among the prefixes, also where others hold some of it."""
    allocator = PageAllocator(16, 2, 4, 8)
    request = allocator.add([1, 2, 3, 4, 5, 6, 7])
    for count in (before, 7 - before):
        allocator.reserve([request], [count])
        allocator.finish_step()
    assert allocator.rollback()
    assert allocator.add([1, 2, 3, 4, 5, 6, 8]).num_cached == before // 2 * 2
    allocator.reserve([request], [7 - before])
    allocator.finish_step()
    allocator.reserve([], [])
    assert allocator.add([1, 2, 3, 4, 5, 6, 8]).pages == request.pages[:3]


def test_pages_that_a_rolled_back_step_shared_stay_with_those_who_share_them():
    allocator = PageAllocator(8, 2, 4, 8)
    first = stored(allocator, [1, 2, 3, 4, 5])
    second = allocator.add([1, 2, 3, 4, 5])
    assert allocator.rollback()
    assert (first.pages, first.num_tokens, len(second.pages), allocator.num_free_pages) == ([], 0, 2, 6)
    assert not allocator.rollback()
    allocator.reserve([first], [5])
    assert not set(first.pages) & set(second.pages)
    allocator.free(first.id)
    assert allocator.add([1, 2, 3, 4, 5]).pages == second.pages


def test_equal_pages_after_different_ones_are_not_shared():
    allocator = PageAllocator(16, 2, 4, 8)
    stored(allocator, [1, 2, 5, 6, 0])
    assert allocator.add([3, 4, 5, 6, 0]).num_cached == 0


def test_decoded_tokens_are_not_taken_for_a_prompt():
    """Their ids are not known to the cache."""
    allocator = PageAllocator(16, 2, 4, 8)
    allocator.reserve([stored(allocator, [1, 2, 3])], [3])
    allocator.finish_step()
    assert allocator.add([1, 2, 3, 4, 5, 6]).num_cached == 2


def test_runs_are_given_in_order_and_never_shared():
    allocator = PageAllocator(6, 4, 2, 10, owns_runs=True)
    first, second = stored(allocator, [1] * 9), stored(allocator, [1] * 9)
    assert (first.pages, second.pages) == ([1, 2, 3], [4, 5, 6])
    assert second.num_cached == 0
    assert allocator.num_free_pages == 0
    allocator.free(first.id)
    assert allocator.num_free_pages == 3
    assert allocator.add(None).pages == [1, 2, 3]


def test_full_names_what_is_needed_and_free():
    allocator = PageAllocator(3, 4, 2, 100)
    requests = [allocator.add(None), allocator.add(None)]
    with pytest.raises(CacheFull, match=r"^num_pages: needed 5 more, 3 of 3 free$") as caught:
        allocator.reserve(requests, [8, 9])
    assert (caught.value.needed, caught.value.free) == (5, 3)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(CacheFull, match=r"^max_requests: needed 1 more, 0 of 2 free$"):
        allocator.add(None)
