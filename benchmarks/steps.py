"""Real steps of one model in several ways: which way it runs, what a step allocates, how long each takes in turn."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import planner
from benchmarks.common import Result
from planner.capture.inputs import run_step
from planner.capture.memory import measure_peak
from planner.capture.torch_internals import install_call, installed_call
from planner.common.options import AUTO
from planner.zoo import ZooModel

FEWEST_ROUNDS, MOST_ROUNDS = 5, 400
OBSERVED = 8
"""Steps after which a loop is not observed any more."""


def step_of(loaded: ZooModel) -> Callable[[], Any]:
    """Return what runs forward and backward once."""
    call = partial(loaded.model, *loaded.example_args, **loaded.example_kwargs)
    return partial(run_step, call, loaded.loss_fn, AUTO)


def use(model: nn.Module, call: Any) -> None:
    """Let the model run a runtime's call, or itself if that is None."""
    install_call(model, call)
    model.zero_grad(set_to_none=True)


def without_recompute(loaded: ZooModel, runtime: str, limit_seconds: float) -> Result:
    """Hold steps of a runtime that recomputes nothing against eager ones, in turn: peak, time and gradients."""
    model, step = loaded.model, step_of(loaded)
    try:
        planner.auto_wrap(model, budget=sys.maxsize, runtime=runtime, search=planner.Search(time_limit_seconds=1.0))
        for _ in range(OBSERVED):  # captures, then measures what the loop holds, under a profiler
            model.zero_grad(set_to_none=True)
            step()
        ways = [(partial(use, model, call), step) for call in (None, installed_call(model))]
        gradients = [_gradients(model, *way) for way in ways]
        peaks = [peak_bytes(*way) for way in ways]
        seconds = in_turn(ways, limit_seconds)
    finally:
        planner.unwrap(model)
        model.zero_grad(set_to_none=True)
    return {
        "status": "run", "eager_peak_bytes": peaks[0], "peak_ratio": peaks[1] / peaks[0],
        "eager_seconds": median(eager for eager, _ in seconds),
        "time_ratio": median(own / eager for eager, own in seconds), "pairs": len(seconds),
        "bitwise_equal": all(map(torch.equal, *gradients)),
    }  # fmt: skip


def _gradients(model: nn.Module, prepare: Callable[[], None], step: Callable[[], Any]) -> list[torch.Tensor]:
    prepare()
    torch.manual_seed(0)
    step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def peak_bytes(prepare: Callable[[], None], step: Callable[[], Any]) -> int:
    """Measure what a step allocates once everything is made that is made only once."""
    prepare()
    step()
    prepare()
    return measure_peak(step, torch.device("cpu"))[0]


def in_turn(
    ways: Sequence[tuple[Callable[[], None], Callable[[], Any]]],
    limit_seconds: float,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[float, ...]]:
    """Time all ways in turn, in another order each round: a machine that is shared is faster at one time than another.

    On one thread the processor's time counts, which leaves out what else runs on the machine.
    ``count`` hears after each round how many seconds of the limit have passed.

    Returns
    -------
    list of tuple of float
        For each round the seconds of each way.
    """
    order, shuffle = list(range(len(ways))), random.Random(0).shuffle
    rounds: list[tuple[float, ...]] = []
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = time.perf_counter()
    while len(rounds) < FEWEST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() - begun < limit_seconds):
        took = [0.0] * len(ways)
        shuffle(order)
        for number in order:
            prepare, step = ways[number]
            prepare()
            before = clock()
            step()
            took[number] = clock() - before
        rounds.append(tuple(took))
        count(int(min(time.perf_counter() - begun, limit_seconds)), int(limit_seconds))
    return rounds
