"""How far to trust the report: what real steps showed, what it stands on, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from planner.common.units import format_seconds
from planner.plans.plan import Plan
from planner.report.style import signed_percent, table
from planner.report.verdict import none_needs_less

_SOURCES = {
    "roofline": "figures of a data sheet, good to rank choices and rough for the slowdown",
    "measured": "each different operation timed alone on this machine",
    "recorded": "each different operation timed alone before",
}


def render(plan: Plan) -> Group:
    """Say what costs, solver and versions the plan stands on."""
    return Group(Text("How far to trust it", style="bold"), *map(Text, statements(plan)))


def statements(plan: Plan) -> Iterator[str]:
    """Say where the numbers come from, what is assumed, and what would prove them."""
    source = _SOURCES.get(plan.cost_model.split()[0] if plan.cost_model else "", "")
    yield (
        f"The step without recompute takes {format_seconds(plan.baseline_step_seconds)} by the {plan.cost_model} cost "
        f"model of {plan.device}" + (f": {source}." if source else ".")
    )
    if plan.eager is not None:
        yield (
            f"Eager's own step, recorded without data, takes {format_seconds(plan.eager.step_seconds)} by the same "
            f"costs and {plan.eager.peak_bytes:,} bytes: percentages of the budget are of that peak, and overheads "
            "are over that time."
        )
    yield (
        f"The smallest budget known to fit is {plan.minimum_feasible_peak_bytes:,} bytes"
        f"{none_needs_less(plan.proven_minimum_peak_bytes, plan.minimum_feasible_peak_bytes)}. Captured in "
        f"{format_seconds(plan.capture_seconds)}{f', torch {plan.torch}' if plan.torch else ''}; solved in "
        f"{format_seconds(plan.solve_seconds)} by {plan.solver} ({plan.status})."
    )
    missing = [
        what
        for kind, what in (("optimizer", "an optimizer (--optimizer)"), ("reserve", "a reserve (--reserve)"))
        if kind not in plan.static_bytes
    ]
    if missing:
        yield f"Not counted, because you did not ask for it: {', '.join(missing)}."
    if plan.verification is None:
        yield "This is predicted. 'verify' runs real steps and compares peak and bits."


def render_measured(plan: Plan) -> Group | None:
    """Show what was predicted beside what real steps showed, if they have been run."""
    measured = plan.verification
    if measured is None:
        return None
    peaks = [
        ("peak with the plan, bytes", plan.peak_bytes, measured.peak_bytes),
        ("peak without it, bytes", plan.baseline_peak_bytes, measured.baseline_peak_bytes),
    ]
    overheads = [("overhead", plan.overhead, measured.overhead)]
    if plan.eager is not None and measured.eager is not None:
        peaks.append(("peak of eager, bytes", plan.eager.peak_bytes, measured.eager.peak_bytes))
        overheads.append(("step time against eager", plan.over_eager(plan.overhead), measured.eager.overhead))
    shown = table(
        f"Measured in {measured.steps} real steps",
        [
            *((name, f"{expected:,}", f"{seen:,}", f"{seen - expected:+,} bytes") for name, expected, seen in peaks),
            *(
                (name, signed_percent(expected), signed_percent(seen), f"{(seen - expected) * 100:+.1f} points")
                for name, expected, seen in overheads
            ),
        ],
        ("", lambda row: row[0], str),
        ("predicted", lambda row: row[1], str),
        ("measured", lambda row: row[2], str),
        ("difference", lambda row: row[3], str),
    )
    agree = (
        ("loss", measured.loss_equal),
        ("gradients", measured.gradients_bitwise_equal),
        ("buffers", measured.buffers_equal),
    )
    words = ", ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in agree)
    exact = Text(f"Bit for bit against the step without recompute: {words}", style="" if measured.agrees else "red")
    if measured.eager is not None:
        exact.append(f". Against eager: {'equal' if measured.eager.equal else 'not all bits are equal'}")
    if measured.rounding_error is not None:
        exact.append(
            ". Values are rounded on their way to the host, so no bits are promised: loss and gradients are off by up "
            f"to {measured.rounding_error:.2g} of their length ({measured.tolerance:g} is allowed)"
        )
    elif measured.control:
        kept = "is no further off than that allows" if measured.agrees else "is FURTHER OFF"
        exact.append(f". Two steps without the plan differ by {measured.control:.2g} of their length; the plan {kept}")
    elif measured.tolerance:
        kept = "they stay within" if measured.agrees else "they DO NOT stay within"
        exact.append(f". This runtime promises no bits: {kept} {measured.tolerance:g} of each other")
    if measured.from_one_piece:
        exact.append(f". From the step in one piece they are {measured.from_one_piece:.1g} of their length away")
    differences = (Text(f"differs: {line}") for line in measured.differences)
    return Group(shown, exact, *differences)
