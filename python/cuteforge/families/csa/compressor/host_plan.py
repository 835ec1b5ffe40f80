"""How a launch is cut, for `explain`: the host's own function on a number of rows.

A function of the host, compiled and kept as those of kernels are. It launches nothing and needs no GPU.
"""

from cutlass import Int32, Int64, cute

from cuteforge.families.csa.compressor.config import Traits
from cuteforge.families.csa.compressor.row_workers import row_plan
from cuteforge.runtime.build import Build
from cuteforge.runtime.host_results import store_results


def build(traits: Traits) -> Build:
    """A function of rows, CTAs that fill the GPU, and an address for the two numbers of `row_plan`."""

    @cute.jit
    def plan(num_rows: Int32, max_ctas: Int32, address: Int64):
        store_results(row_plan(traits, num_rows, max_ctas), address)

    return Build(plan, (Int32(0), Int32(0), Int64(0)), "host_plan")
