"""Many random models, in processes of their own, and a summary of what came of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tests.fuzz import source

MODELS_PER_PROCESS = 250
"""Dynamo keeps what it compiled: a process makes room after so many."""


def main() -> int:
    """Check random models, and print each one that breaks a promise, with its seed and its source."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--models", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further model after so long")
    parser.add_argument("--json", metavar="FILE", help="write what came out")
    parser.add_argument("--show", action="store_true", help="print the source of the models, and check none")
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.models)
    if chosen.show:
        for seed in seeds:
            print(f"# seed {seed}\n{source.write(seed)}")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun, outcomes = time.monotonic(), []
    for outcome, text in _checked(seeds, chosen.jobs, begun + 60 * chosen.minutes):
        outcomes.append(outcome)
        if text:
            print(text, flush=True)
        if len(outcomes) % 20 == 0:
            print(f"{len(outcomes)} models, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    summary = _summary(outcomes, chosen.seed, time.monotonic() - begun)
    print(json.dumps({key: value for key, value in summary.items() if key not in ("failures", "refusals")}, indent=2))
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as stream:
            json.dump(summary, stream, indent=2)
    return 1 if summary["failed"] else 0


def _checked(seeds: Iterable[int], jobs: int, until: float) -> Iterator[tuple[dict[str, Any], str]]:
    """Check models in processes; where one dies, the first that has not ended is tried alone, to know which it was."""
    from tests.fuzz.check import Failure, Outcome

    left = list(seeds)
    while left:
        with _processes(jobs) as pool:
            tasks = [(seed, pool.submit(_check, seed, until)) for seed in left]
            try:
                for _, task in tasks:
                    yield task.result()
                    del left[0]
                return
            except BrokenProcessPool:
                pass
        seed = left.pop(0)
        with _processes(1) as pool:
            try:
                alone = pool.submit(_check, seed, until).result()
            except BrokenProcessPool as error:
                outcome = Outcome(seed, "", tuple(range(source.count(seed))), [Failure("process died", str(error))])
                alone = dataclasses.asdict(outcome), f"\nseed {seed}: its process died\n{source.write(seed)}"
        yield alone


def _processes(jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=MODELS_PER_PROCESS)


def _check(seed: int, until: float) -> tuple[dict[str, Any], str]:
    if time.monotonic() > until:
        return {"seed": seed, "skipped": True}, ""
    import logging
    import warnings

    import torch

    from tests.fuzz.check import check, smaller

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    outcome = check(seed)
    if not outcome.failures:
        return dataclasses.asdict(outcome), ""
    least = smaller(outcome) if any(f.kind != "peak below prediction" for f in outcome.failures) else outcome
    lines = [f"seed {seed}, blocks {least.blocks} of {outcome.blocks}, runtime {least.runtime}"]
    lines += [f"{failure.kind}: {failure.detail}" for failure in least.failures]
    text = source.write(seed, least.blocks)
    return dataclasses.asdict(least), "\n".join(["", *lines, text])


def _summary(outcomes: list[dict[str, Any]], first: int, seconds: float) -> dict[str, Any]:
    import torch

    import planner

    done = [outcome for outcome in outcomes if "skipped" not in outcome]
    failed = [outcome for outcome in done if outcome["failures"]]
    refused = Counter(outcome["refusal"].partition(":")[0] for outcome in done if outcome["refusal"])
    return {
        "models": len(done),
        "first_seed": first,
        "planner": planner.__version__,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "plans": sum(outcome["plans"] for outcome in done),
        "plans_that_recompute": sum(outcome["recomputing"] for outcome in done),
        "invalid": sum(bool(outcome["invalid"]) for outcome in done),
        "refused": dict(refused),
        "refusals": {outcome["seed"]: outcome["refusal"] for outcome in done if outcome["refusal"]},
        "failed": len(failed),
        "kinds": dict(Counter(kind for o in failed for kind in {f["kind"] for f in o["failures"]})),
        "failures": failed,
    }
