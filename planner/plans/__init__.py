"""A plan as plain data, how it is made from a solution, and its file. Without torch."""
