"""Which keys a query sees by its position, and which queries see a key: causality and windows, both ways."""

import cutlass
from cutlass import Int32

from cuteforge.device.traced import TraceConstant
from cuteforge.families.attention.problem import Problem


class Band(TraceConstant):
    """The band of scores of one request that causality and window leave.

    The last query stands at the last key: query token i of L is at position ``p = i + (S - L)`` of S keys, a negative
    one before the first. It sees the keys from ``p - left`` to ``p + right``; none after its own where the problem is
    causal.

    Args:
        left, right: numbers of the launch, None where the problem has no such limit. Any number up to 2**31 - 1: no sum
            of two of them is formed.
        tokens, keys: query tokens L and keys S of the request.
    """

    def __init__(self, problem: Problem, left, right, tokens, keys):
        self.problem, self.left, self.right, self.tokens, self.keys = problem, left, right, tokens, keys

    def keys_begin(self, token):
        """The first key that a query token sees."""
        if self.left is None:
            return Int32(0)
        return cutlass.max(token + (self.keys - self.tokens), self.left) - self.left

    def keys_end(self, token):
        """The end of the keys that a query token sees; at most 0 if it stands before the first one."""
        if self.problem.has_right:
            tokens_after = self.tokens - 1 - token
            return self.keys - cutlass.max(tokens_after - self.right, 0)
        if not self.problem.causal:
            return self.keys
        return cutlass.min(token + (self.keys - self.tokens) + 1, self.keys)

    def tokens_begin(self, key):
        """The first query token that sees a key."""
        if not (self.problem.causal or self.problem.has_right):
            return Int32(0)
        right = Int32(0) if self.right is None else self.right
        return cutlass.max(key - (self.keys - self.tokens), right) - right

    def tokens_end(self, key):
        """The end of the query tokens that see a key; at most 0 if all stand too far after it."""
        if self.left is None:
            return self.tokens
        keys_after = self.keys - 1 - key
        return self.tokens - cutlass.max(keys_after - self.left, 0)
