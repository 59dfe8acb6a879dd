"""Joint graph in, joint graph out: chunks, tensor parallelism, sums in place, rounding."""
