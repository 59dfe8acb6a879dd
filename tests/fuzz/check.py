"""One random model under random budgets: every promise held against what real steps do."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import planner
from planner.analysis.study import Study
from planner.capture.inputs import run_step
from planner.capture.memory import measure_peak
from planner.capture.state_restore import RandomStates
from planner.common.options import HELD, grouped
from planner.diagnose.verification import StepResult, compare
from planner.errors import InfeasibleBudgetError, PlannerError
from planner.ir.simulator import lifetimes, simulate
from planner.ir.static_memory import OUTPUTS
from planner.plans.plan import Plan
from tests.fuzz import source

BUDGETS = 2
"""How many random budgets each model is run under, beside the whole."""

SECONDS = 0.5
"""For each solve."""

ALIGNMENT_BYTES = 64
"""Of an allocation on a CPU: each is predicted rounded up to it, and seen as it is."""

SOLVERS = ("ilp", "ilp", "sqrt", "chain-dp")
"""Those that need no compiler: what is tested here is what runs, not how it was found."""


@dataclass(frozen=True)
class Failure:
    """A promise that was broken."""

    kind: str
    detail: str


@dataclass
class Outcome:
    """What came of one model."""

    seed: int
    runtime: str
    blocks: tuple[int, ...]
    failures: list[Failure] = field(default_factory=list)
    refusal: str = ""
    invalid: str = ""
    plans: int = 0
    recomputing: int = 0


def check(seed: int, blocks: Sequence[int] | None = None) -> Outcome:
    """Hold one model to every promise: a refusal by an error of ours is an outcome, all else that raises a failure."""
    chosen = tuple(range(source.count(seed))) if blocks is None else tuple(blocks)
    rng = random.Random(f"budgets {seed}")
    text = source.write(seed, chosen)
    runtime = rng.choice(("graph",) * 5 + ("modules",))
    if "checkpoint(" in text:
        runtime = "graph"  # under the other, the model's own checkpointing must be off
    outcome = Outcome(seed, runtime, chosen)
    torch._dynamo.reset()
    try:
        outcome.failures += _Trial(source.load(text, f"fuzz_{seed}"), rng, outcome).failures()
    except PlannerError as error:
        outcome.refusal = f"{type(error).__name__}: {error}"
    except Exception:
        outcome.failures.append(Failure("crash", traceback.format_exc(limit=-4)))
    return outcome


class _Trial:
    def __init__(self, make: Callable[[], Any], rng: random.Random, outcome: Outcome) -> None:
        self.make, self.rng, self.outcome = make, rng, outcome
        self.bound_only = False
        """Whether predictions are upper bounds: for a loss outside, and for outputs that share memory."""
        self.study: Study | None = None

    def failures(self) -> Iterator[Failure]:
        try:
            eager, _ = self.steps(None)
        except Exception as error:  # autograd refuses some in-place changes, for one
            self.outcome.invalid = f"{type(error).__name__}: {error}"
            return
        whole = self.plan(budget="100%")
        unplanned, peak_bytes = self.steps(whole)
        yield from self.of_peak(whole, peak_bytes)
        if eager.random_states == _Trial.before:  # captured steps may draw otherwise than eager ones
            for line in compare(eager, unplanned, tolerance=1e-4):
                yield Failure("unlike eager", line)
        smallest_bytes = whole.minimum_feasible_peak_bytes
        for _ in range(BUDGETS):
            share = self.rng.random() ** 2
            budget_bytes = round(smallest_bytes + share * (whole.peak_bytes - smallest_bytes))
            solver = self.rng.choice(SOLVERS) if self.outcome.runtime == "graph" else "auto"
            try:
                plan = self.plan(budget=budget_bytes, solver=solver)
            except InfeasibleBudgetError:  # a heuristic may not find what is known to be there
                if solver == "auto":
                    yield Failure("feasible budget refused", f"{budget_bytes} by {solver}, {smallest_bytes} is enough")
                continue
            self.outcome.recomputing += bool(plan.recomputations)
            planned, peak_bytes = self.steps(plan)
            yield from self.of_peak(plan, peak_bytes)
            different = compare(unplanned, planned)
            if different and not self.repeats_itself():
                self.outcome.invalid = "without a plan, PyTorch gives other bits from step to step"
                return
            for line in different:
                yield Failure("bits", f"{line} (budget {budget_bytes}, {solver})")
        yield from self.too_small(sum(whole.static_bytes.values()))

    def repeats_itself(self) -> bool:
        """Whether eager steps give the same bits: some kernels read memory that nothing was written to."""
        first, *others = (self.steps(None)[0] for _ in range(6))
        return not any(compare(first, other) for other in others)

    def too_small(self, resident_bytes: int) -> Iterator[Failure]:
        try:
            self.plan(budget=resident_bytes + 64)
        except InfeasibleBudgetError:
            return
        yield Failure("infeasible budget accepted", f"{resident_bytes + 64}")

    def plan(self, *, solver: str = "ilp", **options: Any) -> Plan:
        """Plan with one capture for all budgets where the runtime allows it."""
        self.outcome.plans += 1
        if self.outcome.runtime == "graph":
            if self.study is None:
                model, inputs, loss_fn = self.make()
                self.study = planner.study(model, inputs, loss_fn=loss_fn)
            return self.study.plan(**grouped(solver=solver, time_limit_seconds=SECONDS, **options))
        model, inputs, loss_fn = self.make()
        runtime = self.outcome.runtime
        return planner.plan(
            model, inputs, loss_fn=loss_fn, **grouped(runtime=runtime, time_limit_seconds=SECONDS, **options)
        )

    def steps(self, plan: Plan | None) -> tuple[StepResult, int]:
        """Take a step to get ready, one whose peak is measured, and one that is looked at, from the same state."""
        model, inputs, loss_fn = self.make()
        if plan is not None:
            planner.auto_wrap(model, budget=plan, runtime=plan.runtime, loss_fn=loss_fn)

        step = partial(run_step, partial(model, *inputs), loss_fn)
        outputs, peak_bytes = None, 0
        kept = HELD if plan is None else str(plan.fingerprint.get(OUTPUTS, HELD))
        fresh, *_ = self.make()
        state = {name: buffer.clone() for name, buffer in fresh.named_buffers()}
        for number in range(3):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(state[name])
            for tensor in [*model.parameters(), *inputs]:
                tensor.grad = None
            torch.manual_seed(self.outcome.seed)
            _Trial.before = RandomStates()
            if number == 1:
                peak_bytes, _ = measure_peak(partial(step, kept), torch.device("cpu"))
            else:
                outputs = step()
        self.bound_only = self.bound_only or loss_fn is not None or _share_memory(outputs)
        return _result(model, inputs, outputs), peak_bytes

    before: RandomStates

    def of_peak(self, plan: Plan, measured_bytes: int) -> Iterator[Failure]:
        predicted_bytes = plan.peak_bytes - sum(plan.static_bytes.values())
        seen = f"{measured_bytes} bytes measured, {predicted_bytes} predicted, solver {plan.solver}"
        if plan.peak_bytes > plan.budget_bytes:
            yield Failure("plan over budget", seen)
        if measured_bytes > predicted_bytes:
            yield Failure("peak above prediction", seen)
        if not self.bound_only and measured_bytes < predicted_bytes - self.rounding_bytes(plan, predicted_bytes):
            yield Failure("peak below prediction", seen)

    def rounding_bytes(self, plan: Plan, predicted_bytes: int) -> int:
        """How much too high a prediction may be: sizes are rounded up; see ``planner.measure.costing``."""
        if self.study is None:
            return predicted_bytes // 1000 + 64 * ALIGNMENT_BYTES
        schedule = plan.schedule_for(self.study.graph)
        position = simulate(self.study.graph, self.study.costs, schedule).peak_position
        there = sum(copy.born <= position <= copy.died for copy in lifetimes(self.study.graph, schedule))
        states = [operation.state_bytes for operation in self.study.graph.operations]
        return there * (ALIGNMENT_BYTES - 1) + max(states)  # a first run counts the state that only a second one needs


def _share_memory(outputs: Any) -> bool:
    """Whether some outputs are views of something larger, or of each other."""
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    storages = [t.untyped_storage() for t in tensors]
    partly = any(s.nbytes() > t.numel() * t.element_size() for s, t in zip(storages, tensors, strict=True))
    return partly or len({s.data_ptr() for s in storages}) < len(storages)


def _result(model: torch.nn.Module, inputs: Sequence[Any], outputs: Any) -> StepResult:
    of_inputs = {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}
    learned = {**dict(model.named_parameters()), **of_inputs}
    return StepResult(
        loss=tuple(t.detach().clone() for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)),
        gradients={name: None if t.grad is None else t.grad.clone() for name, t in learned.items()},
        buffers={name: b.clone() for name, b in model.named_buffers()},
        random_states=RandomStates(),
    )


def smaller(outcome: Outcome) -> Outcome:
    """Leave out blocks of a failing model for as long as it fails in the same way."""
    kinds = {failure.kind for failure in outcome.failures}
    for block in outcome.blocks:
        rest = tuple(other for other in outcome.blocks if other != block)
        tried = check(outcome.seed, rest)
        if kinds & {failure.kind for failure in tried.failures}:
            outcome = tried
    return outcome
