"""fp32 arithmetic with the rounding written out.

The compiler may fuse a product and a sum into one FMA. Where a kernel promises the bits of an eager computation, that
would change the last one, so these operations are spelled as PTX with an explicit rounding mode, which is never fused.
"""

import math

import cutlass
from cutlass import Float32, cute

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -math.inf

# Below this numerator the residual of `div_rn` is not exact any more (2**-126 is the smallest normal number, the
# residual needs 24 bits below).
MIN_EXACT_NUMERATOR = 2.0**-100


def _op(ptx: str, *args) -> Float32:
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[Float32(a) for a in args])


def mul_rn(a, b) -> Float32:
    """Rounded product, never fused into an FMA."""
    return _op("mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def add_rn(a, b) -> Float32:
    """Rounded sum, never fused into an FMA."""
    return _op("add.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def fma_rn(a, b, c) -> Float32:
    """a * b + c, rounded once."""
    return _op("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def fma_rz(a, b, c) -> Float32:
    """a * b + c, rounded once and toward 0: a finite result never becomes infinite."""
    return _op("fma.rz.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def rcp_approx(a) -> Float32:
    """Reciprocal with an error of at most 1 ulp."""
    return _op("rcp.approx.ftz.f32 {$w0}, {$r0};", a)


def rcp_rn(a) -> Float32:
    """Correctly rounded reciprocal of a normal number with a normal reciprocal: one Newton step, without the range
    check of the general one."""
    r = rcp_approx(a)
    return fma_rn(r, fma_rn(-a, r, 1.0), r)


def div_by(a, neg_b, rcp_b) -> Float32:
    """Correctly rounded a / b given ``neg_b = -b`` and ``rcp_b = rcp_rn(b)``: a product and its exact residual
    (Markstein), three instructions instead of twelve. Needs ``a == 0`` or ``|a| >= MIN_EXACT_NUMERATOR``, and a normal
    quotient."""
    q = mul_rn(a, rcp_b)
    return fma_rn(fma_rn(q, neg_b, a), rcp_b, q)


def div_rn(a, b) -> Float32:
    """Correctly rounded a / b for all inputs."""
    return _op("div.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def exp_accurate(x) -> Float32:
    """The library exponential, error at most 2 ulp: the same bits as ``torch.exp`` on CUDA."""
    return cute.math.exp(Float32(x))


def exp_fast(x, log2_scale: float = 0.0) -> Float32:
    """``exp(x) * 2**log2_scale`` in two instructions. The product with log2(e) is rounded, so the relative error grows
    to ``|x| * 2**-24``; results below 2**-126 are flushed to 0."""
    return _op("ex2.approx.ftz.f32 {$w0}, {$r0};", fma_rn(x, LOG2_E, log2_scale))


def exp2_fast(x) -> Float32:
    """2**x in one instruction; results below 2**-126 are flushed to 0, exp2(-inf) is 0."""
    return _op("ex2.approx.ftz.f32 {$w0}, {$r0};", x)


# 2**25 + 1 rounds to 2**25, of which four have a product that is a normal number, as its reciprocal is.
MAX_EXPONENT = 25.0


def tanh_scaled(xs: list, scale) -> list[Float32]:
    """``tanh(x * scale / (2 * log2(e)))`` of four numbers, from an exponential each and one reciprocal: error at most
    2**-20, not relative to the result. A NaN among the four makes all of them NaN.

    ``tanh.approx`` would save the reciprocal, but is off by 2**-11 of its result: of a score of 30 that is 0.015, a
    weight wrong by 1.5 %, where bf16 rounds weights by 0.2 % and fp16 by 0.02 %. A reciprocal for each takes as long as
    the exponential: the unit that finds both had 1.5 times the products' time to do (H200, prefill d128).
    """
    a, b, c, d = (exp2_fast(min_or_nan(x * scale, MAX_EXPONENT)) + 1.0 for x in xs)
    ab, cd = a * b, c * d
    of_all = rcp_approx(ab * cd)
    of_ab, of_cd = of_all * cd, of_all * ab
    return [fma_rn(one, -2.0, 1.0) for one in (of_ab * b, of_ab * a, of_cd * d, of_cd * c)]


def min_or_nan(a, b) -> Float32:
    """The smaller of two numbers, NaN if either is."""
    return _op("min.NaN.f32 {$w0}, {$r0}, {$r1};", a, b)


def sum_rn(terms) -> Float32:
    """Sum from left to right, every step rounded."""
    total = terms[0]
    for term in terms[1:]:
        total = add_rn(total, term)
    return total


def dot(left, right) -> Float32:
    """Sum of products from left to right, one rounding a step."""
    total = left[0] * right[0]
    for a, b in zip(left[1:], right[1:]):
        total = fma_rn(a, b, total)
    return total


def max_of(terms) -> Float32:
    """Largest term; a NaN is ignored (the exponential that follows brings it back)."""
    largest = terms[0]
    for term in terms[1:]:
        largest = cute.arch.fmax(largest, term)
    return largest


def fast_divisor(number):
    """A divisor whose reciprocal the host finds; of 0, with which nothing is launched, as of 1."""
    return cute.fast_divmod_create_divisor_v2(cutlass.max(number, 1))


def select(cond, a, b):
    """``a`` where ``cond``, else ``b``, without a branch."""
    return cutlass.select_(cond, a, b)


def where(valid, value, otherwise: float):
    """`value` where `valid`, else the constant; `valid` None means always."""
    return value if valid is None else Float32(select(valid, value, Float32(otherwise)))
