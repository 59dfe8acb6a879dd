"""When what modules send leaves and returns: with time to hide the transfers, where the budget leaves room.

What a module sends leaves with the end of its own call or of a later module's, and returns by itself or with the first
that the backward reads of another module. Transfers go one after the other, so each has a latest moment to begin, or
an earliest to have ended; the module next to that is taken, or the nearest one for which there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from planner.ir.checkpoints import Region, Sends, Sent, begins_of, schedule_of
from planner.ir.problem import Problem
from planner.ir.simulator import Evaluation


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
