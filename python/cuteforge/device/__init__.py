"""Building blocks traced into kernels. Imports cutlass; never torch, never a kernel family."""
