"""What a call of attention is, as far as kernels are compiled for it. Pure Python: no torch, no cutlass."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 256
ALWAYS = ("q", "k", "v", "out")  # operands of every op


@dataclass(frozen=True)
class Problem:
    """Facts of a call that fix what a kernel reads and writes.

    Attributes:
        queries: ``"batch"`` (B, L, Hq, D), ``"single"`` (B, Hq, D), ``"packed"`` (T, Hq, D) with offsets.
        keys: ``"batch"`` (B, S, Hkv, D), ``"packed"`` (T, Hkv, D) with offsets, ``"pages"`` (P, ps, Hkv, D),
            ``"tokens"`` (P, Hkv, D), pages of one token.
        given: the operands of `operands.ROWS` that the op has though it could do without, in the order of the rows.
        mask_rank: dims of the mask, 0 without one.
        bias_dtype: of the bias, "" without one.
        has_left, has_right: a query sees no more than so many keys before, and after, its own position; how many the
            launch says. No key after it is `causal`.
        has_softcap: scores are capped.
    """

    dtype: str
    head_dim: int
    v_dim: int
    queries: str
    keys: str
    given: tuple[str, ...] = ()
    mask_rank: int = 0
    bias_dtype: str = ""
    causal: bool = False
    has_left: bool = False
    has_right: bool = False
    has_softcap: bool = False

    def takes(self, name: str) -> bool:
        """Whether the op has an operand."""
        implied = {"page_table": self.is_paged, "cu_seqlens_q": self.packs_queries, "cu_seqlens_k": self.packs_keys}
        return name in ALWAYS or implied.get(name, name in self.given)

    @property
    def packs_queries(self) -> bool:
        """Whether the queries of all requests lie one after another, cut by offsets."""
        return self.queries == "packed"

    @property
    def packs_keys(self) -> bool:
        """Whether the keys of all requests lie one after another, cut by offsets."""
        return self.keys == "packed"

    @property
    def is_paged(self) -> bool:
        """Whether a page table says where keys are."""
        return self.keys in ("pages", "tokens")

    @property
    def has_page_size(self) -> bool:
        """Whether pages have a size that the launch says, instead of one token."""
        return self.keys == "pages"

    @property
    def has_lengths(self) -> bool:
        """Whether an operand says how many keys each request has."""
        return self.takes("seqlens_k") or self.takes("kv_indptr")

    @property
    def appends(self) -> bool:
        """Whether the last key and value of a request come from tensors of their own and are stored in the pool."""
        return self.takes("new_k")

    @property
    def has_sinks(self) -> bool:
        """Whether each query head has a term of its own in the denominators."""
        return self.takes("sinks")

    @property
    def has_bias(self) -> bool:
        """Whether numbers of the caller's are added to the scores."""
        return self.takes("bias")

    @property
    def has_lse(self) -> bool:
        """Whether log-sum-exps are wanted."""
        return self.takes("lse")

    @property
    def has_options(self) -> bool:
        """Whether scores or sums take registers beyond those of plain attention."""
        return self.has_left or self.has_right or self.has_softcap or self.has_sinks

    @property
    def widest(self) -> int:
        """The larger of the head dims."""
        return max(self.head_dim, self.v_dim)
