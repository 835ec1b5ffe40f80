"""The forward kernel of sm_90a: prefill with warpgroup matrix instructions and bulk copies."""
