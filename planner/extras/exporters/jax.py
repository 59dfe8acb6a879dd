"""JAX: ``jax.checkpoint`` around blocks, with ``save_only_these_names`` for what is kept inside.

Names are given by ``checkpoint_name``; ``save_only_these_names`` keeps what has one of them and recomputes
the rest of the block. (``save_anything_except_these_names`` saves everything, named or not.)
Source: ``jax/_src/ad_checkpoint.py`` in jax-ml/jax, and
https://docs.jax.dev/en/latest/gradient-checkpointing.html.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._whole_modules import OwnLayers, comment, names, numbers
from planner.ir.checkpoints import Saved, forward_of
from planner.ir.graph import Phase
from planner.plans.plan import Plan

_TRIED = 8
"""Modules whose output may be kept."""


class _JAX(OwnLayers):
    name = "jax"
    summary = "whole blocks run again but what is named, where the plan chooses single operations of the PyTorch model"
    to_the_end = False
    lost = (
        "the model there is another, in another framework: the choice carries over by the numbers of blocks and the "
        "names given in its code",
        "XLA fuses operations and orders them itself, so its memory differs",
    )

    def place(self, step: ExportStep) -> Placement:
        row = step.row
        best = step.best_of([step.best_modules(row), *_keeping(step)])
        positions = [index for index, block in enumerate(row) if block in best.modules]
        return Placement(groups=best.groups, saved=best.saved, saves=best.saves, settings={"numbers": positions})

    def write(self, placement: Placement, plan: Plan) -> str:
        tagged = "".join(
            comment(
                f'In block_fn, tag the output of what is {name} in the PyTorch block: x = checkpoint_name(x, "{name}").'
            )
            for name in placement.saved
        )
        return f"""\
{comment("Block number i: x = planned_block(i, block_fn)(params[i], x).")}{tagged}\
import jax
from jax.ad_checkpoint import checkpoint_name  # noqa: F401

{numbers("BLOCKS", placement.settings.get("numbers", ()))}
{names("SAVED", placement.saved)}
POLICY = jax.checkpoint_policies.save_only_these_names(*SAVED)


def planned_block(number, block_fn):
    return jax.checkpoint(block_fn, policy=POLICY) if number in BLOCKS else block_fn
"""


def _makes_output_of(step: ExportStep, modules: tuple[str, ...]) -> Saved:
    """Say of an operation whether it makes the output of one of some modules, named by their path within a block."""
    last = {operation.module: operation.name for operation in step.graph.operations if operation.phase is Phase.FORWARD}
    ends = tuple(f".{module}" for module in modules)
    made = {name for module, name in last.items() if module.endswith(ends)}
    return lambda operation: operation.name in made


def _keeping(step: ExportStep) -> Iterator[Placement]:
    """Return the placements that run every block again and keep what modules in them make, the dearest first."""
    groups = tuple((block,) for block in step.row)
    saved: tuple[str, ...] = ()
    least = step.figures(Placement(groups=groups)).overhead
    for module in _dearest(step)[:_TRIED]:
        kept = (*saved, module)
        placement = Placement(groups=groups, saved=kept, saves=_makes_output_of(step, kept))
        overhead = step.figures(placement).overhead
        if overhead < least:
            saved, least = kept, overhead
            yield placement


def _dearest(step: ExportStep) -> list[str]:
    """Return the modules within blocks, by their paths there, in the order of their forward's time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for block in step.row:
        for index in forward_of(step.graph, [block]):
            inside = step.graph.operations[index].module.removeprefix(block).removeprefix(".")
            if inside:
                seconds[inside] += step.problem.costs[index].seconds
    return sorted(seconds, key=lambda inside: -seconds[inside])


EXPORTER = _JAX()
