"""How often offload finds the best of all plans: ``python -m tests.compare_offload 300`` tries 300 random graphs."""

from __future__ import annotations

import sys

from planner import solvers
from planner.errors import InfeasibleBudgetError
from tests.offload_oracle import cheapest_offloading
from tests.runtimes.test_offload import posed_by


def main(count: int) -> int:
    """Print the seeds whose plan is not the best, or whose bound is above it, and how many were tried."""
    tried = wrong = 0
    for seed in range(count):
        problem = posed_by(seed)
        if problem.baseline.peak_bytes <= problem.budget_bytes or (best := cheapest_offloading(problem)) is None:
            continue
        tried += 1
        try:
            found = solvers.solve(problem, time_limit_seconds=3, deterministic=True)
            added, bound = found.added_seconds, found.lower_bound_seconds
        except InfeasibleBudgetError:
            added, bound = float("inf"), 0.0
        if abs(added - best) > 1e-9 or bound > best + 1e-9:
            wrong += 1
            print(f"seed {seed}: the best is {best}, found {added}, bound {bound}")
    print(f"{tried - wrong} of {tried} plans are the best there is")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
