"""A solver for the partitioner of ``torch.compile`` that is given a budget in bytes, and not a ratio.

Torch keeps the partitioner to itself, and hands its own objects to the solver; nobody else here looks at them.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch._functorch.partitioners import MinCutOptions, solve_min_cut
from torch._inductor.custom_graph_pass import CustomKnapsackSolver, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

import planner
from cost_models.roofline import RooflineCosts
from planner.capture.joint import JointGraph, is_random, tensors_of
from planner.capture.lowering import LoweredGraph, lower
from planner.capture.torch_internals import storage_id
from planner.common.units import Size, format_bytes, format_percent, parse_size, round_up
from planner.errors import InfeasibleBudgetError, UnsupportedModelError, UsageError
from planner.ir.builder import StepContext
from planner.ir.schedule import recompute_lazily
from planner.ir.simulator import Copy, Evaluation, lifetimes, simulate
from planner.measure.costing import operation_costs
from planner.measure.devices import here

_log = logging.getLogger(__name__)

_ROUNDS = 64
"""In how many rounds all candidates are dropped: each takes one simulation, in O(operations)."""


@dataclass(frozen=True)
class Choice:
    """What is recomputed of one graph, as simulated."""

    recomputed: frozenset[int]
    """Positions among torch's candidates."""
    peak_bytes: int
    """With the graph's inputs, and what is reserved."""
    recompute_seconds: float


class Knapsack(CustomKnapsackSolver):
    """A solver for ``torch._functorch.config.activation_memory_budget_solver``; made by :func:`knapsack`."""

    def __init__(self, budget_bytes: int, reserve_bytes: int) -> None:
        self.budget_bytes, self.reserve_bytes = budget_bytes, reserve_bytes
        self.choices: list[Choice] = []
        """What was chosen, graph by graph, in the order of their compilation."""

    def uuid(self) -> bytes:
        """Return what compiled code is kept under in torch's cache: the budget, and this version."""
        return get_hash_for_files((__file__,), f"{planner.__version__} {self.budget_bytes} {self.reserve_bytes}")

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Choose which candidates are saved and which recomputed; the ratio is not read."""
        step = Step(joint_graph, node_info, all_recomputable_banned_nodes, self.reserve_bytes)
        chosen = step.cheapest(self.budget_bytes, memory)
        self.choices.append(chosen)
        _log.info(
            "graph %s: %s of %s, +%s step time, %s of %s candidates recomputed",
            len(self.choices), format_bytes(chosen.peak_bytes), format_bytes(self.budget_bytes),
            format_percent(chosen.recompute_seconds / step.seconds), len(chosen.recomputed), len(memory),
        )  # fmt: skip
        positions = range(len(memory))
        return [p for p in positions if p not in chosen.recomputed], sorted(chosen.recomputed)


class Step:
    """A joint graph that the partitioner is about to cut, and its candidates."""

    def __init__(self, graph: fx.Graph, node_info: Any, candidates: Sequence[fx.Node], reserve_bytes: int) -> None:
        self._graph, self._node_info, self._candidates = graph, node_info, candidates
        for node in graph.nodes:
            if is_random(node):  # under a small ratio torch would draw most of them again, and get other numbers
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        copy = fx.Graph()  # lowering changes nodes
        self._copies: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            self._copies[node] = copy.node_copy(node, self._copies.__getitem__)
        module = fx.GraphModule(graph.owning_module or {}, copy)
        sources = JointGraph(module, copy, 0).placeholders
        outputs = len(copy.output_node().args[0])  # type: ignore[arg-type]
        inputs = [next(iter(tensors_of(node)), torch.empty(0)) for node in sources]
        joint = JointGraph(module, copy, outputs - len(sources), inputs)
        given = {storage_id(t): t for n in joint.arguments for t in tensors_of(n)}.values()
        device = next((t.device for t in given if t.device.type != "cpu"), torch.device("cpu"))
        spec = here(device)
        context = StepContext(alignment_bytes=spec.alignment_bytes, on_cpu=device.type == "cpu")
        try:
            self._lowered: LoweredGraph = lower(joint, context)
        except UnsupportedModelError as error:
            raise UsageError(f"{error}: a budget in bytes is for fixed sizes, so pass dynamic=False") from error
        self._static_bytes = reserve_bytes + spec.library_bytes
        self._static_bytes += sum(round_up(t.untyped_storage().nbytes(), spec.alignment_bytes) for t in given)
        self._costs = operation_costs(self._lowered.graph, spec, RooflineCosts.name)
        self.seconds = sum(cost.seconds for cost in self._costs)
        self._judged: dict[frozenset[int], Choice] = {}

    def _values(self, nodes: Collection[fx.Node]) -> set[int]:
        return {value for node in nodes for value in self._lowered.storage_of.get(self._copies[node], ())}

    def _saved(self, recomputed: Collection[int]) -> set[int]:
        """Return the values that torch's own cut saves if these candidates may be recomputed, and no others."""
        options = MinCutOptions(
            ban_if_used_far_apart=False,
            ban_if_long_fusible_chains=False,
            ban_if_materialized_backward=False,
            ban_if_not_in_allowlist=False,
            ban_if_reduction=config.ban_recompute_reductions,
        )
        may_run: Any = {self._candidates[position] for position in recomputed}
        return self._values(solve_min_cut(self._graph, self._node_info, options, may_run)[0])

    def _run(self, saved: set[int]) -> tuple[Evaluation, list[Copy]]:
        """Simulate the step that saves these values; return also all copies that it makes."""
        graph = self._lowered.graph
        made = {value for operation in graph.operations[: graph.loss_index] for value in operation.outputs}
        schedule = recompute_lazily(graph, {graph.loss_index: made - saved})
        return simulate(graph, self._costs, schedule), lifetimes(graph, schedule)

    def judge(self, recomputed: frozenset[int]) -> Choice:
        """Simulate what torch will make of a choice."""
        if recomputed not in self._judged:
            found, _ = self._run(self._saved(recomputed))
            peak_bytes = self._static_bytes + found.peak_bytes
            self._judged[recomputed] = Choice(recomputed, peak_bytes, found.recompute_seconds)
        return self._judged[recomputed]

    def _drafts(self, memory: list[float]) -> Iterator[tuple[float, int, frozenset[int]]]:
        """Give seconds and peak of ever larger sets of recomputed candidates, and each set; the same for all budgets.

        Some drop what lies at the peak, the densest first, until nothing more can go there; some are what torch's own
        solver chooses at one ratio after the other. Collectives and random draws run once. Torch's cut is taken to save
        the same otherwise, so that each set takes one simulation and no cut.
        """
        graph, saved, values = self._lowered.graph, self._saved(()), [self._values([node]) for node in self._candidates]
        makers = [{graph.producer[value] for value in each} for each in values]
        seconds = [sum(self._costs[index].seconds for index in each) for each in makers]
        sizes = [sum(graph.values[value].size_bytes for value in each & saved) for each in values]
        may_run = {
            at
            for at, node in enumerate(self._candidates)
            if all(graph.operations[index].recomputable for index in makers[at]) and not is_random(node)
        }
        densest = sorted(may_run, key=lambda at: sizes[at] / max(seconds[at], 1e-12), reverse=True)

        def run(dropped: Collection[int]) -> tuple[Evaluation, set[int]]:
            found, copies = self._run(saved.difference(*(values[at] for at in dropped)))
            return found, {copy.value for copy in copies if copy.born < found.peak_position <= copy.died}

        dropped: list[int] = []
        while True:
            found, there = run(dropped)
            yield found.recompute_seconds, found.peak_bytes, frozenset(dropped)
            left = [at for at in densest if at not in dropped and there & values[at] & saved]
            if not left:
                break
            dropped += left[: -(-len(sizes) // _ROUNDS)]
        for percent in range(5, 100, 5):
            kept = dp_knapsack(memory, seconds, percent / 100)[1]
            rest = frozenset(may_run.difference(kept))
            found, _ = run(rest)
            yield found.recompute_seconds, found.peak_bytes, rest

    def cheapest(self, budget_bytes: int, memory: list[float]) -> Choice:
        """Return the first of the drafts, which cost ever more and peak ever lower, that keeps the budget as cut.

        The drafts are the same for every budget, so a search by halves among them ends no later for a larger one.
        """
        front: list[frozenset[int]] = []
        least_bytes: float = math.inf
        for _, peak_bytes, recomputed in sorted(self._drafts(memory), key=lambda draft: draft[:2]):
            if peak_bytes < least_bytes:
                front.append(recomputed)
                least_bytes = peak_bytes
        lowest = self.judge(front[-1])
        if lowest.peak_bytes > budget_bytes:
            raise InfeasibleBudgetError(
                f"no choice of the partitioner's candidates keeps {format_bytes(budget_bytes)}: the lowest known peak "
                f"is {format_bytes(lowest.peak_bytes)} ({lowest.peak_bytes} bytes)",
                minimum_feasible_peak_bytes=lowest.peak_bytes,
                operation="the compiled graph",
            )
        fits = bisect_left(front, True, hi=len(front) - 1, key=lambda one: self.judge(one).peak_bytes <= budget_bytes)
        return self.judge(front[fits])


def knapsack(budget: Size, *, reserve: Size = 0) -> Knapsack:
    """Return a solver that has torch's own partitioner keep a budget in bytes, where it takes a ratio.

    For programs that ``torch.compile`` compiles as before, by Inductor or another backend with AOTAutograd's
    partitioner. Of the operations that the partitioner is ready to recompute at a price (matrix products, attention,
    reductions), the solver says which. The ratio must be small and above zero for the
    solver to be called; it is not used.

    Parameters
    ----------
    budget : int or str
        What the device may hold at any moment of forward and backward: bytes or ``"8GiB"``.
    reserve : int or str
        What is left of it for all else: the optimizer's state, gradients of earlier steps, other graphs.

    Returns
    -------
    Knapsack
        ``choices`` has what was chosen for each graph, with its peak in bytes. The partitioner asks no solver about a
        graph in which there is nothing to choose, or that is in torch's cache of compiled code.

    Raises
    ------
    UsageError
        If a size cannot be read; when compiling, if sizes in the graph are symbols.
    InfeasibleBudgetError
        When compiling, inside Dynamo's ``BackendCompilerFailed``, if no choice keeps the budget.

    Notes
    -----
    Choices are drafts that do not depend on the budget, sorted by what they cost; a larger budget never gets one that
    comes later. After the solver, the partitioner solves a minimum cut, which saves as few bytes as it can of whatever
    may be recomputed, elementwise operations always included. The solver solves the same cut for each choice that it
    looks at, and simulates forward and backward in the order in which the partitioner will write them. So the peak is
    that of what eager kernels run, byte for byte as operators allocate, and approximate in three ways. Inductor fuses
    operations, reuses buffers and has an order of its own: mostly it takes less, at times a percent more. What kernels
    allocate beside their results is not counted. Each graph is held to the budget by itself: with graph breaks, what
    other graphs keep belongs in ``reserve``.

    Under a small ratio torch 2.13 and 2.14 recompute random draws, with other numbers: gradients of a model with
    dropout are wrong then, whichever of its own solvers is set. This solver marks draws as saved, so that they are
    right; a graph in which there is nothing to choose is cut without it.

    Examples
    --------
    >>> import torch, planner
    >>> solver = planner.knapsack("8GiB", reserve="1GiB")
    >>> settings = {"activation_memory_budget": 1e-6, "activation_memory_budget_solver": solver}
    >>> model = torch.compile(torch.nn.Linear(8, 8))
    >>> with torch._functorch.config.patch(settings):  # or set both for good
    ...     pass  # the first step, which compiles
    """
    return Knapsack(parse_size(budget), parse_size(reserve) if reserve else 0)
