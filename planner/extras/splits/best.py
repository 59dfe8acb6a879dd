"""Which combination of splits trains a model fastest on many devices, from one captured sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planner.capture.inputs import Inputs, LossFunction
from planner.common.limits import Progress
from planner.common.options import ENGINES, Target, Training
from planner.common.units import Size, parse_size
from planner.errors import UsageError
from planner.extras.splits.captured_table import split_table
from planner.extras.splits.search import search
from planner.extras.splits.types import Answer, Question, links_of
from planner.measure import devices
from planner.session.step import Options

PROBED_LAYERS = 8
"""So many layers say how all are, if they are alike: a model of the zoo need not be captured whole."""


def best_splits(
    model: nn.Module,
    inputs: Any = None,
    *,
    gpus: int,
    global_batch: int,
    device: str,
    loss_fn: LossFunction | None = None,
    layers: int | None = None,
    training: Training | str = Training(),
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

    Nothing is run. Splits are over replicas (whose weights may be sharded), over devices that share each layer, and
    over stages of a pipeline; with them come the size of a micro-batch and what is recomputed.

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
    training : str or Training
        See :func:`planner.plan`; its optimizer, master weights and reserve count.
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
    options = Options.of({"training": training, "name": name}, target=Target(device, cost_model="roofline"))
    reserve = options.training.reserve
    reserve_bytes = parse_size(reserve, whole_bytes=spec.memory_bytes) if reserve else 0
    question = Question(
        gpus=gpus,
        global_batch=global_batch,
        device=spec,
        links=links_of(spec, node_devices=node_gpus, node_link=node_link, network=network),
        memory_bytes=spec.memory_bytes - spec.library_bytes - reserve_bytes,
        engines=tuple(engines),
        overlap=overlap,
        most=top,
    )
    inputs = Inputs.of(inputs)
    if inputs.batch_size != 1:
        raise UsageError(f"give inputs of one sample, not of {inputs.batch_size}: splits decide how many go together")
    first = inputs.tensors()[0]
    is_sequence = first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
    table = split_table(model, inputs, loss_fn, options, tokens=first.shape[1] if is_sequence else None)
    return search(table if layers is None else table.deeper(layers), question, progress)
