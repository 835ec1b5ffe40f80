"""Operands without memory, from which the compiled entries learn what to check: fixed extents, tied extents, alignment."""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from cuteforge.device.dtypes import DTYPES
from cuteforge.families.attention.problem import Problem

ALIGN_BYTES = 16
ALIGN_ELEMS = 8


class FakeOperands:
    """Makes the fake tensors of one op; equal symbols are one object, so that the entry compares them."""

    def __init__(self, problem: Problem):
        self.problem, self.dtype = problem, DTYPES[problem.dtype]
        names = ("B", "L", "T", "S", "Tk", "P", "ps", "R", "C", "Hq", "Hkv", "mb", "mh", "ml", "ms", "offsets")
        self.n = {name: cute.sym_int() for name in names}

    def heads(self, *shape):
        """A tensor of 16-bit rows; names are symbols."""
        strides = tuple(cute.sym_int64(divisibility=ALIGN_ELEMS) for _ in shape[:-1])
        return make_fake_tensor(self.dtype, self._extents(shape), (*strides, 1), assumed_align=ALIGN_BYTES)

    def queries(self, dim: int):
        tokens = {"batch": ("B", "L"), "single": ("B",), "packed": ("T",)}[self.problem.queries]
        return self.heads(*tokens, "Hq", dim)

    def keys(self, dim: int):
        tokens = {"batch": ("B", "S"), "packed": ("Tk",), "pages": ("P", "ps"), "tokens": ("P",)}[self.problem.keys]
        return self.heads(*tokens, "Hkv", dim)

    def lse(self):
        shape = ("Hq", "T") if self.problem.queries == "packed" else ("B", "Hq", "L")
        return self._strided(cutlass.Float32, shape) if self.problem.has_lse else None

    def sinks(self):
        return self._strided(cutlass.Float32, ("Hq",)) if self.problem.has_sinks else None

    def mask(self):
        shape = {0: None, 2: ("mb", "ms"), 3: ("mb", "ml", "ms"), 4: ("mb", "mh", "ml", "ms")}[self.problem.mask_rank]
        return None if shape is None else self._strided(cutlass.Uint8, shape)

    def offsets(self, wanted: bool, name: str = "offsets"):
        if not wanted:
            return None
        return make_fake_tensor(cutlass.Int32, self._extents((name,)), (1,), assumed_align=4)

    def table(self):
        return self._strided(cutlass.Int32, ("R", "C")) if self.problem.is_paged else None

    def workspace(self, wanted: bool):
        if not wanted:
            return None
        return make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=ALIGN_BYTES)

    def _strided(self, dtype, shape):
        strides = tuple(cute.sym_int64() for _ in shape[:-1])
        return make_fake_tensor(dtype, self._extents(shape), (*strides, 1), assumed_align=dtype.width // 8)

    def _extents(self, shape):
        return tuple(self.n[x] if isinstance(x, str) else x for x in shape)


def operands(problem: Problem, has_workspace: bool) -> tuple:
    """All operands of an entry in its order, None for those that the op does not have."""
    fake = FakeOperands(problem)
    q, out = fake.queries(problem.head_dim), fake.queries(problem.v_dim)
    new = [fake.heads("B", "Hkv", dim) if problem.appends else None for dim in (problem.head_dim, problem.v_dim)]
    return (
        q,
        fake.keys(problem.head_dim),
        fake.keys(problem.v_dim),
        out,
        fake.lse(),
        fake.mask(),
        fake.offsets(problem.lengths is not None, "offsets" if problem.lengths == "indptr" else "B"),
        fake.offsets(problem.queries == "packed"),
        fake.offsets(problem.keys == "packed"),
        fake.table(),
        fake.offsets(problem.has_rows, "B"),
        *new,
        fake.sinks(),
        fake.workspace(has_workspace),
    )


def scalars(problem: Problem) -> tuple:
    """The scalars that follow the operands, None for those that the op does not have."""
    limits = [Int32(0) if wanted else None for wanted in (problem.has_left, problem.has_right)]
    return Int32(0), Int32(0), *limits, Float32(0.0) if problem.has_softcap else None, Float32(0.0)
