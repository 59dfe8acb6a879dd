"""Which modules send their saved tensors to the host's memory, and when the tensors leave and return.

A module that is not checkpointed may send what it saves; a checkpointed one what its checkpoint is given, whatever it
keeps beside that. Which modules do comes from the programme of :mod:`planner.solving.modules.ilp`, in which a value is
away as long as it can be. It is asked more than once: for the bound with transfers that cost nothing but what cannot
hide, then with prices for them and with some of the budget left free, since how much hides depends on what lies
around and on room for values under way.
What a module sends leaves with the end of its own call or of a later module's, and returns by itself or with the first
that the backward reads of another module. Transfers go one after the other, so each has a latest moment to begin, or
an earliest to have ended; the module next to that is taken, or the nearest one for which there is room. Only the
simulator says what is best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from planner.common.limits import Clock
from planner.errors import HostBudgetError, InfeasibleBudgetError
from planner.ir.checkpoints import Region, Sends, Sent, begins_of, schedule_of
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.simulator import Evaluation
from planner.solving.modules.ilp import NAME, Chooser, cheapest, variants_of

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


def widened(problem: Problem, variants: Sequence[Region]) -> tuple[tuple[Region, ...], Evaluation]:
    """Let what modules send leave later and return earlier, if that makes the step quicker within the budget.

    The variants come back with the simulation of their schedule. O(runs of all windows x values).
    """
    tight = problem.evaluate(schedule_of(problem.graph, variants))
    windows = _Windows(problem, variants, tight)
    windows.come_back()
    windows.leave()
    wide = tuple(windows.variants.get(variant.module, variant) for variant in variants)
    evaluation = problem.evaluate(schedule_of(problem.graph, wide))
    if evaluation.peak_bytes <= problem.budget_bytes and evaluation.added_seconds < tight.added_seconds:
        return wide, evaluation
    return tuple(variants), tight


def moved(variant: Region, variants: Sequence[Region], leaves_with: str | None, returns_with: str | None) -> Region:
    """Return a variant whose values leave and return with those of other modules, by default as they did."""
    sends = {other.module: other.sends for other in variants if other.module != variant.module}
    if leaves_with and (later := sends.get(leaves_with)):
        sent = tuple(replace(one, leaves=max(one.leaves, later.ended)) for one in variant.sent)
        if _have_time(sent):
            variant = replace(variant, sent=sent, leaves_with=leaves_with)
    if returns_with and (sooner := sends.get(returns_with)):
        sent = tuple(replace(one, returns=min(one.returns, sooner.begins)) for one in variant.sent)
        if _have_time(sent):
            variant = replace(variant, sent=sent, returns_with=returns_with)
    return variant


def _have_time(sent: Sequence[Sent]) -> bool:
    return all(one.leaves < one.returns for one in sent)


class _Windows:
    """Variants that send, and the bytes at each position of their schedule, while windows are being set."""

    def __init__(self, problem: Problem, variants: Sequence[Region], tight: Evaluation) -> None:
        assert problem.host is not None
        self.problem, self.host = problem, problem.host
        self.all_variants = variants
        self.variants = {variant.module: variant for variant in variants if variant.sent}
        self.live = list(tight.timeline_bytes)
        schedule = schedule_of(problem.graph, variants)
        seconds = (problem.costs[index].seconds for index in schedule.order)
        self.time = list(accumulate(seconds, initial=0.0))
        """Of computing, before each position."""
        self.begins = begins_of(problem.graph, variants)
        self.size = {sent.value: problem.graph.values[sent.value].size_bytes for w in variants for sent in w.sent}

    def seconds(self, variant: Region) -> float:
        """Return what transfers of one variant take, in one direction."""
        return self.host.seconds(sum(self.size[sent.value] for sent in variant.sent))

    def come_back(self) -> None:
        """Let what is sent return so early that it is there when it is read."""
        order = sorted(self.variants.values(), key=lambda variant: _sends(variant).begins)
        places = {variant.module: self.begins[_sends(variant).begins] for variant in order}
        wanted: dict[str, float] = {}
        free_until = float("inf")
        for variant in reversed(order):
            needed = min(self.time[self.begins[sent.returns]] for sent in variant.sent)
            free_until = wanted[variant.module] = min(needed, free_until) - self.seconds(variant)
        for number, variant in enumerate(order):
            returns = [(self.begins[sent.returns], self.size[sent.value]) for sent in variant.sent]
            sooner = order[:number]
            in_time = [other for other in sooner if self.time[places[other.module]] <= wanted[variant.module]]
            least = places[in_time[-1].module] if in_time else 0
            position = max(place for place, _ in returns)
            while position > least and self.has_room(position - 1, [s for place, s in returns if place >= position]):
                position -= 1
            found = next((other for other in sooner if places[other.module] >= position), None)
            if found is None:
                continue
            for place, size in returns:
                for at in range(places[found.module], place):
                    self.live[at] += size
            self.variants[variant.module] = moved(variant, self.all_variants, None, found.module)

    def leave(self) -> None:
        """Let what is sent leave so late that it is through."""
        graph, order = self.problem.graph, sorted(self.variants.values(), key=lambda variant: _sends(variant).ended)
        places = {variant.module: self.begins[_sends(variant).ended] for variant in order}
        made = sorted(
            (graph.producer[sent.value], sent.value, variant.module) for variant in order for sent in variant.sent
        )
        through: dict[str, float] = {}
        busy_until = 0.0
        for maker, value, module in made:
            ready = self.time[self.begins[maker] + 1]
            busy_until = through[module] = max(busy_until, ready) + self.host.seconds(self.size[value])
        for number, variant in enumerate(order):
            leaves = [(self.begins[sent.leaves], self.size[sent.value]) for sent in variant.sent]
            later = order[number + 1 :]
            in_time = [other for other in later if self.time[places[other.module]] >= through[variant.module]]
            most = places[in_time[0].module] if in_time else len(self.live)
            position = min(place for place, _ in leaves)
            while position < most and self.has_room(position, [s for place, s in leaves if place <= position]):
                position += 1
            found = next((other for other in reversed(later) if places[other.module] <= position), None)
            if found is None or self.time[places[variant.module]] >= through[variant.module]:
                continue
            for place, size in leaves:
                for at in range(place, places[found.module]):
                    self.live[at] += size
            self.variants[variant.module] = moved(variant, self.all_variants, found.module, None)

    def has_room(self, position: int, sizes: Sequence[int]) -> bool:
        """Whether so much more fits at a position."""
        return self.live[position] + sum(sizes) <= self.problem.budget_bytes


def _sends(variant: Region) -> Sends:
    assert variant.sends is not None
    return variant.sends
