"""Problems in which a policy's decisions are already made, so that solvers need not know of policies."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from planner.errors import InfeasibleBudgetError
from planner.findings.finding import Finding, Severity
from planner.ir.graph import Phase
from planner.ir.policy import backward_begins, held_against, read_by_backward
from planner.ir.problem import Problem, Solution
from planner.solving.offload_reduction import Reduction, schedule_with_fetches


def solved_by_policy(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
    """Solve a problem with decisions that move values; the bound is of all plans that follow the policy.

    A recomputed operation of the forward may read a decided value that the forward left. Such operations must then run
    once, and the problem is solved again: that ends, since each time fewer may run again.
    """
    once: set[int] = set()
    bound_seconds: float | None = None
    while True:
        reduction = PolicyReduction(problem, once)
        try:
            found = reduction.invert(solve(reduction.problem))
        except InfeasibleBudgetError as error:  # its lowest schedule is of the reduction's graph
            raise error.but(is_proven=error.is_proven and not once, lowest=None) from error
        bound_seconds = found.lower_bound_seconds if bound_seconds is None else bound_seconds
        against = held_against(problem.graph, problem.decisions, found.schedule)
        if not against:
            return replace(found, lower_bound_seconds=min(bound_seconds, found.added_seconds))
        once |= against


def policy_finding(problem: Problem) -> Finding | None:
    """Report what a policy decided, and what of that is impossible; None if it decided nothing."""
    decisions = problem.decisions
    counts = {"saved": decisions.save, "recomputed": decisions.recompute, "offloaded": decisions.offload}
    decided = ", ".join(f"{len(operations)} {word}" for word, operations in counts.items() if operations)
    if not decided and not decisions.ignored:
        return None
    cause = "the solver decides the others"
    if decisions.ignored:
        cause += f"; {len(decisions.ignored)} cannot be recomputed or offloaded: {', '.join(decisions.ignored[:5])}"
    return Finding(
        rule="policy",
        severity=Severity.WARNING if decisions.ignored else Severity.NOTE,
        evidence=f"operations decided by the policy: {decided or 'none'}",
        cause=cause,
        fix="answer None for them" if decisions.ignored else "nothing; without the policy plans may cost less",
    )


def decided_operations(problem: Problem) -> str:
    """Name the operations that a policy decided, the largest outputs first, for an error."""
    graph, decisions = problem.graph, problem.decisions
    largest = sorted(
        decisions.save | decisions.recompute | decisions.offload,
        key=lambda index: -sum(graph.values[value].size_bytes for value in graph.operations[index].outputs),
    )
    named = ", ".join(graph.operations[index].key for index in largest[:3])
    more = f" and {len(largest) - 3} more" if len(largest) > 3 else ""
    return f"the policy decides {named}{more}: answer None for them, or give a larger budget" if largest else ""


class PolicyReduction(Reduction):
    """A problem without the decided values: the backward provides each of them once more.

    Right before its first reader after the loss, an operation that is to be recomputed has a copy in ``problem``,
    which costs the same; a value that is offloaded is made there by a fetch, which costs nothing and runs once. So
    nothing holds such a value across the loss, whatever a solver does, and every bound of ``problem`` is one of the
    plans that follow the policy. The order is fixed. O(operations + reads).
    """

    def __init__(self, problem: Problem, once: Set[int] = frozenset()) -> None:
        super().__init__(problem)
        self.decisions = decisions = problem.decisions
        self.copies: dict[int, int] = {}
        """For a value of the forward the one that the backward reads in its place."""
        self.states: dict[int, int] = {}
        self.added_seconds = 0.0
        """What the copies take."""
        graph, turn = problem.graph, backward_begins(problem.graph)
        for index, operation in enumerate(graph.operations):
            if index in once:
                operation = replace(operation, recomputable=False)
            if index >= turn:
                for value in operation.inputs:
                    self._provide(value)
                operation = replace(operation, inputs=tuple(self.copies.get(u, u) for u in operation.inputs))
            if index in decisions.recompute and operation.state_bytes:
                state = self.add_value(f"random state of {operation.name}", operation.state_bytes)
                self.states[index] = state
                operation = replace(operation, outputs=(*operation.outputs, state))
            if index in decisions.offload:
                leaving = read_by_backward(graph, index)
                tickets = list(map(self.add_ticket, leaving))
                self.states.update(zip((-1 - u for u in leaving), tickets, strict=True))
                operation = replace(operation, outputs=(*operation.outputs, *tickets))
            self.add(operation, problem.costs[index], index)
        self.problem = self.posed(problem.budget_bytes)

    def _provide(self, value: int) -> None:
        """Provide a decided value for the backward, after the decided values that it is computed from."""
        graph, waiting = self.real.graph, [value]
        while waiting:
            value = waiting[-1]
            maker = graph.producer[value]
            if value in self.copies or not self._is_decided(value):
                waiting.pop()
            elif maker in self.decisions.offload:
                waiting.pop()
                self._fetch(value)
            elif missing := [u for u in graph.operations[maker].inputs if u not in self.copies and self._is_decided(u)]:
                waiting.extend(missing)
            else:
                waiting.pop()
                self._recompute(maker)

    def _is_decided(self, value: int) -> bool:
        return self.real.graph.producer[value] in self.decisions.recompute | self.decisions.offload

    def _fetch(self, value: int) -> None:
        made = self.real.graph.values[value]
        self.copies[value] = copy = self.add_value(made.name, made.size_bytes)
        self.add_fetch(value, self.states[-1 - value], copy, 0.0, phase=Phase.BACKWARD, recomputable=False)

    def _recompute(self, maker: int) -> None:
        graph = self.real.graph
        operation = graph.operations[maker]
        for value in operation.outputs:
            self.copies[value] = self.add_value(graph.values[value].name, graph.values[value].size_bytes)
        state = (self.states[maker],) if maker in self.states else ()
        again = replace(
            operation,
            inputs=(*(self.copies.get(u, u) for u in operation.inputs), *state),
            outputs=tuple(self.copies[value] for value in operation.outputs),
            phase=Phase.BACKWARD,
        )
        self.added_seconds += self.real.costs[maker].seconds
        self.add(again, self.real.costs[maker], maker)

    def invert(self, solution: Solution) -> Solution:
        """Translate a solution of ``problem`` into one of the real problem, with its real cost."""
        steps = [self.stands_for[index] for index in solution.schedule.order]
        schedule = schedule_with_fetches(self.real.graph, steps)
        evaluation = self.real.evaluate(schedule)
        bound = solution.lower_bound_seconds + self.added_seconds
        known = {"lower_bound_seconds": bound, "solve_seconds": solution.solve_seconds}
        return Solution.simulated(evaluation, schedule, solution.solver, **known)
