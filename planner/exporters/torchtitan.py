"""torchtitan: a policy class beside its own ``FullAC``.

Its policies treat every block alike; a subclass that leaves some blocks unwrapped is what its
``activation_checkpoint`` field takes for a choice of layers. Where all blocks run again, its own
``FullAC`` does, ``activation_checkpoint:full`` on the command line.
Source: ``torchtitan/distributed/activation_checkpoint.py`` and ``torchtitan/trainer.py`` in
pytorch/torchtitan.
"""

from __future__ import annotations

from planner.analysis.splits.stages import has_short_ends
from planner.analysis.splits.table import FULL, KEEP, ModelTable
from planner.analysis.splits.types import FSDP2_KEPT, REPLICATED, Estimate, Mixed, Question
from planner.exporters._export import Placement
from planner.exporters._step import ExportStep
from planner.exporters._text import numbers
from planner.exporters._whole_modules import OwnLayers
from planner.plans.plan import Plan


class _TorchTitan(OwnLayers):
    name = "torchtitan"
    summary = "whole blocks run again, each to its end, where the plan chooses single operations"
    eager = True
    lost = (
        "the blocks there are torchtitan's own: the choice carries over by number",
        "with compiled blocks torchtitan's fused kernels need other memory",
    )

    def place(self, step: ExportStep) -> Placement:
        chosen = step.best_modules(step.row)
        positions = [index for index, block in enumerate(step.row) if block in chosen.modules]
        return Placement(groups=chosen.groups, settings={"numbers": positions, "all": len(positions) == len(step.row)})

    def write(self, placement: Placement, plan: Plan) -> str:
        if not placement.groups:
            return """\
# In a config_registry function: Trainer.Config(activation_checkpoint=ACTIVATION_CHECKPOINT, ...);
# on the command line: activation_checkpoint:none
ACTIVATION_CHECKPOINT = None
"""
        if placement.settings["all"]:
            return """\
# In a config_registry function: Trainer.Config(activation_checkpoint=ACTIVATION_CHECKPOINT, ...);
# on the command line: activation_checkpoint:full
from torchtitan.distributed.activation_checkpoint import FullAC

ACTIVATION_CHECKPOINT = FullAC.Config()
"""
        return f'''\
# In a config_registry function: Trainer.Config(activation_checkpoint=PlannedAC.Config(), ...)
from dataclasses import dataclass

from torchtitan.distributed.activation_checkpoint import FullAC

{numbers("BLOCKS", placement.settings["numbers"])}

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


def split_arguments(estimate: Estimate, table: ModelTable, question: Question) -> str:
    """Return the options of torchtitan for a split, beside those that name the model.

    Its ``memory-budget`` mode keeps the share of what a layer saves that the split assumes; it compiles the model.
    """
    split = estimate.split
    is_replicated = split.sharding == REPLICATED
    told: dict[str, object] = {
        "training.max_context_length": table.tokens,
        "training.num_tokens_per_microbatch_per_dp_rank": split.micro_batch * table.tokens,
        "training.num_tokens_per_train_step": question.global_batch * table.tokens,
        "parallelism.data_parallel_replicate_degree": split.data if is_replicated else 1,
        "parallelism.data_parallel_shard_degree": 1 if is_replicated else split.data,
        "parallelism.fsdp_reshard_after_forward": "never" if split.sharding == FSDP2_KEPT else "always",
        "parallelism.tensor_parallel_degree": split.tensor,
        "parallelism.context_parallel_degree": split.context,
        "parallelism.expert_parallel_degree": split.expert,
        "parallelism.pipeline_parallel_degree": split.pipeline,
    }
    if split.pipeline > 1:
        groups = split.pipeline * split.chunks
        less = int(has_short_ends(len(table.row), groups))
        told |= {
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B" if split.chunks > 1 else "1F1B",
            "parallelism.pipeline_parallel_layers_per_stage": (len(table.row) + 2 * less) // groups,
            "parallelism.pipeline_parallel_first_stage_less_layers": less,
            "parallelism.pipeline_parallel_last_stage_less_layers": less,
            "parallelism.num_pp_microbatches": split.micro_batches(question.global_batch),
        }
    lines = [f"--{option} {value}" for option, value in told.items()]
    share = min(_kept_share(stage, table) for stage in estimate.stages)
    if share in (0, 1):
        return "\n".join([*lines, f"activation_checkpoint:{'none' if share else 'full'}"]) + "\n"
    mode = ("activation_checkpoint:memory-budget", f"--activation_checkpoint.memory_budget {share:.2f}")
    return "\n".join([*lines, "--compile.enable", *mode]) + "\n"


def _kept_share(stage: Mixed, table: ModelTable) -> float:
    """Return how much a stage keeps of what its layers save beyond their inputs."""
    saved = {choice.name: choice.saved_bytes for choice in table.kinds[-1].choices}
    room = saved[KEEP] - saved[FULL]
    held = stage.count * saved[stage.first] + (stage.layers - stage.count) * saved[stage.others]
    return (held / max(stage.layers, 1) - saved[FULL]) / room if room else 1.0


EXPORTER = _TorchTitan()
