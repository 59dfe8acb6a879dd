"""torchtitan: a policy class beside its own ``FullAC``.

Its policies treat every block alike; a subclass that leaves some blocks unwrapped is what its
``activation_checkpoint`` field takes for a choice of layers.
Source: ``torchtitan/distributed/activation_checkpoint.py`` and ``torchtitan/trainer.py`` in
pytorch/torchtitan.
"""

from __future__ import annotations

from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.plans.plan import Plan


class _TorchTitan:
    name = "torchtitan"
    summary = "whole blocks run again, each to its end, where the plan chooses single operations"
    to_the_end = True
    lost = (
        "the blocks there are torchtitan's own: the choice carries over by number",
        "with compiled blocks torchtitan's fused kernels need other memory",
    )

    def takes(self, modules: tuple[str, ...]) -> bool:
        return False  # its blocks are its own

    def place(self, step: ExportStep) -> Placement:
        chosen = step.best_modules(step.row)
        positions = [index for index, block in enumerate(step.row) if block in chosen.modules]
        return Placement(modules=chosen.modules, settings={"numbers": positions})

    def write(self, placement: Placement, plan: Plan) -> str:
        return f'''\
# In a config_registry function: Trainer.Config(activation_checkpoint=PlannedAC.Config(), ...)
from dataclasses import dataclass

from torchtitan.distributed.activation_checkpoint import FullAC

BLOCKS = frozenset({placement.settings.get("numbers", [])})


class PlannedAC(FullAC):
    """Recompute the blocks of BLOCKS, by their number, and keep the others."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module, *, base_fqn=None):
        number = int(base_fqn.rpartition(".")[2])
        return super()._wrap_block(module, base_fqn=base_fqn) if number in BLOCKS else module


ACTIVATION_CHECKPOINT = PlannedAC.Config()
'''


EXPORTER = _TorchTitan()
