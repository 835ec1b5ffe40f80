"""Whether tensors share memory, told from their addresses, shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence


def are_disjoint(a: list[tuple[int, int]], b: list[tuple[int, int]], offset: int) -> bool:
    """Whether two nests of strided dims, `b` starting `offset` bytes after `a`, share no byte. False where that is not
    easily seen."""
    span_a, span_b = (1 + sum(stride * (extent - 1) for stride, extent in dims) for dims in (a, b))
    if offset >= span_a or -offset >= span_b:
        return True
    pitch = a[0][0]
    if len(a) == 1 or len(b) == 1 or b[0][0] != pitch:
        return False
    inner_a, inner_b = a[1:], b[1:]
    if any(sum(stride * (extent - 1) for stride, extent in dims) >= pitch for dims in (inner_a, inner_b)):
        return False
    # One pitch: what stands within it decides, seen from the row before and from the row after.
    return all(are_disjoint(inner_a, inner_b, start) for start in (offset % pitch, offset % pitch - pitch))


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two index tuples may name one address: some stride does not step over all that smaller ones reach."""
    reach = 0
    # Innermost first is ascending for nearly every tensor; sorting only the others saves 1 us a launch into a slice.
    for step, extent in zip(reversed(stride), reversed(shape)):
        if extent > 1:
            if step <= reach:
                return _overlaps_sorted(shape, stride)
            reach += (extent - 1) * step
    return False


def _overlaps_sorted(shape: Sequence[int], stride: Sequence[int]) -> bool:
    reach = 0
    for step, extent in outer_dims(shape, stride):
        if step <= reach:
            return 0 not in shape
        reach += (extent - 1) * step
    return False


def outer_dims(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    return sorted((s, n) for n, s in zip(shape, stride) if n > 1)
