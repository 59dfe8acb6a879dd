"""Dynamic programming over a chain of stages: which to save whole, and where to restart from, nested (rotor).

A stage's forward is run either saving all that its backward needs, or only passing through to a
later stage whose input is kept. What was passed is done again, by the same rule, when the
backward arrives; so stages may run several times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from planner.common.limits import SolveLimits
from planner.ir.problem import Problem, Progress, Solution
from planner.ir.schedule import Schedule
from planner.solving.incumbent import Incumbent
from planner.solving.repair import without_useless
from planner.solving.segmentations import chain_places, last_forward_readers, turning_point

_MOST_SPLITS = 8_000
"""Splits of different runs of stages that are tried; with more, neighbouring stages are joined."""

_MOST_STAGES = 250
"""More are joined at once, without counting splits."""

_MOST_POINTS = 160
"""Points of a trade-off curve that are kept; what is left out rounds memory up, never down."""

_SPARE = 1.25
"""Curves reach so far above the budget, since the chain's account of memory is not exact."""

_MINOR_SHARES = (0.0, 0.25)
"""Two chains are tried: of clean cuts only, and a finer one."""

_BEYOND = 8
"""So many plans of a curve are tried beyond the first that breaks the budget."""

_SECONDS_PER_RUN = 1e-3
"""About what one run of stages takes, where work is counted and not time."""

_SAVE = 0
"""Choice of saving the first stage of a run; any other is how many stages are passed."""

Point = tuple[int, float, int]
"""Bytes needed above what stands when the backward of the run begins, seconds of recompute, choice."""

Steps = list[tuple[int, float]]
"""A curve without choices."""

_needed_bytes = itemgetter(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """Bytes and seconds of one stage; stages with equal figures are interchangeable."""

    boundary_bytes: int
    """What it hands to the next stage."""
    saved_bytes: int
    """What its backward needs of what it makes, and the boundary."""
    pass_bytes: int
    pass_seconds: float
    """Peak and time of running it again for its boundary alone, its input not counted."""
    save_bytes: int
    save_seconds: float
    """The same for everything saved."""
    own_bytes: int
    own_seconds: float
    """The same for what its own backward needs, without the boundary."""
    first_pass_bytes: int
    first_save_bytes: int
    """Peaks of its first run, with all other memory of the forward."""
    backward_bytes: int
    """Peak of its backward, saved values included, above what stands when it begins."""


class Chain:
    """The stages of a problem: the forward cut at given places.

    Values made in the forward are *managed* if a plan may drop them: recomputable, not retained,
    and crossing at most one place. All others stay as long as in the step without recompute.
    The backward of each stage ``starts`` somewhere in the base order, where so much is ``standing_bytes``,
    managed values not counted. O(values + inputs).
    """

    def __init__(self, problem: Problem, places: Sequence[int]) -> None:
        self.problem = problem
        graph = problem.graph
        self.turn = turning_point(graph)
        self.ends = [*(place + 1 for place in places), self.turn]
        self.count = len(self.ends)
        self._assign_values()
        self._assign_backward()
        self._measure_load()
        self.workspaces = [cost.workspace_bytes for cost in problem.costs]
        self.passed: list[list[int]] = []
        self.saved: list[list[int]] = []
        self.own: list[list[int]] = []
        self.stages = [self._stage(k) for k in range(self.count)]

    def first_run(self, k: int) -> range:
        """Return the operations of a stage in base order."""
        return range(self.ends[k - 1] if k else 0, self.ends[k])

    def backward(self, k: int) -> range:
        """Return the operations of a stage's backward, the loss with the last stage's."""
        return range(self.starts[k], self.starts[k - 1] if k else len(self.problem.graph.operations))

    def _assign_values(self) -> None:
        graph = self.problem.graph
        stage_of = [k for k in range(self.count) for _ in self.first_run(k)]
        self.stage: list[int] = [-1] * len(graph.values)
        self.leaves = [False] * len(graph.values)
        for u, last in enumerate(last_forward_readers(graph, self.turn)):
            maker = graph.producer[u]
            if maker >= self.turn or graph.values[u].retained or not graph.operations[maker].recomputable:
                continue
            k = stage_of[maker]
            crossed = stage_of[last] - k if last > maker else 0
            if crossed <= 1:
                self.stage[u] = k
                self.leaves[u] = crossed == 1

    def _assign_backward(self) -> None:
        """Begin each stage's backward at the first operation that reads a value of this stage or of an earlier one."""
        graph = self.problem.graph
        count = len(graph.operations)
        self.starts = [self.turn if k == self.count - 1 else count for k in range(self.count)]
        reached: dict[int, int] = {}
        lowest = self.count - 1
        for index in range(self.turn, count):
            operation = graph.operations[index]
            needed = [reached[u] for u in operation.inputs if u in reached]
            needed += [self.stage[u] + self.leaves[u] for u in operation.inputs if self.stage[u] >= 0]
            at = min(needed, default=lowest)
            for u in operation.outputs:
                reached[u] = at
            while lowest > at:
                lowest -= 1
                self.starts[lowest] = index

    def _measure_load(self) -> None:
        """Sum the bytes that the chain does not manage, at each operation and where backwards begin."""
        graph, costs = self.problem.graph, self.problem.costs
        count = len(graph.operations)
        change, between = [0] * (count + 1), [0] * (count + 1)
        for u, maker in enumerate(graph.producer):
            if self.stage[u] < 0:
                last = graph.readers[u][-1] if graph.readers[u] else maker
                last = count - 1 if graph.values[u].retained else last
                change[maker] += graph.values[u].size_bytes
                change[last + 1] -= graph.values[u].size_bytes
                between[maker + 1] += graph.values[u].size_bytes
                between[last + 1] -= graph.values[u].size_bytes
        self.load_bytes = [
            total_bytes + cost.workspace_bytes for total_bytes, cost in zip(accumulate(change), costs, strict=False)
        ]
        crossing = list(accumulate(between))
        self.standing_bytes = [crossing[start] for start in self.starts]
        self.standing_bytes[-1] = 0  # the last stage's forward is never repeated before its backward begins

    def _stage(self, k: int) -> ChainStage:
        graph, costs = self.problem.graph, self.problem.costs
        runs = self.first_run(k)
        managed = [u for index in runs for u in graph.operations[index].outputs if self.stage[u] == k]
        boundary = {u for u in managed if self.leaves[u]}
        own = {u for u in managed if graph.readers[u] and graph.readers[u][-1] >= self.starts[k]}
        saved = own | boundary
        self.passed.append(self._closure(k, boundary))
        self.saved.append(self._closure(k, saved))
        self.own.append(self._closure(k, own))

        def total_bytes(values: Collection[int]) -> int:
            return sum(graph.values[u].size_bytes for u in values)

        def total_seconds(runs: Sequence[int]) -> float:
            return sum(costs[index].seconds for index in runs)

        return ChainStage(
            boundary_bytes=total_bytes(boundary),
            saved_bytes=total_bytes(saved),
            pass_bytes=self._peak(self.passed[k], boundary, self.workspaces),
            pass_seconds=total_seconds(self.passed[k]),
            save_bytes=self._peak(self.saved[k], saved, self.workspaces),
            save_seconds=total_seconds(self.saved[k]),
            own_bytes=self._peak(self.own[k], own, self.workspaces),
            own_seconds=total_seconds(self.own[k]),
            first_pass_bytes=self._peak(runs, boundary, self.load_bytes, k),
            first_save_bytes=self._peak(runs, saved, self.load_bytes, k),
            backward_bytes=self._backward_peak(k, own) - self.standing_bytes[k],
        )

    def _closure(self, k: int, targets: Collection[int]) -> list[int]:
        """Return the operations of a stage to recompute for some of its values, from its input."""
        graph = self.problem.graph
        needed = set(targets)
        runs = []
        for index in reversed(self.first_run(k)):
            if not needed.isdisjoint(graph.operations[index].outputs):
                runs.append(index)
                needed.update(u for u in graph.operations[index].inputs if self.stage[u] == k)
        return runs[::-1]

    def _peak(self, runs: Sequence[int], kept: Collection[int], load_bytes: Sequence[int], k: int | None = None) -> int:
        """Return the peak bytes of values made by some runs, on top of a load; only those of stage ``k`` if given."""
        graph = self.problem.graph
        last: dict[int, int] = {}
        for index in runs:
            for u in (*graph.operations[index].inputs, *graph.operations[index].outputs):
                last[u] = index
        live = peak = 0
        made: set[int] = set()
        for index in runs:
            operation = graph.operations[index]
            new = [u for u in operation.outputs if k is None or self.stage[u] == k]
            made.update(new)
            live += sum(graph.values[u].size_bytes for u in new)
            peak = max(peak, live + load_bytes[index])
            gone = {u for u in (*operation.inputs, *new) if u in made and last[u] == index and u not in kept}
            live -= sum(graph.values[u].size_bytes for u in gone)
        return peak

    def _backward_peak(self, k: int, own: Collection[int]) -> int:
        graph = self.problem.graph
        runs = self.backward(k)
        live = sum(graph.values[u].size_bytes for u in own)
        leaving = [0] * (len(runs) + 1)
        for u in own:
            leaving[min(graph.readers[u][-1] - runs.start + 1, len(runs))] += graph.values[u].size_bytes
        peak = self.standing_bytes[k]
        for place, index in enumerate(runs):
            live -= leaving[place]
            peak = max(peak, live + self.load_bytes[index])
        return peak


class ChainDpSolver:
    """Optimal persistent schedules of heterogeneous chains."""

    name = "chain-dp"
    summary = "dynamic programme over the chain of stages, nested recompute (rotor, Beaumont et al. 2019); seconds"
    offloads = False

    def solve(self, problem: Problem, *, effort: SolveLimits, progress: Progress | None = None) -> Solution:
        """Solve the chain of the graph's cut points, and give its cheapest plan that simulates within the budget.

        O(stages**3 x points) for stages that all differ, O(stages**2 x points) for a repeated few. The
        optimum is over plans of the chain alone: a bound on nothing else. The method is that of
        Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous
        chains: how to train deep neural networks with limited memory", RR-9302, Inria, 2019.
        """
        clock, incumbent = effort.clock(), Incumbent(problem)
        if incumbent.update(Schedule.keep_all(problem.graph), self.name):
            return incumbent.solution()
        several = {tuple(chain_places(problem.graph, minor_share=share)): None for share in _MINOR_SHARES}
        chains = [_affordable(problem, places) for places in several if places]
        for limit_bytes in (int(_SPARE * problem.budget_bytes), 4 * problem.baseline.peak_bytes):
            for chain in chains:
                if clock.left() < 0:
                    break
                curves = Curves(chain, limit_bytes)
                clock.work(_SECONDS_PER_RUN * len(curves.points))
                _search_along(curves, incumbent)
                if progress:
                    progress(f"chain-dp: {chain.count} stages, {len(curves.points)} different runs of them")
            if incumbent.schedule is not None:
                break
        cause = "" if chains else "the forward has no cut points: "
        return incumbent.solution(what=f"{cause}no plan of the chain of stages keeps")


def _search_along(curves: Curves, incumbent: Incumbent) -> None:
    """Find, by bisection on the chain's memory, the cheapest plan that simulates within the budget."""

    def fits(point: Point) -> bool:
        order = without_useless(incumbent.problem, curves.order(point[0]))
        return incumbent.update(Schedule(tuple(order)), ChainDpSolver.name)

    if not (points := curves.whole):
        return
    fits(points[0])
    broken = bisect_left(points, True, 1, key=lambda point: not fits(point))
    for point in points[broken + 1 : broken + 1 + _BEYOND]:
        fits(point)


def _affordable(problem: Problem, places: Sequence[int]) -> Chain:
    """Merge neighbouring stages until the number of splits to try is affordable."""
    step = 1 + len(places) // _MOST_STAGES
    while True:
        chain = Chain(problem, places[step - 1 :: step])
        runs = run_names(chain)
        lengths = {name: t - s for s, row in enumerate(runs) for t, name in enumerate(row, s)}
        if sum(lengths.values()) <= _MOST_SPLITS:
            return chain
        step += 1


def run_names(chain: Chain) -> list[list[int]]:
    """Return numbers of the sequences of stages, equal ones alike: ``names[s][t - s]`` is that of stages s to t.

    Runs that end with the last stage are apart, since their forward is the step's first and costs nothing.
    """
    kinds: dict[ChainStage, int] = {}
    kind_of = [kinds.setdefault(stage, len(kinds)) for stage in chain.stages]
    known: dict[tuple[int, int, bool], int] = {}
    names: list[list[int]] = []
    for s in range(chain.count):
        row: list[int] = []
        for t in range(s, chain.count):
            key = (row[-1] if row else -1, kind_of[t], t == chain.count - 1)
            row.append(known.setdefault(key, len(known)))
        names.append(row)
    return names


class Curves:
    """For each sequence of stages, the least recompute time for every amount of memory.

    The input of a run is held and not counted, nor is what others keep. Curves are exact step
    functions of bytes, thinned to a fixed number of points.
    """

    def __init__(self, chain: Chain, limit_bytes: int) -> None:
        self.chain = chain
        self.limit_bytes = limit_bytes
        self.names = run_names(chain)
        self.points: dict[int, list[Point]] = {}
        for length in range(chain.count):
            for s in range(chain.count - length):
                name = self.names[s][length]
                if name not in self.points:
                    self.points[name] = _thinned(self._solve(s, s + length))
        self.whole = self._curve(0, chain.count - 1)

    def _curve(self, s: int, t: int) -> list[Point]:
        return self.points[self.names[s][t - s]]

    def _shift_bytes(self, s: int, t: int) -> int:
        """Return how many more bytes are live when the backward of stage s begins than when that of t does."""
        return self.chain.standing_bytes[s] - self.chain.standing_bytes[t]

    def _solve(self, s: int, t: int) -> list[Point]:
        """Try saving the first stage whole, and restarting from the input of every later one."""
        chain, stage = self.chain, self.chain.stages[s]
        first = t == chain.count - 1  # then these are the step's own first runs, which cost nothing
        backward_bytes = stage.backward_bytes + self._shift_bytes(s, t)
        if s == t:
            run_bytes = stage.first_save_bytes if first else stage.own_bytes
            return [(max(backward_bytes, run_bytes), 0.0 if first else stage.own_seconds, _SAVE)]
        least_bytes = max(backward_bytes, stage.first_save_bytes if first else stage.save_bytes)
        seconds = 0.0 if first else stage.save_seconds
        points = [
            (max(least_bytes, needed_bytes + stage.saved_bytes), seconds + rest_seconds, _SAVE)
            for needed_bytes, rest_seconds, _ in self._curve(s + 1, t)
        ]
        least_bytes, seconds, input_bytes = 0, 0.0, 0
        for split in range(s + 1, t + 1):
            passed = chain.stages[split - 1]
            least_bytes = max(least_bytes, input_bytes + (passed.first_pass_bytes if first else passed.pass_bytes))
            if least_bytes > self.limit_bytes:
                break
            seconds += 0.0 if first else passed.pass_seconds
            input_bytes = passed.boundary_bytes
            late = [(b + input_bytes, c) for b, c, _ in self._curve(split, t)]
            shift_bytes = self._shift_bytes(split - 1, t)
            early = [(b + shift_bytes, c) for b, c, _ in self._curve(s, split - 1)]
            points += _both(late, early, least_bytes, self.limit_bytes, seconds, split - s)
        return points

    def order(self, available_bytes: int) -> list[int]:
        """Write out the plan of the whole chain within some bytes."""
        chain = self.chain
        order: list[int] = []
        pending: list[tuple[int, int, int]] = [(0, chain.count - 1, available_bytes)]
        while pending:
            s, t, available_bytes = pending.pop()
            if t < s:
                order += chain.backward(s)
                continue
            curve = self._curve(s, t)
            choice = curve[bisect_right(curve, available_bytes, key=_needed_bytes) - 1][2]
            first = t == chain.count - 1
            if choice == _SAVE:
                order += chain.first_run(s) if first else chain.own[s] if s == t else chain.saved[s]
                pending.append((s, s - 1, 0))
                if s < t:
                    pending.append((s + 1, t, available_bytes - chain.stages[s].saved_bytes))
            else:
                split = s + choice
                for k in range(s, split):
                    order += chain.first_run(k) if first else chain.passed[k]
                pending.append((s, split - 1, available_bytes - self._shift_bytes(split - 1, t)))
                pending.append((split, t, available_bytes - chain.stages[split - 1].boundary_bytes))
        return order


def _both(one: Steps, other: Steps, least_bytes: int, limit_bytes: int, seconds: float, choice: int) -> list[Point]:
    """Add two curves at equal bytes, from ``least_bytes`` up to a limit."""
    points: list[Point] = []
    if not one or not other:
        return points
    i = j = 0
    needed_bytes = max(least_bytes, one[0][0], other[0][0])
    while needed_bytes <= limit_bytes:
        while i + 1 < len(one) and one[i + 1][0] <= needed_bytes:
            i += 1
        while j + 1 < len(other) and other[j + 1][0] <= needed_bytes:
            j += 1
        points.append((needed_bytes, one[i][1] + other[j][1] + seconds, choice))
        following = [curve[k + 1][0] for curve, k in ((one, i), (other, j)) if k + 1 < len(curve)]
        if not following:
            break
        needed_bytes = min(following)
    return points


def _thinned(points: list[Point]) -> list[Point]:
    """Keep the Pareto-optimal points, thinned to about ``_MOST_POINTS``, both ends included."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    if len(front) <= _MOST_POINTS:
        return front
    step = -(-len(front) // _MOST_POINTS)
    return [front[0], *front[1:-1][step - 1 :: step], front[-1]]


SOLVER = ChainDpSolver()
