"""Which pages hold which prompt: a tree with one node for each page-long prefix. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Chunk = tuple[int, ...]


class PrefixNode:
    """A prefix of whole pages, and the pages that hold the last ``page_size`` tokens of it.

    A node is a prefix, not a page: requests that stored the same prompt apart are pages of one node, and the prefix
    stays known until the last of them goes.
    """

    __slots__ = ("children", "chunk", "pages", "parent")

    def __init__(self, parent: PrefixNode | None = None, chunk: Chunk = ()) -> None:
        self.parent, self.chunk = parent, chunk
        self.children: dict[Chunk, PrefixNode] = {}
        # A dict for its order: which page is shared does not depend on hashes.
        self.pages: dict[int, None] = {}


class PrefixTree:
    """Exact prefixes: nodes are found by the token ids themselves, so no two prompts are ever mixed up by a hash.

    Whoever holds a page of a node holds one of each node above it. So a node without pages has no children, and goes.
    """

    def __init__(self) -> None:
        self.root = PrefixNode()
        self._node_of: dict[int, PrefixNode] = {}

    def match(self, chunks: Sequence[Chunk]) -> Iterator[tuple[int, PrefixNode]]:
        """A page and its node for each of the leading `chunks` that is known."""
        node: PrefixNode | None = self.root
        for chunk in chunks:
            node = node.children.get(chunk)
            if node is None:
                return
            yield next(iter(node.pages)), node

    def insert(self, parent: PrefixNode, chunk: Chunk, page: int) -> PrefixNode:
        """Say that `page` holds `chunk` after the prefix `parent`; returns its node."""
        node = parent.children.get(chunk)
        if node is None:
            node = parent.children[chunk] = PrefixNode(parent, chunk)
        node.pages[page] = None
        self._node_of[page] = node
        return node

    def discard(self, page: int) -> None:
        """Forget `page`, if it is known."""
        node = self._node_of.pop(page, None)
        if node is None:
            return
        del node.pages[page]
        if not node.pages:
            del node.parent.children[node.chunk]
