"""Who owns which page: requests, their table rows, reference counts, shared prefixes. Pure Python, no device.

Every call either does all of what it says or raises and changes nothing.

A step is one `reserve` and the stores that follow it. The allocator knows one step at a time: `finish_step` says that
it is stored, `rollback` undoes it, and the next `reserve` ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cuteforge.arguments import integer, integers
from cuteforge.errors import ContractError
from cuteforge.serving.prefix_tree import Chunk, PrefixNode, PrefixTree

# Page 0 takes what the padding rows of a batch store; no request owns it.
SCRATCH_PAGE = 0


class CacheFull(RuntimeError):
    """A cache has too few pages, or too few rows of the page table, for a call. Nothing was changed.

    Args:
        limit: the argument of the cache that decides, ``num_pages`` or ``max_requests``.
        total: its value.
        needed, free: how many more the call needs, and how many there are.

    Examples:
        >>> import torch
        >>> from cuteforge import CacheFull, KVCache
        >>> cache = KVCache(1, 2, 64, num_pages=1, page_size=16, max_seqlen=64, dtype=torch.float32, device="cpu")
        >>> try:
        ...     cache.bind_prefill([cache.add()], [20])
        ... except CacheFull as error:
        ...     print(error)
        num_pages: needed 2 more, 1 of 1 free
    """

    limit: str
    total: int
    needed: int
    free: int

    def __init__(self, limit: str, total: int, needed: int, free: int) -> None:
        self.limit, self.total, self.needed, self.free = limit, total, needed, free
        super().__init__(f"{limit}: needed {needed} more, {free} of {total} free")

    def __reduce__(self) -> tuple[type[CacheFull], tuple[str, int, int, int]]:
        return type(self), (self.limit, self.total, self.needed, self.free)


class TableEntry(NamedTuple):
    """An entry of the page table that a request got."""

    row: int
    column: int
    page: int


@dataclass(eq=False)
class Request:
    """One sequence: where it is and how long.

    Attributes:
        row: of the page table.
        pages: in order of position; the first ones may be shared.
        num_tokens: positions stored, and those that the step brings.
        num_cached: positions that were there when it was added.
    """

    id: int
    row: int
    pages: list[int]
    num_tokens: int
    num_cached: int
    # The whole pages of its prompt; how many of them others can find, and the node of the last of those.
    chunks: list[Chunk] = field(repr=False)
    node: PrefixNode = field(repr=False)
    num_published: int = 0
    # How many entries of `pages` the table has.
    num_listed: int = 0


class PageAllocator:
    """Pages 1 to `num_pages` and rows 0 to ``max_requests - 1``, lent to requests.

    Args:
        num_pages, page_size: the pool, without the scratch page.
        max_requests: rows of the page table.
        max_seqlen: positions that a request may have.
        owns_runs: row r owns the r-th run of ``ceil(max_seqlen / page_size)`` pages, from `add` on, and nothing is
            shared.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_requests: int, max_seqlen: int, *, owns_runs: bool = False
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.max_requests, self.max_seqlen = max_requests, max_seqlen
        self.max_columns = -(-max_seqlen // page_size)
        self._owns_runs = owns_runs
        # Taken from the end: lowest first.
        self._free_pages = list(range(num_pages, SCRATCH_PAGE, -1))
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._references = [0] * (num_pages + 1)
        self._requests: dict[int, Request] = {}
        self._prefixes = PrefixTree()
        self._next_id = 0
        # The step: its requests and how many tokens it brings to each.
        self._step: tuple[Sequence[Request], Sequence[int]] = ((), ())
        # Requests of the step with prompt pages that others cannot find yet, and their numbers of tokens before it.
        self._unpublished: dict[Request, int] = {}
        self.is_stored = True
        # The step can no longer be undone.
        self.is_final = True

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds; with runs, those of the rows that are free."""
        return len(self._free_rows) * self.max_columns if self._owns_runs else len(self._free_pages)

    def __getitem__(self, request: int) -> Request:
        try:
            return self._requests[integer("request", request)]
        except (KeyError, ContractError):
            wanted = "wanted one that was added and not freed"
            raise ContractError(f"request: {wanted}, got {request!r:.80}") from None

    def add(self, tokens: Sequence[int] | None) -> Request:
        """A new request. Pages of another one that hold exactly the start of `tokens` are shared.

        The last token is never taken as stored, so that a model has one to compute.
        """
        prompt = () if tokens is None else tuple(integers("tokens", tokens))
        if len(prompt) > self.max_seqlen:
            raise ContractError(f"tokens: wanted at most max_seqlen = {self.max_seqlen} tokens, got {len(prompt)}")
        if not self._free_rows:
            raise CacheFull("max_requests", self.max_requests, 1, 0)
        row, size = self._free_rows.pop(), self.page_size
        request = Request(self._next_id, row, [], 0, 0, [], self._prefixes.root)
        self._next_id += 1
        if self._owns_runs:
            first = SCRATCH_PAGE + 1 + row * self.max_columns
            request.pages = list(range(first, first + self.max_columns))
        else:
            request.chunks = [prompt[i : i + size] for i in range(0, len(prompt) - size + 1, size)]
            self._share(request, request.chunks[: max(len(prompt) - 1, 0) // size])
        self._requests[request.id] = request
        return request

    def free(self, request: int) -> None:
        """Take back the row, and the pages that nobody else holds."""
        gone = self[request]
        del self._requests[gone.id]
        self._unpublished.pop(gone, None)
        self._free_rows.append(gone.row)
        if self._owns_runs:
            return
        self._release(gone.pages)

    def reserve(self, requests: Sequence[Request], counts: Sequence[int]) -> list[TableEntry]:
        """Begin a step: pages for ``counts[i]`` more tokens of ``requests[i]``. The last step can no longer be undone.

        Returns:
            What the page table does not have yet.

        Raises:
            ContractError: a request would be longer than max_seqlen.
            CacheFull: too few pages are free.
        """
        self.check_room(requests, counts)
        self._end_step()
        self._step, self.is_stored, self.is_final = (requests, counts), False, False
        entries = []
        # Inlined tests, as 256 requests pass here at every step: 0.3 us each where a step starts no page.
        for request, count in zip(requests, counts):
            request.num_tokens += count
            if request.num_tokens > len(request.pages) * self.page_size:
                self._grow(request)
            if request.num_published < len(request.chunks) and count:
                self._unpublished[request] = request.num_tokens - count
            if request.num_listed < len(request.pages):
                entries += _list_new(request)
        return entries

    def finish_step(self) -> None:
        """Say that every layer has stored the tokens of the step: other requests may now share their pages.

        A page that an earlier step began is shared from the next step on: a rollback would leave it half full, to be
        written again.
        """
        self.is_stored = True
        for request, num_before in self._unpublished.items():
            if num_before % self.page_size == 0:
                self._publish(request)

    def rollback(self) -> bool:
        """Put the requests of the step back to their tokens and pages before it. False if there is nothing to undo."""
        if self.is_final:
            return False
        for request, count in zip(*self._step):
            if request.id in self._requests:
                self._shorten(request, request.num_tokens - count)
        self._step, self._unpublished, self.is_final = ((), ()), {}, True
        return True

    def _end_step(self) -> None:
        for request in self._unpublished:
            if self.is_stored:
                self._publish(request)
            else:
                # The pages have a gap here, so what follows in the prompt is never shared.
                del request.chunks[request.num_published :]
        self._unpublished = {}

    def _shorten(self, request: Request, num_tokens: int) -> None:
        """Take back the pages of `request` past its first `num_tokens`. Must not cut a page that others can find."""
        request.num_tokens = num_tokens
        # Nobody knows how far the table was written: all of it is written again.
        request.num_listed = 0
        if self._owns_runs:
            return
        while request.num_published > num_tokens // self.page_size:
            request.node = request.node.parent
            request.num_published -= 1
        kept = -(-num_tokens // self.page_size)
        self._release(request.pages[kept:])
        del request.pages[kept:]

    def _release(self, pages: list[int]) -> None:
        """Drop a request's hold on `pages`, its last ones; a page that nobody holds becomes free."""
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                self._prefixes.discard(page)
                self._free_pages.append(page)

    def check_room(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Refuse what `reserve` would refuse."""
        needed, size = 0, self.page_size
        for request, count in zip(requests, counts):
            total, num_pages = request.num_tokens + count, len(request.pages)
            if total > self.max_seqlen:
                wanted = f"at most max_seqlen = {self.max_seqlen} tokens in request {request.id}"
                raise ContractError(f"requests: wanted {wanted}, got {request.num_tokens} + {count}")
            if total > num_pages * size:
                needed += -(-total // size) - num_pages
        if needed > len(self._free_pages):
            raise CacheFull("num_pages", self.num_pages, needed, len(self._free_pages))

    def _grow(self, request: Request) -> None:
        """Pages for all tokens of `request`."""
        for _ in range(-(-request.num_tokens // self.page_size) - len(request.pages)):
            page = self._free_pages.pop()
            self._references[page] = 1
            request.pages.append(page)

    def _share(self, request: Request, chunks: list[Chunk]) -> None:
        for page, node in self._prefixes.match(chunks):
            self._references[page] += 1
            request.pages.append(page)
            request.node = node
        request.num_published = len(request.pages)
        request.num_tokens = request.num_cached = len(request.pages) * self.page_size

    def _publish(self, request: Request) -> None:
        """Let others find the pages that hold whole chunks of the prompt."""
        full = min(request.num_tokens // self.page_size, len(request.chunks))
        for i in range(request.num_published, full):
            request.node = self._prefixes.insert(request.node, request.chunks[i], request.pages[i])
            request.num_published = i + 1


def _list_new(request: Request) -> list[TableEntry]:
    """Entries of the table for the pages that it does not have."""
    first, request.num_listed = request.num_listed, len(request.pages)
    return [TableEntry(request.row, column, page) for column, page in enumerate(request.pages[first:], first)]
