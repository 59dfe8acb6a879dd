"""Which combination of splits trains a model fastest on many devices, from one captured sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.analysis.splits.links import links_of
from planner.analysis.splits.search import search
from planner.analysis.splits.table import ModelTable, is_uniform
from planner.analysis.splits.types import FSDP2, REPLICATED, Answer, Confirmed, Estimate, Question
from planner.capture.inputs import Inputs, LossFunction
from planner.common.limits import Progress
from planner.common.options import ENGINES, Search, Target, Training
from planner.common.units import Size, parse_size
from planner.errors import UsageError
from planner.exporters._splits import split_arguments
from planner.measure import devices
from planner.session.split_tables import split_table
from planner.session.step import Options
from planner.session.studying import study

PROBED_LAYERS = 8
"""So many layers say how all are, if they are alike: a model of the zoo need not be captured whole."""

_DATA_PARALLEL = {FSDP2: "fsdp2", REPLICATED: "ddp"}
"""How the planner calls what it has an exact answer for."""


class LayersDifferError(UsageError):
    """Few layers cannot stand for all: they are not alike."""


def best_splits(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    gpus: int,
    global_batch: int,
    device: str,
    example_kwargs: Mapping[str, Any] | None = None,
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
    confirm: int = 0,
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
    example_inputs, example_kwargs, loss_fn, name, progress
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
    confirm : int
        For so many of them, at most, the planner itself plans the step; it can where replicas alone share the work.

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
    >>> import torch, planner
    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)))
    >>> answer = planner.best_splits(model, torch.randn(1, 64), loss_fn=lambda output: output.sum(), gpus=4,
    ...                              global_batch=32, device="h100")
    >>> answer.best[0].split.data, answer.best[0].split.micro_batch
    (4, 8)
    """
    spec = devices.find(device)
    training = Training(optimizer=optimizer, master_weights=master_weights, reserve=reserve)
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
    if confirm and layers is not None:
        raise UsageError("confirm needs the whole model: leave out layers")
    inputs = one_sample(Inputs.of(example_inputs, example_kwargs))
    options = Options(
        target=Target(device=device, cost_model="roofline"),
        training=training,
        search=Search(progress=progress),
        name=name,
    )
    table = split_table(model, inputs, loss_fn, options, tokens=tokens_of(inputs))
    answer = answered(table if layers is None else deeper(table, layers), question, progress)

    def at(samples: int) -> tuple[nn.Module, Inputs]:
        return model, inputs.with_batch(samples)

    return confirmed(answer, at, loss_fn, training, confirm, progress) if confirm else answer


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


def confirmed(
    answer: Answer,
    at: Callable[[int], tuple[nn.Module, Inputs]],
    loss_fn: LossFunction | None,
    training: Training,
    most: int,
    progress: Progress | None = None,
) -> Answer:
    """Have the planner itself plan the first of the best that replicas alone share; ``at`` gives samples of a size."""
    able = [estimate for estimate in answer.best if can_confirm(estimate)][:most]
    made = tuple(_confirmed(estimate, answer.question, at, loss_fn, training, progress) for estimate in able)
    return replace(answer, confirmed=made)


def can_confirm(estimate: Estimate) -> bool:
    """Whether the planner has an exact answer: replicas, or FSDP2, and nothing else."""
    split = estimate.split
    is_alone = split.tensor * split.pipeline * split.context * split.expert == 1
    return is_alone and split.sharding in _DATA_PARALLEL and split.engine == "torchtitan"


def _confirmed(
    estimate: Estimate,
    question: Question,
    at: Callable[[int], tuple[nn.Module, Inputs]],
    loss_fn: LossFunction | None,
    training: Training,
    progress: Progress | None,
) -> Confirmed:
    split, device = estimate.split, question.device
    model, inputs = at(split.micro_batch)
    if progress is not None:
        progress(f"planning micro-batches of {split.micro_batch}")
    how: dict[str, Any] = {"optimizer": training.optimizer, "master_weights": training.master_weights}
    if split.data > 1:
        how |= {"data_parallel": _DATA_PARALLEL[split.sharding], "ranks": split.data}
    count = split.micro_batches(question.global_batch)
    step = study(
        model,
        inputs,
        loss_fn=loss_fn,
        device=device.name,
        cost_model="roofline",
        deterministic=True,
        gradient_accumulation=count > 1,
        **how,
    )
    plan = step.plan(budget=question.memory_bytes + device.library_bytes)
    return Confirmed(
        split=split,
        peak_bytes=plan.whole_step_peak_bytes - device.library_bytes,
        estimated_peak_bytes=estimate.peak_bytes,
        recompute_seconds=plan.recompute_seconds,
        estimated_recompute_seconds=estimate.seconds["recompute"] / count,
    )
