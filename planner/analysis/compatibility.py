"""Check which options of a plan go together, and which plans can be run."""

from __future__ import annotations

from planner import solvers, strategies
from planner.common.options import Offload
from planner.errors import RuntimeUnsupportedError, UsageError
from planner.plans.plan import Plan

OFFLOAD = ("graph", "inductor", "regional", "inductor_blocks", "parts")
"""Runtimes whose graphs copy values to the host and back where the plan says."""

_DOES_NOT_OFFLOAD = "the runtime {!r} does not offload: use another, or save_on_cpu of torch.autograd.graph"


def check_offload(runtime: str, asked: Offload) -> None:
    """Refuse to plan offload for a runtime without it; which of them ``"auto"`` takes is seen when it plans."""
    if asked.enabled is True and runtime not in ("auto", *OFFLOAD):
        raise UsageError(_DOES_NOT_OFFLOAD.format(runtime))


def check_solver(runtime: str, name: str) -> None:
    """Refuse a solver that is not known, and one of whole graphs where modules are chosen."""
    solvers.get(name)
    if runtime == "modules":
        solvers.check_for_regions(name)


def check_strategy(name: str | None, runtime: str, *, offload: bool, in_chunks: bool = False) -> None:
    """Refuse a strategy of an established system that is not known, and what does not go with one."""
    if name is None:
        return
    strategies.get(name)
    if runtime not in ("auto", "graph", "modules"):
        raise UsageError(f"only 'graph' and 'modules' carry out a strategy, not {runtime!r}: leave runtime out")
    if offload:
        raise UsageError("a strategy decides itself what is offloaded: leave offload out")
    if in_chunks:
        raise UsageError("a strategy needs the step in one piece: leave chunk out")


def chunked_graph(runtime: str, *, several_devices: bool) -> str:
    """Return the runtime that a step in chunks is planned for."""
    if several_devices:
        raise UsageError("a step in chunks is planned for one device: leave out chunk")
    if runtime not in ("auto", "graph"):
        raise UsageError(f"a step in chunks is planned on the whole graph: leave out runtime={runtime!r}")
    return "graph"


def check_can_run(plan: Plan) -> None:
    """Refuse to run a plan that its runtime cannot carry out."""
    if plan.offloading is not None and plan.runtime not in OFFLOAD:
        raise RuntimeUnsupportedError(f"the plan offloads, and {_DOES_NOT_OFFLOAD.format(plan.runtime)}")
