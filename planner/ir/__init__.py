"""The training step as plain data, and its only judge: graph, schedule, simulator, problem. Without torch."""
