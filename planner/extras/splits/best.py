"""Which combination of splits trains a model fastest on many devices, from one captured sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.capture.inputs import Inputs, LossFunction
from planner.common.limits import Progress
from planner.common.options import ENGINES, Search, Target, Training
from planner.common.units import Size, parse_size
from planner.errors import UsageError
from planner.extras.splits.captured_table import split_table
from planner.extras.splits.search import search
from planner.extras.splits.stages import has_short_ends
from planner.extras.splits.table import FULL, KEEP, ModelTable, is_uniform
from planner.extras.splits.types import (
    FSDP2_KEPT,
    OPTIMIZER,
    REPLICATED,
    Answer,
    Estimate,
    Mixed,
    Question,
    links_of,
)
from planner.measure import devices
from planner.session.step import Options

PROBED_LAYERS = 8
"""So many layers say how all are, if they are alike: a model of the zoo need not be captured whole."""


class LayersDifferError(UsageError):
    """Few layers cannot stand for all: they are not alike."""


def best_splits(
    model: nn.Module,
    inputs: Any = None,
    *,
    gpus: int,
    global_batch: int,
    device: str,
    loss_fn: LossFunction | None = None,
    layers: int | None = None,
    optimizer: str = "none",
    master_weights: bool = False,
    reserve: Size = 0,
    node_gpus: int = 8,
    node_link: Size | None = None,
    network: Size | None = None,
    overlap: bool = True,
    engines: Sequence[str] = ENGINES,
    top: int = 10,
    name: str = "",
    progress: Progress | None = None,
) -> Answer:
    """Find which split of a model over many devices trains most tokens a second within the memory of each.

    Nothing is run. Splits are over replicas (whose weights may be sharded), over devices that share each layer, over
    stages of a pipeline, over devices that share a sequence, and over experts; with them come the size of a
    micro-batch and what is recomputed.

    Parameters
    ----------
    model : torch.nn.Module
        Real, or built under ``planner.capture.fake_mode()`` to need no memory.
    inputs, loss_fn, name, progress
        See :func:`planner.plan`; the inputs are of one sample, of full length.
    gpus, global_batch : int
        Devices, and samples of a step.
    device : str
        Name in the table of devices, or a device file.
    layers : int, optional
        How many layers the model has, if the given one has fewer that are all alike.
    optimizer, master_weights, reserve
        See :func:`planner.plan`.
    node_gpus : int
        Devices of a node.
    node_link, network : int or str, optional
        Bytes a second that a device sends to others of its node, and to other nodes: ``"450GB"``. By default those of
        the vendor's own machines.
    overlap : bool
        Whether what replicas send each other hides behind arithmetic.
    engines : sequence of str
        Whose ways of splitting are tried: ``"torchtitan"``, ``"megatron"``.
    top : int
        How many answers are wanted.

    Returns
    -------
    Answer
        Plain data: the best, what each engine is given for its best, and why other combinations lost.

    Raises
    ------
    UsageError
        If an argument is wrong, or no degrees go together.
    CaptureError
        If the model cannot be captured as one graph.
    NoSplitFitsError
        An InfeasibleBudgetError with the smallest peak found, and of which split it is.

    Examples
    --------
    >>> import torch
    >>> from planner.extras.splits import best_splits
    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)))
    >>> answer = best_splits(model, torch.randn(1, 64), loss_fn=lambda output: output.sum(), gpus=4,
    ...                              global_batch=32, device="h100")
    >>> answer.best[0].split.data, answer.best[0].split.micro_batch
    (4, 8)
    """
    spec = devices.find(device)
    training = Training(optimizer, master_weights=master_weights, reserve=reserve)
    links = links_of(spec, node_devices=node_gpus, node_link=node_link, network=network)
    reserved = parse_size(reserve, whole_bytes=spec.memory_bytes) if reserve else 0
    question = Question(
        gpus=gpus,
        global_batch=global_batch,
        device=spec,
        links=links,
        memory_bytes=spec.memory_bytes - spec.library_bytes - reserved,
        engines=tuple(engines),
        overlap=overlap,
        most=top,
    )
    inputs = one_sample(Inputs.of(inputs))
    options = Options(
        target=Target(device, cost_model="roofline"),
        training=training,
        search=Search(progress=progress),
        name=name,
    )
    table = split_table(model, inputs, loss_fn, options, tokens=tokens_of(inputs))
    return answered(table if layers is None else deeper(table, layers), question, progress)


def answered(table: ModelTable, question: Question, progress: Progress | None = None) -> Answer:
    """Search, and write for the best split of each engine what it is to be given."""
    answer = search(table, question, progress)
    told = {engine: split_arguments(best, table, question) for engine, best in answer.of_engine.items()}
    return replace(answer, arguments=told)


def one_sample(inputs: Inputs) -> Inputs:
    """Refuse inputs of several samples."""
    if inputs.batch_size != 1:
        raise UsageError(f"give inputs of one sample, not of {inputs.batch_size}: splits decide how many go together")
    return inputs


def tokens_of(inputs: Inputs) -> int | None:
    """Return the length of a sequence of token ids; None where the first input is anything else."""
    first = inputs.tensors()[0]
    return first.shape[1] if first.dim() == 2 and first.dtype in (torch.int64, torch.int32) else None


def deeper(table: ModelTable, layers: int) -> ModelTable:
    """Return the table of a model that has more layers than were captured; LayersDifferError if they are not alike."""
    if not is_uniform(table):
        raise LayersDifferError(f"the layers of {table.name} are not alike: capture all of them, and leave out layers")
    note = f"{layers} layers are like the second of the {len(table.row)} that were captured"
    return replace(table.deeper(layers), assumed=(*table.assumed, note))


def split_arguments(estimate: Estimate, table: ModelTable, question: Question) -> str:
    """Return what the engine of a split is given, one argument a line, beside those that name the model."""
    return _WRITERS[estimate.split.engine](estimate, table, question)


def _torchtitan(estimate: Estimate, table: ModelTable, question: Question) -> str:
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


def _megatron(estimate: Estimate, table: ModelTable, question: Question) -> str:
    """Return the arguments of Megatron-LM for a split, beside those that name the model.

    All stages are told one number of layers to run again: what the one needs that needs most.
    """
    split = estimate.split
    told: dict[str, object] = {
        "--tensor-model-parallel-size": split.tensor,
        "--pipeline-model-parallel-size": split.pipeline,
        "--context-parallel-size": split.context,
        "--micro-batch-size": split.micro_batch,
        "--global-batch-size": question.global_batch,
        "--seq-length": table.tokens,
    }
    flags = ["--bf16"]
    if split.expert > 1:
        told["--expert-model-parallel-size"] = split.expert
    if split.tensor > 1:
        flags.append("--sequence-parallel")
    if split.chunks > 1:
        told["--num-virtual-stages-per-pipeline-rank"] = split.chunks
    if split.pipeline > 1 and has_short_ends(len(table.row), split.pipeline * split.chunks):
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if split.shards > 1:
        flags.append("--overlap-grad-reduce")
    if split.sharding == OPTIMIZER:
        flags += ["--use-distributed-optimizer", "--overlap-param-gather"]
    again = max(-(-stage.count // split.chunks) for stage in estimate.stages)
    if again:
        told |= {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": again}
    return "\n".join([*(f"{option} {value}" for option, value in told.items()), *flags]) + "\n"


_WRITERS = {"torchtitan": _torchtitan, "megatron": _megatron}
