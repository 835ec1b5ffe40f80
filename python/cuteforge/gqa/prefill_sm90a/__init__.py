"""Prefill with the matrix instructions and the bulk copies of sm_90a."""
