"""CSA / HCA compressor: gated softmax pooling of a packed token stream, forward and backward."""

from cuteforge.families.csa.compressor import torch_ops as _torch_ops  # noqa: F401  # registers the ops
from cuteforge.families.csa.compressor.api import CSACompressorBackward, CSACompressorForward
from cuteforge.families.csa.compressor.wrapper import csa_compressor_backward_wrapper, csa_compressor_forward_wrapper

__all__ = [
    "CSACompressorBackward",
    "CSACompressorForward",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
]
