"""What waits in the host's memory, and how much of its way there and back shows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from planner.common.units import format_bytes, format_seconds
from planner.ir.layers import collapse
from planner.plans.module_choices import modules_of
from planner.plans.offload import OffloadedModule
from planner.plans.plan import Plan


def render(plan: Plan) -> Text | None:
    """Say what is offloaded and what that takes; nothing where it was not allowed."""
    offloading = plan.offloading
    if offloading is None:
        return None
    link = f"{offloading.bytes_per_second / 1e9:,.1f} GB/s each way"
    if not offloading.values:
        return Text(f"Nothing is offloaded; the host's memory is reached with {link}.")
    count = len(offloading.values)
    rounded = (
        f" {offloading.rounded} of them {'is' if offloading.rounded == 1 else 'are'} rounded to bfloat16 there, at "
        "half the size: gradients are not bit-equal, and 'verify' measures by how much."
        if offloading.rounded
        else ""
    )
    here = " On a CPU that is the same memory, so all this shows is what would move." if plan.device == "cpu" else ""
    hidden_seconds = offloading.transfer_seconds - offloading.stall_seconds
    return Text(
        f"{count} {'value waits' if count == 1 else 'values wait'} in the host's memory: "
        f"{format_bytes(offloading.host_bytes)} ({offloading.host_bytes:,} bytes) of the "
        f"{format_bytes(offloading.host_budget_bytes)} that they may take. Transfers take "
        f"{format_seconds(offloading.transfer_seconds)} at {link}; {format_seconds(hidden_seconds)} of it "
        f"hides behind computing, and the step waits {format_seconds(offloading.stall_seconds)} for the rest."
        f"{rounded}{here}" + "".join(f"\n{line}" for line in _senders(plan, offloading.modules))
    )


def _senders(plan: Plan, modules: Sequence[OffloadedModule]) -> list[str]:
    """Name the modules that send, those that are alike in one line."""
    checkpointed = set(modules_of(plan))
    what = []
    for one in modules:
        whose = "that its checkpoint is given" if one.module in checkpointed else "that it saves"
        what.append(f"{len(one.tensors)} of the tensors {whose}")
    return [
        f"{label}: {what[positions[0]]}" + (" each" if len(positions) > 1 else "")
        for label, positions in collapse([one.module for one in modules], what)
    ]
