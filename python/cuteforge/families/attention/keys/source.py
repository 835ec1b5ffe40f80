"""Where keys and values come from: strided tensors, packed sequences, or pages.

A source gives the byte addresses of a token's key and value. A strided one computes them in any lane; a paged one looks
a page number up, which takes a memory latency. So lanes share the work, a row of a tile each, pass addresses on by
shuffle, and `look_up` a tile before they ask for `addresses`: only those wait for what is read.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cuteforge.device.copy import gmem_run, row_address
from cuteforge.device.row_lanes import NOWHERE
from cuteforge.device.swizzled_rows import CHUNK_BYTES
from cuteforge.device.traced import TraceConstant

NO_PAGE = -1
NEW_TOKEN = -1  # instead of a token of a page: the one that is appended


class PageToken(NamedTuple):
    """Where a token is in a pool: its page, and its number within the page."""

    page: Any
    token: Any


class Pool(NamedTuple):
    """The keys, or the values, of one head in all pages: the address of the first, and byte strides."""

    base: Any
    page_stride: Any
    token_stride: Any

    def address(self, found: PageToken):
        return self.base + Int64(found.page) * self.page_stride + Int64(found.token) * self.token_stride


class StridedKV(TraceConstant):
    """One head of one request, its tokens a constant stride apart."""

    has_lookup = False

    def __init__(self, k_base, v_base, k_stride, v_stride):
        self.k_base, self.v_base, self.k_stride, self.v_stride = k_base, v_base, k_stride, v_stride

    @classmethod
    def of_batch(cls, mK: cute.Tensor, mV: cute.Tensor, batch, head):
        """(B, S, Hkv, D) tensors."""
        bases = (row_address(m, (batch, 0, head)) for m in (mK, mV))
        return cls(*bases, _byte_stride(mK, 1), _byte_stride(mV, 1))

    @classmethod
    def of_packed(cls, mK: cute.Tensor, mV: cute.Tensor, first_token, head):
        """(T, Hkv, D) tensors, from the token where the request starts."""
        bases = (row_address(m, (first_token, head)) for m in (mK, mV))
        return cls(*bases, _byte_stride(mK, 0), _byte_stride(mV, 0))

    def addresses(self, token):
        """Byte addresses of the key and the value of a token."""
        return self.k_base + Int64(token) * self.k_stride, self.v_base + Int64(token) * self.v_stride


class PagedKV(TraceConstant):
    """One head of one request, its tokens in pages of a pool.

    Args:
        mK, mV: (P, ps, Hkv, D), or (P, Hkv, D) for pages of one token.
        mTable: (R, C) page numbers; `row` is the request's.
        page_divisor: divisor by the tokens of a page, None for one: every token is looked up, and a division takes as
            long as the look-up.
        new: addresses of a key and a value that stand for token `new_token`, or None.
    """

    has_lookup = True

    def __init__(
        self, mK: cute.Tensor, mV: cute.Tensor, mTable: cute.Tensor, row, head, page_divisor, new=None, new_token=None
    ):
        self.mTable, self.row, self.page_divisor = mTable, row, page_divisor
        self.num_pages = mK.shape[0]
        self.row_chunks = [m.shape[len(m.shape) - 1] * _element_bytes(m) // CHUNK_BYTES for m in (mK, mV)]
        is_flat = page_divisor is None
        first = (0, head) if is_flat else (0, 0, head)
        self.pools = [
            Pool(row_address(m, first), _byte_stride(m, 0), Int64(0) if is_flat else _byte_stride(m, 1))
            for m in (mK, mV)
        ]
        self.new, self.new_token = new, new_token

    @cute.jit
    def look_up(self, token: Int32, end: Int32):
        """Where a token is, for `addresses`; in NO_PAGE if it is not before `end`."""
        page, page_token = self._find(token, end)
        if cutlass.const_expr(self.new is not None):
            if token == self.new_token and token < end:
                page_token = Int32(NEW_TOKEN)
        return PageToken(page, page_token)

    @cute.jit
    def _find(self, token: Int32, end: Int32):
        page, page_token = Int32(NO_PAGE), Int32(0)
        if token < end and token >= 0:
            index = token
            if cutlass.const_expr(self.page_divisor is not None):
                index, page_token = divmod(token, self.page_divisor)
            page = self.mTable[self.row, index]
        return PageToken(page, page_token)

    def has_page(self, page):
        """Whether a page is in the pool."""
        return (page >= 0) & (page < self.num_pages)

    @cute.jit
    def addresses(self, found: PageToken):
        """Byte addresses of the key and the value of a token that was looked up; NOWHERE for both if its page is not in
        the pool."""
        k_address, v_address = self._in_pool(found)
        if cutlass.const_expr(self.new is not None):
            if found.token == NEW_TOKEN:
                k_address, v_address = self.new
        return k_address, v_address

    @cute.jit
    def _in_pool(self, found: PageToken):
        k_address, v_address = Int64(NOWHERE), Int64(NOWHERE)
        if self.has_page(found.page):
            k_address, v_address = (pool.address(found) for pool in self.pools)
        return k_address, v_address

    @cute.jit
    def append(self, lane: Int32):
        """Store the new key and value in the pool, by one warp; nowhere if the page is not in the pool."""
        token = self.new_token
        for address, new, chunks in zip(self._in_pool(self._find(token, token + 1)), self.new, self.row_chunks):
            chunk = Int64(lane * CHUNK_BYTES)
            if token >= 0 and address != Int64(NOWHERE) and lane < chunks:
                words = CHUNK_BYTES // 4
                gmem_run(Uint32, address + chunk, words).store(gmem_run(Uint32, new + chunk, words).load())


def _byte_stride(m: cute.Tensor, mode: int):
    return Int64(m.stride[mode]) * _element_bytes(m)


def _element_bytes(m: cute.Tensor) -> int:
    return m.element_type.width // 8
