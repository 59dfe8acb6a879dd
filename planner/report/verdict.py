"""What a report says of a plan in sentences: the verdict, what is offloaded, how far to trust the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.text import Text

from planner.common.units import format_bytes, format_seconds, in_unit_of
from planner.plans.plan import PeakLocation, Plan
from planner.report.style import at_least_percent, counted, signed_percent, table

_SOURCES = {
    "roofline": "figures of a data sheet, good to rank choices and rough for the slowdown",
    "measured": "each different operation timed alone on this machine",
    "recorded": "each different operation timed alone before",
}


def verdict(plan: Plan) -> str:
    """Return the verdict on a plan as one line."""
    away = f" · {format_bytes(plan.offloading.host_bytes)} offloaded" if plan.offloading else ""
    against = " vs eager" if plan.eager is not None else ""
    proven = f" ({bound(plan)})" if plan.added_seconds > 0 else ""
    cost = f"{signed_percent(plan.over_eager(plan.overhead))} step time{against}{proven}"
    return f"FITS {_peak_of_budget(plan)} · {cost} · {recomputed(plan)}{away}"


def brief(plan: Plan) -> str:
    """Return what a wrapped model says once it is planned."""
    return f"planned: {_peak_of_budget(plan)}, {signed_percent(plan.over_eager(plan.overhead))} step time"


def _peak_of_budget(plan: Plan) -> str:
    sizes = (plan.whole_step_peak_bytes, plan.budget_bytes)
    peak, budget = (in_unit_of(size, plan.budget_bytes, digits=1) for size in sizes)
    return f"{peak.split()[0]} of {budget}"


def bound(plan: Plan) -> str:
    """Say what is proven of all plans within the budget, over the same step as the verdict's step time."""
    if plan.lower_bound_seconds <= 0 < plan.added_seconds:
        return "no lower bound proven"
    plans = "plan in this order" if plan.order else "plan"
    return f"no {plans} below {at_least_percent(plan.over_eager(plan.lower_bound_overhead))}"


def order_saves(plan: Plan) -> str:
    """Say what running operations in another order saves; ``""`` if they run as captured."""
    captured = plan.captured_order
    if captured is None:
        return ""
    if captured.recompute_seconds is not None:
        without = plan.over_eager(plan.relative(captured.recompute_seconds))
        saved = f"{signed_percent(without)} step time in the captured order"
    elif plan.added_seconds > 0:
        saved = "no plan that fits was found in the captured order"
    else:
        saved = f"the captured order needs {format_bytes(plan.baseline_peak_bytes)} without recompute"
    return f"{counted(captured.moved, 'operation')} moved within data dependencies: {saved}"


def recomputed(plan: Plan) -> str:
    """Say how many operations are recomputed, as the rows of the layers do; one that runs three times counts twice."""
    count = sum(layer.recomputed for layer in plan.placement)
    return f"{counted(count, 'op')} recomputed" if count else "nothing recomputed"


def infeasible_verdict(report: dict[str, Any]) -> str:
    """Return the verdict on a budget that no plan fits as one line."""
    where = PeakLocation(**report["peak_at"])
    smallest_bytes = report["minimum_feasible_peak_bytes"]
    none_below = none_needs_less(report["proven_minimum_peak_bytes"], smallest_bytes)
    return (
        f"DOES NOT FIT {format_bytes(report['budget_bytes'])} · smallest budget known to fit "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes{none_below}) · bound by {where}"
    )


def none_needs_less(proven_bytes: int, smallest_bytes: int) -> str:
    """Say what is proven of the smallest budget, if that is less than the smallest that is known."""
    return f", none below {format_bytes(proven_bytes)}" if 0 < proven_bytes < smallest_bytes else ""


def render_offloading(plan: Plan) -> Text | None:
    """Say what is offloaded and what that takes; nothing where it was not allowed."""
    offloading = plan.offloading
    if offloading is None:
        return None
    link = f"{offloading.bytes_per_second / 1e9:,.1f} GB/s each way"
    if not offloading.values:
        return Text(f"Nothing is offloaded; the host's memory is reached with {link}.")
    count = len(offloading.values)
    here = " On a CPU that is the same memory, so all this shows is what would move." if plan.device == "cpu" else ""
    hidden_seconds = offloading.transfer_seconds - offloading.stall_seconds
    without = ""
    if offloading.alone_seconds is not None:
        overhead = plan.over_eager(plan.relative(offloading.alone_seconds))
        without = f" Without offload the overhead would be {signed_percent(overhead)}."
    return Text(
        f"{count} {'value waits' if count == 1 else 'values wait'} in the host's memory: "
        f"{format_bytes(offloading.host_bytes)} ({offloading.host_bytes:,} bytes) of the "
        f"{format_bytes(offloading.host_budget_bytes)} that they may take. Transfers take "
        f"{format_seconds(offloading.transfer_seconds)} at {link}; {format_seconds(hidden_seconds)} of it "
        f"hides behind computing, and the step waits {format_seconds(offloading.stall_seconds)} for the "
        f"rest.{without}{here}"
    )


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
    kinds = {"optimizer": "an optimizer (--optimizer)", "reserve": "a reserve (--reserve)"}
    missing = [what for kind, what in kinds.items() if kind not in plan.static_bytes]
    if missing:
        yield f"Not counted, because you did not ask for it: {', '.join(missing)}."
    if plan.verification is None:
        yield "This is predicted. 'verify' runs real steps and compares peak and bits."


def render_measured(plan: Plan) -> Group | None:
    """Show predictions beside measured steps, if any were run."""
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
    buffers, gradients = measured.buffers_equal, measured.gradients_bitwise_equal
    agree = (("loss", measured.loss_equal), ("gradients", gradients), ("buffers", buffers))
    words = ", ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in agree)
    exact = Text(f"Bit for bit against the step without recompute: {words}", style="" if measured.agrees else "red")
    if measured.eager is not None:
        exact.append(f". Against eager: {'equal' if measured.eager.equal else 'not all bits are equal'}")
    if measured.control:
        kept = "is no further off than that allows" if measured.agrees else "is FURTHER OFF"
        exact.append(f". Two steps without the plan differ by {measured.control:.2g} of their length; the plan {kept}")
    elif measured.tolerance:
        kept = "they stay within" if measured.agrees else "they DO NOT stay within"
        exact.append(f". This runtime promises no bits: {kept} {measured.tolerance:g} of each other")
    if measured.from_one_piece:
        exact.append(f". From the step in one piece they are {measured.from_one_piece:.1g} of their length away")
    differences = (Text(f"differs: {line}") for line in measured.differences)
    return Group(shown, exact, *differences)
