"""What the compiler makes of the arithmetic of `cuteforge.device.math`: what is rounded step by step is not fused.
Needs no GPU."""

import pytest

from helpers import device_kernel, sass

ARCH = "sm_90a"


def compiled(name):
    (code,) = sass.compile_binary(device_kernel.build(device_kernel.FunctionTraits((name,))), ARCH).kernels.values()
    return code


@pytest.mark.parametrize(("name", "wanted"), [("unfused", (0, 1, 1)), ("left to the compiler", (1, 0, 0))])
def test_a_product_and_a_sum_are_fused_only_where_the_compiler_may(name, wanted):
    """The second row shows that the first one could fail."""
    code = compiled(name)
    assert tuple(map(code.count, (r"FFMA\b", r"FMUL\b", r"FADD\b"))) == wanted, code.opcodes
