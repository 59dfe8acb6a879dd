"""What an engine is given for a split: arguments of its command line, beside those that name the model."""

from __future__ import annotations

from planner.extras.splits.stages import has_short_ends
from planner.extras.splits.table import FULL, KEEP, ModelTable
from planner.extras.splits.types import FSDP2_KEPT, OPTIMIZER, REPLICATED, Estimate, Mixed, Question


def split_arguments(estimate: Estimate, table: ModelTable, question: Question) -> str:
    """Return what the engine of a split is given, one argument a line, beside those that name the model."""
    write = _torchtitan if estimate.split.engine == "torchtitan" else _megatron
    return "\n".join(write(estimate, table, question)) + "\n"


def _torchtitan(estimate: Estimate, table: ModelTable, question: Question) -> list[str]:
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
        return [*lines, f"activation_checkpoint:{'none' if share else 'full'}"]
    mode = ("activation_checkpoint:memory-budget", f"--activation_checkpoint.memory_budget {share:.2f}")
    return [*lines, "--compile.enable", *mode]


def _kept_share(stage: Mixed, table: ModelTable) -> float:
    """Return how much a stage keeps of what its layers save beyond their inputs."""
    saved = {choice.name: choice.saved_bytes for choice in table.kinds[-1].choices}
    room = saved[KEEP] - saved[FULL]
    held = stage.count * saved[stage.first] + (stage.layers - stage.count) * saved[stage.others]
    return (held / max(stage.layers, 1) - saved[FULL]) / room if room else 1.0


def _megatron(estimate: Estimate, table: ModelTable, question: Question) -> list[str]:
    """Return the arguments of Megatron-LM for a split, beside those that name the model.

    All stages are told one number of layers to run again: what the one needs that needs most.
    """
    split = estimate.split
    told: dict[str, object] = {
        "--tensor-model-parallel-size": split.tensor,
        "--pipeline-model-parallel-size": split.pipeline,
        "--micro-batch-size": split.micro_batch,
        "--global-batch-size": question.global_batch,
        "--seq-length": table.tokens,
    }
    flags = ["--bf16"]
    if split.tensor > 1:
        flags.append("--sequence-parallel")
    if split.chunks > 1:
        told["--num-virtual-stages-per-pipeline-rank"] = split.chunks
    if split.pipeline > 1 and has_short_ends(len(table.row), split.pipeline * split.chunks):
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if split.data > 1:
        flags.append("--overlap-grad-reduce")
    if split.sharding == OPTIMIZER:
        flags += ["--use-distributed-optimizer", "--overlap-param-gather"]
    again = max(-(-stage.count // split.chunks) for stage in estimate.stages)
    if again:
        told |= {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": again}
    return [*(f"{option} {value}" for option, value in told.items()), *flags]
