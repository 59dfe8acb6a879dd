"""What solvers are made of: the incumbent, bounds, the step-cut programme, local searches, the cache. Without torch."""
