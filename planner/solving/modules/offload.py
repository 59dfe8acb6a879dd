"""Modules that send what they save to the host: the variants, which to take, and when transfers get time to hide.

A module that is not checkpointed may send what it saves; a checkpointed one what its checkpoint is given, whatever it
keeps beside that. Which modules do comes from the programme of :mod:`planner.solving.modules.ilp`, in which a value is
away as long as it can be. It is asked more than once: for the bound with transfers that cost nothing but what cannot
hide, then with prices for them and with some of the budget left free, since how much hides depends on what lies
around and on room for values under way. :mod:`planner.solving.modules.transfer_windows` gives transfers their time.
Only the simulator says what is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from planner.common.limits import Clock
from planner.errors import HostBudgetError, InfeasibleBudgetError
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.simulator import Evaluation
from planner.solving.modules.ilp import NAME, Chooser
from planner.solving.modules.transfer_windows import widened
from planner.solving.modules.variants import cheapest, variants_of

_LEAST_PRICE = 1e-3
"""What of all transfers counts as waiting: no more than lets fewer transfers be better than more."""

_TRIALS = (
    (_LEAST_PRICE, 0.0, 1.0),
    (_LEAST_PRICE, 0.0, 0.5),
    (_LEAST_PRICE, 0.05, 1.0),
    (_LEAST_PRICE, 0.0, 0.25),
    (0.02, 0.1, 1.0),
    (0.3, 0.0, 1.0),
)
"""Prices of transfers, what is left free of the budget, as a share of it, and what is sent at most, as a share of what
the first sends: that one gives the bound, and sends all that could hide if nothing had to be there at a certain time.
"""

_NEAR = 1e-3
"""How near to the bound is near enough, as a share of the step."""

_WITHOUT_SHARE, _COARSE_SHARE, _FINE_SHARE = 0.3, 0.1, 0.5
"""Of the time that is left: for plans that send nothing; for each trial, first of whole modules that run again and
keep nothing, then of all variants."""

_LEAST_SECONDS = 2.0
"""For finding out what would do where nothing does."""


def sending(region: Region) -> Region:
    """Return the variant in which a module runs once and sends what it saves."""
    assert region.sends is not None
    return replace(region, hold=None, recompute=(), kept=(), sent=region.sends.saved)


def sending_given(variant: Region) -> Region:
    """Return the variant that runs a module again likewise, and sends what its checkpoint is given."""
    assert variant.sends is not None
    return replace(
        variant, hold=variant.sends.away, recompute=(*variant.recompute, variant.sends.back), sent=variant.sends.given
    )


def offloading_variants(
    regions: Sequence[Region], graph: TrainingGraph, costs: Sequence[OperationCost]
) -> tuple[Region, ...]:
    """Return all variants for all regions: to run again, to send, and both."""
    return tuple(variant for region in variants_of(regions, graph, costs) for variant in _with_sending(region))


def _with_sending(variant: Region) -> Iterator[Region]:
    yield variant
    if variant.sends is None:
        return
    if variant.sends.given:
        yield sending_given(variant)
    if variant.sends.saved and not variant.kept:
        yield sending(variant)


def cheapest_with_offload(
    problem: Problem, regions: Sequence[Region], clock: Clock, progress: Progress | None = None
) -> Solution:
    """Return the variants that keep the budgets of device and host and add least to the step.

    If none were found, the InfeasibleBudgetError has the lowest peak that was, or is a HostBudgetError.
    """
    search = _SendingSearch(problem, regions, clock, progress)
    search.without()
    search.with_variants(regions, _COARSE_SHARE)
    search.with_variants(variants_of(regions, problem.graph, problem.costs), _FINE_SHARE)
    return search.found()


class _SendingSearch:
    """One search; ``best`` is what was found, ``bound`` bounds what all variants can do."""

    def __init__(self, problem: Problem, regions: Sequence[Region], clock: Clock, progress: Progress | None) -> None:
        self.problem, self.regions, self.clock, self.progress = problem, regions, clock, progress
        self.near_seconds = _NEAR * problem.baseline.seconds
        self.best: Solution | None = None
        self.bound = 0.0
        self.chooser: Chooser | None = None

    def without(self) -> None:
        """Look for plans that send nothing, which are never to be better."""
        with self.share(_WITHOUT_SHARE) as clock:
            try:
                self.best = cheapest(
                    replace(self.problem, host=None), self.regions, clock, self.progress, near_seconds=self.near_seconds
                )
            except InfeasibleBudgetError:
                return

    def with_variants(self, regions: Sequence[Region], share: float) -> None:
        """Look for plans that take these variants, with sending or without, at each price."""
        problem = self.problem
        variants = tuple(variant for region in regions for variant in _with_sending(region))
        self.chooser = Chooser(problem, variants, self.clock, self.progress, near_seconds=self.near_seconds)
        self.bound = 0.0
        first_sent_bytes = 0
        for number, (price, free, sent) in enumerate(_TRIALS):
            if self.is_over():
                return
            most_sent_bytes = None if sent == 1.0 else int(sent * first_sent_bytes)
            with self.share(share) as self.chooser.clock:
                chosen, seconds = self.chooser.choose(price, int(free * problem.budget_bytes), most_sent_bytes)
            tight = problem.evaluate(self.chooser.schedule(chosen))
            if not number:
                self.bound = max(0.0, seconds - price * _all_transfers_seconds(problem, self.regions))
                first_sent_bytes = tight.host_bytes
            if tight.peak_bytes > problem.budget_bytes:
                if not number:
                    return
                continue
            self.offer(*widened(problem, [variants[r] for r in sorted(chosen)]))

    def offer(self, variants: tuple[Region, ...], evaluation: Evaluation) -> None:
        """Take what is better than the best, and keeps the host's budget too: a programme may miss it by a rounding."""
        if self.problem.host is None or evaluation.host_bytes > self.problem.host.budget_bytes:
            return
        solution = Solution.simulated(evaluation, schedule_of(self.problem.graph, variants), NAME, regions=variants)
        if self.best is None or _rank(solution) < _rank(self.best):
            self.best = solution

    def found(self) -> Solution:
        """Return the best; the lowest, if there is none and that one fits; or say why there is none."""
        if self.best is None:
            assert self.chooser is not None
            self.chooser.clock = Clock(max(self.clock.left(), _LEAST_SECONDS), counts_work=self.clock.counts_work)
            lowest = self.chooser.lowest()
            variants = tuple(self.chooser.regions[r] for r in sorted(lowest))
            evaluation = self.problem.evaluate(schedule_of(self.problem.graph, variants))
            if evaluation.peak_bytes <= self.problem.budget_bytes:
                self.offer(variants, evaluation)
            if self.best is None:
                raise self.infeasible(self.chooser, lowest)
        return replace(self.best, lower_bound_seconds=min(self.best.added_seconds, self.bound))

    def infeasible(self, chooser: Chooser, lowest: frozenset[int]) -> InfeasibleBudgetError:
        """Return the error that says which budget is too small: the host's, if more of it would do."""
        host = self.problem.host
        assert host is not None
        error = chooser.infeasible(lowest, self.bound)
        anything = replace(self.problem, host=replace(host, budget_bytes=2**62))
        unbounded = Chooser(anything, chooser.regions, chooser.clock)
        evaluation = anything.evaluate(unbounded.schedule(unbounded.least_sent()))
        if evaluation.peak_bytes > self.problem.budget_bytes:
            return error
        return HostBudgetError(
            f"no choice of modules was found within {host.budget_bytes} bytes of the host's memory; one is known for "
            f"{evaluation.host_bytes}",
            host_budget_bytes=evaluation.host_bytes,
            minimum_feasible_peak_bytes=error.minimum_feasible_peak_bytes,
            operation=error.operation,
            is_proven=False,
        )

    def is_over(self) -> bool:
        if self.best is None:
            return False
        return self.clock.left() <= 0 or self.best.added_seconds <= self.bound + self.near_seconds

    @contextmanager
    def share(self, share: float) -> Iterator[Clock]:
        left = max(share * self.clock.left(), 0.0)
        clock = Clock(left, counts_work=self.clock.counts_work)
        yield clock
        self.clock.work(left - clock.left())


def _rank(solution: Solution) -> tuple[float, int]:
    return solution.added_seconds, solution.peak_bytes


def _all_transfers_seconds(problem: Problem, regions: Sequence[Region]) -> float:
    """Return what sending and fetching takes at most: no value is sent twice."""
    assert problem.host is not None
    every = {sent.value for r in regions if r.sends is not None for sent in (*r.sends.saved, *r.sends.given)}
    return 2 * problem.host.seconds(sum(problem.graph.values[value].size_bytes for value in every))
