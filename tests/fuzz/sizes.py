"""One random model at several sizes: what a capture with symbols says of each is what a capture at that size says."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import planner
from planner.analysis.study import Study
from planner.capture.inputs import Inputs, run_backward
from planner.capture.joint import JointGraph
from planner.capture.symbolic import Sizes
from planner.capture.trees import tensors_in
from planner.errors import PlannerError
from planner.session import sizes as by_size
from planner.session.sized import SizedStep
from planner.session.sized_calls import UnknownSizeError
from planner.session.sized_study import SizedStudies
from planner.session.step import LoweredStep, Options
from planner.session.studying import studies_by_size
from planner.solving.peak_bounds import proven_lowest
from tests.fuzz import source
from tests.fuzz.check import Failure, Outcome

BATCHES = (6, 4, 2, 5, 9)
"""The first is captured; the second confirms the formula that the runtime goes on with; the third is the least."""


def check(seed: int, blocks: Sequence[int] | None = None) -> Outcome:
    """Try one model; one that has another program for each size, or none, is refused."""
    chosen = tuple(range(source.count(seed))) if blocks is None else tuple(blocks)
    outcome = Outcome(seed, "graph", chosen)
    torch._dynamo.reset()
    make = source.load(source.write(seed, chosen, any_batch=True), f"fuzz_{seed}")
    try:
        for failure in _failures(make, outcome):
            outcome.failures.append(failure)
    except PlannerError as error:
        outcome.refusal = f"{type(error).__name__}: {error}"
    except Exception:
        outcome.failures.append(Failure("crash", traceback.format_exc(limit=-4)))
    return outcome


def _failures(make: Callable[[], Any], outcome: Outcome) -> Iterator[Failure]:
    model, example, loss_fn = make()
    inputs = Inputs.of(example)
    try:
        for batch in BATCHES:
            outputs = model(*inputs.with_batch(batch).args)
            run_backward(outputs, loss_fn)
    except Exception as error:  # a size is written down in the model, or autograd refuses some in-place changes
        outcome.invalid = f"{type(error).__name__}: {error}"
        return
    if any(t.requires_grad and not t.is_contiguous() for t in tensors_in(outputs)):
        outcome.invalid = "torch lays out gradients of outputs that are not contiguous in another way for symbols"
        return
    model, _, _ = make()
    studies = studies_by_size(model, cost_model="roofline")
    studies.expect([inputs.with_batch(BATCHES[1])])
    made: list[_Made] = []
    for batch in BATCHES:
        resized = inputs.with_batch(batch)
        one = _Made(batch)
        with one.seen():
            study = studies.at(resized, loss_fn)
        alone = planner.study(model, resized.args, loss_fn=loss_fn, cost_model="roofline")
        outcome.plans += one.joint is not None
        for found in (study, one.by_formula or study):
            if _peaks(found) != _peaks(alone):
                yield Failure("peak", f"batch {batch}: {_difference(found, alone)}")
            elif _said_by(found) != _said_by(alone):  # a view more or less, say, or a number in another place
                outcome.refusal = f"other operations: batch {batch}: {_difference(found, alone)}"
        if one.joint is not None:
            made.append(one)
    yield from _of_formula(model, made, outcome)


def _peaks(study: Study) -> Any:
    """Return the peak of the step as it is, what any plan needs, and what is resident."""
    problem = study.problem()
    return problem.baseline.peak_bytes, proven_lowest(problem), study.static_memory


def _said_by(study: Study) -> Any:
    """Return what plans follow from: not names of nodes, nor signatures.

    These say how large the memory behind a view is, which fake tensors forget once they were asked for a like one.
    """
    rest = {f.name: getattr(study.graph, f.name) for f in dataclasses.fields(study.graph)}
    rest |= {
        "operations": [dataclasses.replace(o, name="", signature="") for o in study.graph.operations],
        "values": [dataclasses.replace(value, name="") for value in study.graph.values],
    }
    return rest, study.costs, study.static_memory


class _Made:
    """What was made of the program with symbols for one size."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.joint: JointGraph | None = None
        self.given: Sequence[Any] = ()
        self.step: LoweredStep
        self.study: Study
        self.by_formula: Study | None = None
        """What two sizes before agree on, if they do."""

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Make it plain, also where a formula would do, and note both."""
        at_sizes, study_lowered, at = by_size.at_sizes, by_size.study_lowered, SizedStudies.at

        def made_plain(joint: JointGraph, given: Sequence[Any]) -> JointGraph:
            plain = at_sizes(joint, given)
            self.joint, self.given = joint, given
            return plain

        def studied(model: Any, step: LoweredStep, options: Any) -> Study:
            self.step, self.study = step, study_lowered(model, step, options)
            return self.study

        def asked(studies: SizedStudies, joint: JointGraph, given: Sequence[Any], options: Options) -> None:
            self.by_formula = at(studies, joint, given, options)

        with (
            patch.multiple(by_size, at_sizes=made_plain, study_lowered=studied),
            patch.object(SizedStudies, "at", asked),
        ):
            yield

    def sized(self, model: Any) -> SizedStep:
        assert self.joint is not None
        return SizedStep(model, self.step, self.study, Sizes(self.joint, self.given))


def _of_formula(model: Any, made: Sequence[_Made], outcome: Outcome) -> Iterator[Failure]:
    """Hold what the runtime takes for a formula against the steps of sizes that did not confirm it."""
    if len(made) < 2:
        return
    formula, second = (one.sized(model) for one in made[:2])
    if not formula.agrees(second, made[1].given):
        return
    for one in made[2:]:
        outcome.recomputing += 1
        assert one.joint is not None
        try:
            _, study = formula.at(one.given, Sizes(one.joint, one.given))
        except UnknownSizeError:
            continue
        if study.problem().baseline.timeline_bytes != one.study.problem().baseline.timeline_bytes:
            yield Failure("formula", f"batch {one.batch}: {_difference(study, one.study)}")


def _difference(study: Study, alone: Study) -> str:
    """Name the first few parts in which two studies differ."""
    (mine, *others), (theirs, *beside) = _said_by(study), _said_by(alone)
    pairs = {**{name: (mine[name], theirs[name]) for name in mine}, "costs": (others[0], beside[0])}
    parts = [
        f"{name} {at}: {a} for {b}"
        for name, (some, same) in pairs.items()
        if isinstance(some, (list, tuple)) and len(some) == len(same)
        for at, (a, b) in enumerate(zip(some, same, strict=True))
        if a != b
    ]
    whole = [name for name, (some, same) in pairs.items() if some != same]
    return "; ".join([f"differ in {', '.join(whole) or 'what is resident'}", *parts[:3]])
