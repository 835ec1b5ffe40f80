"""What the attention kernels have in common between the products: masks, scores, softmax, results."""
