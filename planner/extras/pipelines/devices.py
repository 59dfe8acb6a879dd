"""The plan of one device of a pipeline, while so many micro-batches are in flight.

While one micro-batch is at work on a device, each other one in flight holds what its plan saves, the
same bytes all the time. So a device holds what is resident, what the simulator says of the
micro-batch at work, and the others' saved bytes, which depend on the plan. ``Device.planned`` bounds
what a micro-batch may save, and searches for the best bound: with a bound of c the others hold c
each, and the existing solvers do the rest. Over plans that save between a and c, to count a for each
other one and to allow c is a relaxation, which gives the lower bound.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from planner.common.options import Search
from planner.common.units import format_bytes
from planner.errors import InfeasibleBudgetError
from planner.extras.pipelines.plan import StagePlan
from planner.extras.pipelines.schedules import Load, most_in_flight
from planner.extras.pipelines.stages import Stage
from planner.ir.problem import Problem, Solution, confirm
from planner.ir.schedule import Schedule
from planner.ir.simulator import Evaluation, simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.allocator import optimizer_peak_bytes
from planner.plans.from_solution import plan_from_solution
from planner.plans.plan import SCHEMA, NoPlanFitsError, PlanOrigin
from planner.solvers import get
from planner.solving.peak_bounds import lowest_schedule
from planner.solving.segmentations import segmentations

_SPLITS = 8
"""How often the range of what a micro-batch may save is halved at most."""

_CLOSED = 1e-4
"""Gap, as a share of the stage's time, at which the search stops."""


@dataclass(frozen=True)
class _Held:
    """Schedules for the chunks of a device, and what it then holds."""

    schedules: tuple[Schedule, ...]
    saved_bytes: tuple[int, ...]
    peak_bytes: int
    recompute_seconds: tuple[float, ...]


class Device:
    """One device: its chunks, what is resident, and the loads under which its passes run."""

    def __init__(
        self, index: int, chunks: Sequence[Stage], around: StaticMemory, loads: Sequence[Load], end_bytes: int = 0
    ) -> None:
        """Take note; when all passes are over, so many bytes are there beside what is resident and gradients."""
        self.index, self.chunks, self.around, self.loads = index, tuple(chunks), around, tuple(loads)
        self.static_bytes = sum(around.static_bytes.values())
        # Where gradients of earlier steps are resident, those of earlier micro-batches are in them.
        is_counted = "gradients" in around.static_bytes
        self.gradient_bytes = tuple(0 if is_counted else stage.gradient_bytes for stage in self.chunks)
        self.end_bytes = self.static_bytes + sum(self.gradient_bytes) + end_bytes
        self.keep_all = self.hold([Schedule.keep_all(stage.graph) for stage in self.chunks])

    @property
    def optimizer_peak_bytes(self) -> int:
        """What the device holds while the optimizer steps."""
        resident_bytes = self.static_bytes + self.around.optimizer_step_bytes
        graphs = (replace(stage.graph, static_bytes=dict(self.around.static_bytes)) for stage in self.chunks)
        return resident_bytes + sum(optimizer_peak_bytes(graph, self.around) - resident_bytes for graph in graphs)

    @cached_property
    def lowest(self) -> _Held:
        """The lowest peak that quick methods find."""
        best = []
        for chunk, stage in enumerate(self.chunks):
            others = max(load.others[chunk] for load in self.loads)

            def height(schedule: Schedule, stage: Stage = stage, others: int = others) -> int:
                found = simulate(stage.graph, stage.costs, schedule)
                return found.peak_bytes + others * _held_at(stage.wait, schedule, found)

            lowest = lowest_schedule(Problem(graph=stage.graph, costs=stage.costs, budget_bytes=0))
            best.append(min((*segmentations(stage.graph), lowest), key=height))
        return self.hold(best)

    def beside(self, chunk: int, saved_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return the most that stands beside a forward, and beside a backward: what others hold, and gradients."""

        def held(load: Load) -> tuple[int, int]:
            gradient_bytes = sum(map(mul, self.gradient_bytes, load.accumulated))
            return sum(map(mul, load.others, saved_bytes)), gradient_bytes + load.left_bytes

        found: tuple[int, ...] = ()
        for is_backward in (False, True):
            here = (load for load in self.loads if load.chunk == chunk and load.is_backward == is_backward)
            found += max(map(held, here), key=sum)
        return found

    def hold(self, schedules: Sequence[Schedule]) -> _Held:
        """Simulate schedules for all chunks, with the other micro-batches in flight."""
        chunks = [(stage, stage.as_run(schedule)) for stage, schedule in zip(self.chunks, schedules, strict=True)]
        alone = [(*chunk, simulate(chunk[0].graph, chunk[0].costs, chunk[1])) for chunk in chunks]
        saved = tuple(_held_at(stage.wait, schedule, found) for stage, schedule, found in alone)
        peak_bytes = max(
            stage.problem(0, self.beside(chunk, saved)).evaluate(schedule).peak_bytes
            for chunk, (stage, schedule) in enumerate(chunks)
        )
        return _Held(
            tuple(schedule for _, schedule in chunks),
            saved,
            max(peak_bytes + self.static_bytes, self.optimizer_peak_bytes, self.end_bytes),
            tuple(found.recompute_seconds for *_, found in alone),
        )

    def no_plan_fits(self, budget_bytes: int) -> NoPlanFitsError:
        """Return the error that this device has no plan within a budget, and which budget is known to be enough."""
        smallest_bytes, in_flight = self.lowest.peak_bytes, most_in_flight(self.loads)
        where = f"rank {self.index} of the pipeline"
        message = (
            f"no plan was found that fits {format_bytes(budget_bytes)}: {where} binds, "
            f"with {in_flight} micro-batch{'es' if in_flight > 1 else ''} in flight and "
            f"{format_bytes(self.static_bytes)} resident; the smallest budget "
            f"known to be feasible is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes): raise the budget, take "
            "more stages or smaller micro-batches"
        )
        report = {
            "schema": SCHEMA,
            "status": "infeasible",
            "budget_bytes": budget_bytes,
            "minimum_feasible_peak_bytes": smallest_bytes,
            "message": message,
        }
        return NoPlanFitsError(message, minimum_feasible_peak_bytes=smallest_bytes, operation=where, report=report)

    def planned(self, budget_bytes: int, search: Search, origins: Sequence[PlanOrigin]) -> StagePlan | None:
        """Return the cheapest plans found for all chunks under one budget, each from its origin; None if none fit.

        A plan is written out as the device stands while it runs.
        """
        begun = time.perf_counter()
        held, bound_seconds = self.keep_all, (0.0,) * len(self.chunks)
        if held.peak_bytes > budget_bytes:
            found = _SplitSearch(self, budget_bytes, search).run()
            if found is None:
                return None
            held, bound_seconds = found
        solve_seconds = time.perf_counter() - begun
        around = replace(self.around, has_caching_allocator=False)
        plans = []
        for chunk, (stage, schedule) in enumerate(zip(self.chunks, held.schedules, strict=True)):
            beside_bytes = self.beside(chunk, held.saved_bytes)
            problem = stage.problem(budget_bytes - self.static_bytes, beside_bytes)
            problem = replace(problem, graph=replace(problem.graph, static_bytes=dict(self.around.static_bytes)))
            kept_bytes = self.beside(chunk, self.keep_all.saved_bytes)
            solution = Solution(
                solver=search.solver if held.recompute_seconds[chunk] else "keep all",
                schedule=schedule,
                peak_bytes=problem.evaluate(schedule).peak_bytes,
                recompute_seconds=held.recompute_seconds[chunk],
                lower_bound_seconds=min(bound_seconds[chunk], held.recompute_seconds[chunk]),
                solve_seconds=solve_seconds,
            )
            plan = plan_from_solution(problem, solution, origin=origins[chunk], static_memory=around, compare=False)
            made = replace(
                plan,
                baseline_peak_bytes=stage.problem(0, kept_bytes).baseline.peak_bytes + self.static_bytes,
                optimizer_peak_bytes=max(self.optimizer_peak_bytes, self.end_bytes),
            )
            plans.append(made)
        return StagePlan(
            index=self.index,
            layers=tuple(stage.layers for stage in self.chunks),
            micro_batches_in_flight=most_in_flight(self.loads),
            saved_bytes=held.saved_bytes,
            plans=tuple(plans),
        )


def _held_at(pause: int, schedule: Schedule, found: Evaluation) -> int:
    """Return what a micro-batch holds during an operation in which nothing runs."""
    return found.timeline_bytes[schedule.order.index(pause)]


class _SplitSearch:
    """The search for what a micro-batch may save: so many bytes of the largest chunk, of the others in proportion."""

    def __init__(self, device: Device, budget_bytes: int, search: Search) -> None:
        self.device, self.budget_bytes = device, budget_bytes
        self.full = device.keep_all.saved_bytes
        self.whole_bytes = max(*self.full, 1)
        # A solve for the lower half, one for the upper, one between: three for each split, for each chunk.
        seconds = max(search.time_limit_seconds / (3 * _SPLITS * len(device.chunks)), 0.1)
        self.solver = get(search.solver)
        self.effort = replace(search, time_limit_seconds=seconds)
        self.ends = float("inf") if search.deterministic else time.perf_counter() + search.time_limit_seconds
        self.best: _Held | None = None

    def run(self) -> tuple[_Held, tuple[float, ...]] | None:
        """Halve the range where the lower bound is lowest, until the gap is closed or time is up."""
        device = self.device
        if max(device.optimizer_peak_bytes, device.end_bytes, device.static_bytes + 1) > self.budget_bytes:
            return None
        self.offer(device.lowest)
        # All that are in flight wait at once before a backward, and must fit.
        is_chain = len(device.chunks) == 1
        most_bytes = (self.budget_bytes - device.static_bytes) // most_in_flight(device.loads)
        highest = most_bytes if is_chain else self.whole_bytes
        root = self.relaxed(0, highest)
        if root is None:
            return None
        # By lower bound, then the widest first: with several chunks all have the bound of the root.
        intervals = [(sum(root), -highest, 0, highest, root)]
        tolerance = _CLOSED * sum(sum(cost.seconds for cost in stage.costs) for stage in device.chunks)
        self.tight(min(highest, self.whole_bytes))
        ended: list[tuple[float, ...]] = []
        for _ in range(_SPLITS):
            while intervals and intervals[0][2] == intervals[0][3]:
                ended.append(heapq.heappop(intervals)[-1])
            if not intervals or time.perf_counter() > self.ends or self.seconds - intervals[0][0] <= tolerance:
                break
            *_, low, high, bounds = heapq.heappop(intervals)
            middle = self.whole_bytes if low < self.whole_bytes < high else (low + high) // 2
            self.tight(middle)
            for a, c in ((low, middle), (middle + 1, high)):
                within = self.relaxed(a, c) if is_chain else bounds
                if within is not None and sum(within) < self.seconds:
                    heapq.heappush(intervals, (sum(within), a - c, a, c, within))
        if self.best is None:
            return None
        lowest = min([*ended, *(interval[-1] for interval in intervals), self.best.recompute_seconds], key=sum)
        return self.best, lowest

    @property
    def seconds(self) -> float:
        """Time of the recomputations of the best schedules so far."""
        return sum(self.best.recompute_seconds) if self.best else float("inf")

    def offer(self, held: _Held) -> None:
        if held.peak_bytes <= self.budget_bytes and sum(held.recompute_seconds) < self.seconds:
            self.best = held

    def tight(self, most_bytes: int) -> None:
        """Find plans that save no more than so much, where others hold that much."""
        most = self.of_each(most_bytes)
        self.bounds(most, most)

    def relaxed(self, low_bytes: int, high_bytes: int) -> tuple[float, ...] | None:
        """Return lower bounds for plans that save between two sizes; None if it is proven that there are none."""
        # Of several chunks nothing is asked but that each fits beside what surely is there.
        most = [high_bytes if len(self.full) == 1 else None] * len(self.full)
        return self.bounds(self.of_each(low_bytes), most)

    def bounds(self, saved_bytes: Sequence[int], most_bytes: Sequence[int | None]) -> tuple[float, ...] | None:
        """Plan all chunks where others hold so much; return lower bounds, None if it is proven that no plan fits."""
        bounds: list[float] = []
        schedules = []
        for chunk, (stage, most) in enumerate(zip(self.device.chunks, most_bytes, strict=True)):
            beside_bytes = self.device.beside(chunk, saved_bytes)
            problem = stage.problem(self.budget_bytes - self.device.static_bytes, beside_bytes, most)
            try:
                solution = self.solver.solve(problem, effort=self.effort)
            except InfeasibleBudgetError as error:
                if error.is_proven:
                    return None
                bounds.append(error.lower_bound_seconds)
                continue
            confirm(problem, solution)
            bounds.append(solution.lower_bound_seconds)
            schedules.append(solution.schedule)
        if len(schedules) == len(self.full):
            self.offer(self.device.hold(schedules))
        return tuple(bounds)

    def of_each(self, size_bytes: int) -> list[int]:
        """Return what each chunk may save where the largest may save so much."""
        return [size_bytes * size // self.whole_bytes for size in self.full]
