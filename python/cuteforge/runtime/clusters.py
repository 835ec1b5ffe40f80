"""How many SMs clusters of eight CTAs reach at once.

The CTAs of a cluster run inside one group of SMs. A group may have SMs to spare, and how many groups there are and how
large differs from one GPU to the next of the same kind: of the 132 SMs of an H200, 15 clusters of eight reach 120. One
more of them waits until another has ended, which doubled the time of decodes with 16.
"""

from __future__ import annotations

from typing import Any

from cuteforge.runtime.streams import is_capturing

CLUSTER = 8
# A kernel that does nothing, for the driver's own assembler: what limits it is the shared memory that is asked for.
_PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry nothing() { ret; }
"""


def reach(num_sms: int) -> int:
    """An estimate for a GPU that is not here, or cannot be asked."""
    return num_sms * 10 // 11 // CLUSTER * CLUSTER


def reach_of(device_index: int, num_sms: int, smem_bytes: int) -> int:
    """SMs of a GPU of compute capability 9.0 or more, as its driver says.

    Args:
        smem_bytes: the most that a CTA can have, so that an SM holds one.
    """
    import torch
    from cuda.bindings import driver

    if is_capturing():
        return reach(num_sms)  # a capture takes no loading of modules
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # there is a context now
        status, module = driver.cuModuleLoadData(_PTX)
        if status != driver.CUresult.CUDA_SUCCESS:
            return reach(num_sms)  # a driver without its assembler
        try:
            return _ask(driver, module, smem_bytes) or reach(num_sms)
        finally:
            driver.cuModuleUnload(module)


def _ask(driver: Any, module: Any, smem_bytes: int) -> int:
    """0 if the driver does not say."""
    _, kernel = driver.cuModuleGetFunction(module, b"nothing")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuFuncSetAttribute(kernel, attribute, smem_bytes)
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = CLUSTER, 1, 1
    size = driver.CUlaunchAttribute()
    size.id, size.value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = CLUSTER, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
    launch.sharedMemBytes, launch.attrs, launch.numAttrs = smem_bytes, [size], 1
    status, clusters = driver.cuOccupancyMaxActiveClusters(kernel, launch)
    return CLUSTER * clusters if status == driver.CUresult.CUDA_SUCCESS else 0
