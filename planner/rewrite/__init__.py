"""Write planned graphs: forward and backward in the order of a schedule."""
