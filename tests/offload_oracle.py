"""What offload is held against: the cheapest of all plans for tiny graphs, and the bytes of a plan counted again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from planner.ir.problem import Problem
from planner.ir.schedule import Schedule
from tests.oracle import shortest


@dataclass(frozen=True)
class _State:
    """How far a step is; times are what is left of each transfer."""

    done: int = 0
    held: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    first_here: frozenset[int] = frozenset()
    """Offloaded values whose first copy is still on the device."""
    on_host: frozenset[int] = frozenset()
    sending: tuple[tuple[int, float], ...] = ()
    fetching: tuple[tuple[int, float], ...] = ()
    engine_out: float = 0.0
    engine_in: float = 0.0
    is_returning: bool = False
    """Whether something has begun to return since the last run: a plan waits before that for what leaves, not after."""

    def after(self, seconds: float) -> _State:
        return replace(
            self,
            sending=tuple((u, max(left - seconds, 0.0)) for u, left in self.sending),
            fetching=tuple((u, max(left - seconds, 0.0)) for u, left in self.fetching),
            engine_out=max(self.engine_out - seconds, 0.0),
            engine_in=max(self.engine_in - seconds, 0.0),
        )


def cheapest_offloading(problem: Problem) -> float | None:
    """Find the least time that a plan within both budgets adds, by Dijkstra over memory contents and transfers.

    Any sequence of runs, reruns, departures and returns is a path, but that between two runs nobody waits for a
    departure after a return has begun, which a schedule cannot say. Shares no code with the simulator or a solver.
    """
    assert problem.host is not None
    values = problem.graph.values
    phase_of = {u: operation.phase for operation in problem.graph.operations for u in operation.outputs}
    read = {u for operation in problem.graph.operations for u in operation.inputs}
    able = [
        u
        for u, value in enumerate(values)
        if phase_of[u] == "forward"
        and value.size_bytes >= problem.host.least_bytes
        and u in read
        and not value.retained
    ]
    found = [
        added
        for count in range(len(able) + 1)
        for offloaded in combinations(able, count)
        if sum(values[u].size_bytes for u in offloaded) <= problem.host.budget_bytes
        if (added := _cheapest(problem, frozenset(offloaded))) is not None
    ]
    return min(found, default=None)


def _cheapest(problem: Problem, offloaded: frozenset[int]) -> float | None:
    count = len(problem.graph.operations)
    steps = lambda state: ((more, after, None) for more, after in _following(problem, offloaded, state))  # noqa: E731
    found = shortest(_State(), steps, lambda state: state.done == count)
    return found and found[0]


def _following(problem: Problem, offloaded: frozenset[int], state: _State) -> list[tuple[float, _State]]:
    graph, host = problem.graph, problem.host
    assert host is not None
    operations, values = graph.operations, graph.values
    arriving = {u for u, _ in state.fetching}
    found: list[tuple[float, _State]] = []
    for u in state.held - arriving:
        if values[u].retained:
            continue
        gone = replace(state, held=state.held - {u})
        if u not in state.first_here:
            found.append((0.0, gone))
            continue
        wait = dict(state.sending)[u]
        if wait and state.is_returning:
            continue
        gone = replace(
            gone.after(wait),
            first_here=state.first_here - {u},
            on_host=state.on_host | {u},
            sending=tuple((v, max(left - wait, 0.0)) for v, left in state.sending if v != u),
        )
        found.append((wait, gone))
    for o in state.states:
        found.append((0.0, replace(state, states=state.states - {o})))
    for u in state.on_host - state.held:
        until = state.engine_in + values[u].size_bytes / host.bytes_per_second
        fetching = tuple(sorted([*state.fetching, (u, until)]))
        begun = replace(state, held=state.held | {u}, fetching=fetching, engine_in=until, is_returning=True)
        found.append((0.0, begun))
    for o in range(min(state.done + 1, len(operations))):
        operation, first = operations[o], o == state.done
        if not state.held.issuperset(operation.inputs) or arriving.intersection(operation.outputs):
            continue
        if not first and not (operation.recomputable and (o in state.states or not operation.state_bytes)):
            continue
        wait = max((left for u, left in state.fetching if u in operation.inputs), default=0.0)
        now = state.held | set(operation.outputs)
        twice = sum(
            values[u].size_bytes
            for u in operation.outputs
            if not first and (values[u].retained or u in state.first_here)
        )
        sent = [u for u in operation.outputs if u in offloaded and first]
        may_keep = first and operation.state_bytes and operation.recomputable
        for kept in [state.states, state.states | {o}] if may_keep else [state.states]:
            held_bytes = sum(values[u].size_bytes for u in now) + sum(operations[s].state_bytes for s in kept)
            if held_bytes + twice + problem.costs[o].workspace_bytes > problem.budget_bytes:
                continue
            after = state.after(wait).after(problem.costs[o].seconds)
            until, sending = after.engine_out, list(after.sending)
            for u in sent:
                until += values[u].size_bytes / host.bytes_per_second
                sending.append((u, until))
            after = replace(
                after,
                done=state.done + first,
                held=now,
                states=kept,
                first_here=state.first_here | set(sent),
                sending=tuple(sorted(sending)),
                engine_out=until,
                fetching=tuple((u, left) for u, left in after.fetching if u not in operation.inputs),
                is_returning=False,
            )
            found.append((wait + (0.0 if first else problem.costs[o].seconds), after))
    return found


def walk(problem: Problem, schedule: Schedule) -> list[int]:
    """Allocate and free as the generated code does, and give the most bytes from each run to the next."""
    graph, order = problem.graph, schedule.order
    operations, values = graph.operations, graph.values
    leaves = {o.value: o.leaves for o in schedule.offloads}
    returns = {(o.value, p) for o in schedule.offloads for p in o.returns}

    def is_read(u: int, position: int) -> bool:
        """Whether the copy that is there at the end of a position is read again before another takes its place."""
        for later in range(position + 1, len(order)):
            if (u, later) in returns:
                return False
            if u in operations[order[later]].inputs:
                return True
            if u in operations[order[later]].outputs:
                return False
        return False

    def first_read(u: int, position: int) -> int:
        """Of several that come back at a position, the first to be read comes first."""
        return next(p for p in range(position, len(order)) if u in operations[order[p]].inputs)

    held: set[int] = set()
    ran: set[int] = set()
    timeline = []

    def states(position: int, done: set[int]) -> int:
        rest = order[position:]
        return sum(operations[i].state_bytes for i in done if i in rest and order.count(i) > 1)

    def held_bytes() -> int:
        return sum(values[u].size_bytes for u in held)

    for position, index in enumerate(order):
        operation, first = operations[index], index not in ran
        held -= {u for u in held if leaves.get(u) == position}
        moments = []
        for u in sorted((u for u, p in returns if p == position), key=lambda u: (first_read(u, position), u)):
            held.add(u)
            moments.append(held_bytes() + states(position, ran))
        assert held.issuperset(operation.inputs)
        held |= set(operation.outputs)
        twice = sum(values[u].size_bytes for u in operation.outputs if not first and values[u].retained)
        ran.add(index)
        moments.append(held_bytes() + twice + states(position, ran) + problem.costs[index].workspace_bytes)
        held = {u for u in held if values[u].retained or is_read(u, position) or leaves.get(u, 0) > position}
        sent = [u for u in operation.outputs if u in leaves and first]
        held -= {u for u in held if leaves.get(u) == position + 1 and u not in sent}
        timeline.append(max(moments))
    return timeline
