"""Joint graph in, joint graph out: slices, tensor parallelism, sums in place, rounding."""
