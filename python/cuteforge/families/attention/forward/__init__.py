"""The portable forward kernel: decode and prefill on compute capability 8.0 and up."""
