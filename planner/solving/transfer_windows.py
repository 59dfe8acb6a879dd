"""When offloaded values leave and return: with time for transfers to hide behind computing, within the budget."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

from planner.ir.problem import Problem
from planner.ir.schedule import Offload, Schedule, between_units
from planner.ir.simulator import Evaluation, seconds_of_runs


def widened(problem: Problem, schedule: Schedule, evaluation: Evaluation | None = None) -> Schedule:
    """Widen the windows of transfers, within the budget, so that they hide behind computation.

    The order stays, and the budget is kept if the schedule keeps it. A value leaves when it is sent, or
    before, where its place is needed or the forward of its unit ends: of all that wait for that, those that are
    sent first. It returns as late as it may for no run to wait, or later, where there is no place for it, or the
    backward of its unit has not begun. What is not sent before it is needed again stays. What leaves is first to take
    what room there is. O(runs + positions in all windows).
    """
    windows = _Windows(problem, schedule, evaluation or problem.evaluate(schedule))
    windows.leave()
    windows.come_back()
    return Schedule(schedule.order, windows.offloads())


class _Windows:
    """The transfers of one order, and the live bytes at each position, while windows are widened."""

    def __init__(self, problem: Problem, schedule: Schedule, evaluation: Evaluation) -> None:
        assert problem.host is not None
        self.problem, self.host, self.order = problem, problem.host, schedule.order
        self.live = list(evaluation.timeline_bytes)
        values = problem.graph.values
        self.size = {o.value: values[o.value].size_bytes for o in schedule.offloads}
        self.seconds = {o.value: self.host.seconds(values[o.value].size_bytes) for o in schedule.offloads}
        self.now = {offload.value: offload for offload in schedule.offloads}
        self.uses: dict[int, list[int]] = {u: [] for u in self.now}
        """For each offloaded value, where it is made or read."""
        operations = problem.graph.operations
        for position, index in enumerate(self.order):
            for u in self.uses.keys() & {*operations[index].inputs, *operations[index].outputs}:
                self.uses[u].append(position)
        idle, producer = between_units(problem.graph, self.order), problem.graph.producer
        self.idle = {u: idle.get(operations[producer[u]].region, (-1, 0)) for u in self.now}
        """For each offloaded value, when its unit's forward has ended, and when its backward begins."""
        self.starts: list[float] = []
        """When each run begins, if none waits for what is fetched."""

    def offloads(self) -> tuple[Offload, ...]:
        return tuple(self.now[u] for u in sorted(self.now))

    def last_use(self, u: int, before: int) -> int:
        """Return the last position before another at which a value is computed or read."""
        return self.uses[u][bisect_left(self.uses[u], before) - 1]

    def leave(self) -> None:
        """Free offloaded values when they are sent, or when their bytes are needed."""
        operations, run_seconds = self.problem.graph.operations, seconds_of_runs(self.problem.costs, self.order)
        free: dict[int, list[int]] = {}
        for u, offload in self.now.items():
            free.setdefault(offload.leaves, []).append(u)
        # What is made again meanwhile cannot be kept after all.
        may_stay = {u for u in self.now if self.order.count(self.problem.graph.producer[u]) == 1}
        sent: dict[int, float] = {}
        waiting: list[int] = []
        now = sending_until = 0.0
        for position, index in enumerate(self.order):
            waiting += free.get(position, ())
            for u in [u for u in waiting if position == self.now[u].returns[0] and u in may_stay]:
                waiting.remove(u)
                self.stay(u, free)
            waiting.sort(key=lambda u: (sent[u], u))
            room = self.problem.budget_bytes - self.live[position] - sum(self.size[u] for u in waiting)
            ends = (u for u in waiting if position in (self.now[u].returns[0], self.idle[u][0]))
            due = [*dict.fromkeys((*ends, *(u for u in waiting if u in operations[index].outputs)))]
            while waiting and (room < 0 or due or sent[waiting[0]] <= now):
                u = due.pop() if due else waiting[0]
                waiting.remove(u)
                room += self.size[u]
                now = max(now, sent[u])
                self.now[u] = replace(self.now[u], leaves=position)
            self.live[position] = self.problem.budget_bytes - room
            self.starts.append(now)
            now += run_seconds[position]
            for u in operations[index].outputs:
                if u in self.now and u not in sent:
                    sending_until = sent[u] = max(sending_until, now) + self.seconds[u]

    def stay(self, u: int, free: dict[int, list[int]]) -> None:
        """Keep a value on the device until its first return; it may leave after later uses."""
        offload = self.now.pop(u)
        if len(offload.returns) > 1:
            leaves = self.last_use(u, offload.returns[1]) + 1
            self.now[u] = replace(offload, leaves=leaves, returns=offload.returns[1:])
            free.setdefault(leaves, []).append(u)

    def come_back(self) -> None:
        """Fetch values early enough that no operation waits, where the budget has room."""
        coming = []
        for u, offload in self.now.items():
            begins = self.idle[u][1]
            before = [
                max(offload.leaves, self.last_use(u, back) + 1, begins if back >= begins else 0)
                for back in offload.returns
            ]
            coming += [(back, earliest, u) for back, earliest in zip(offload.returns, before, strict=True)]
        coming.sort()
        in_time: list[int] = []
        latest = float("inf")
        for back, earliest, u in reversed(coming):
            latest = min(latest, self.starts[back]) - self.seconds[u]
            in_time.append(max(earliest, bisect_right(self.starts, latest, 0, back) - 1))
        returns: dict[int, list[int]] = {u: [] for u in self.now}
        for (back, _, u), begin in zip(coming, reversed(in_time), strict=True):
            at = back
            while at > begin and self.live[at - 1] + self.size[u] <= self.problem.budget_bytes:
                at -= 1
                self.live[at] += self.size[u]
            returns[u].append(at)
        self.now = {u: replace(offload, returns=tuple(returns[u])) for u, offload in self.now.items()}
