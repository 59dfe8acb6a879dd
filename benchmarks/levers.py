"""What does each lever reach alone, and all together: recompute, offload, chunks.

A case is a step, a device and budgets; nothing is run. For each budget and lever: whether there is a plan, its peak,
what it costs, what no such plan can cost less than, and where there is none the smallest budget that is known to
do, and what binds. Costs are of the step in one piece without recompute. Exit code 1 if all together are worse than
the best alone, or, where logits bind recompute, reach no budget below what recompute alone can reach at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Result, percent
from planner import zoo
from planner.analysis.study import Study
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture, fake_mode
from planner.common.options import Budget, Target, Training, chunks_of
from planner.common.units import format_bytes
from planner.plans.plan import NoPlanFitsError, Plan
from planner.session.step import Options, elsewhere_for, lower_as_run, study_lowered
from planner.session.step_planning import Candidate, candidates, cheapest
from planner.solving.peak_bounds import minimum_peak
from planner.zoo import ZooModel

_ENOUGH = 1e-3
"""Solvers stop a little above their bound: within so much of the step two plans cost the same."""

_LOGITS = "log_softmax"
"""In the name of the operation that binds where logits do: what is lower is reached by chunks alone."""

HOST_BUDGET = "512GiB"
"""What offloaded values may take of the host's memory."""


@dataclass(frozen=True)
class Lever:
    """What a plan may do."""

    recompute: bool = False
    offload: bool = False
    chunks: bool = False


LEVERS = {
    "recompute": Lever(recompute=True),
    "offload": Lever(offload=True),
    "chunks": Lever(chunks=True),
    "recompute and chunks": Lever(recompute=True, chunks=True),
    "all": Lever(recompute=True, offload=True, chunks=True),
}
"""Each alone; what needs no host; and together."""


@dataclass(frozen=True)
class Case:
    """A step, what it is planned for, and budgets: of the device, or per cent of what the step allocates."""

    build: Callable[[Mapping[str, Any]], ZooModel]
    sizes: Mapping[str, Any]
    budgets: Sequence[str]
    device: str = "h100"
    optimizer: str = "none"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("levers", __doc__)
    parser.add_argument("--cases", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=15.0, help="for each solve (default: 15)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that FILE has of this torch version")
    args = parser.parse_args(arguments)
    names = common.chosen(args.cases, list(CASES))
    common.check_destination(args.json)
    done = common.earlier("levers", args.json).get("rows", []) if args.resume else []
    result: Result = {**common.environment("levers", arguments), "host_budget": HOST_BUDGET, "rows": done}
    for name in names:
        step = _Step(CASES[name], args.time_limit)
        for budget in CASES[name].budgets:
            for lever in LEVERS:
                if any((row["case"], row["budget"], row["lever"]) == (name, budget, lever) for row in done):
                    continue
                row = {"case": name, "budget": budget, "lever": lever, **step.planned(budget, LEVERS[lever])}
                result["rows"].append(row)
                common.progress(" | ".join(_cells(row)))
                common.write(args.json, result, _page(result))
    common.write(args.json, result, _page(result))
    missed = [goal for name in names for goal in _missed(result["rows"], name)]
    for goal in missed:
        common.progress(f"missed: {goal}")
    return 1 if missed else 0


class _Step:
    """A case's step, captured when the first row asks for it, and in chunks when one asks for those."""

    def __init__(self, case: Case, time_limit_seconds: float) -> None:
        self.case, self.time_limit_seconds = case, time_limit_seconds
        self.chunked: list[Candidate] = []

    @cached_property
    def rest(self) -> Iterator[Candidate]:
        """The candidates that nobody has asked for yet; the first is the step in one piece."""
        loaded = self.case.build(self.case.sizes)
        training = Training(optimizer=self.case.optimizer)
        options = Options(target=Target(device=self.case.device), training=training, name=loaded.name)
        inputs = Inputs.of(loaded.example_args or None, loaded.example_kwargs)
        joint = capture(loaded.model, inputs, elsewhere=elsewhere_for(loaded.model, options))
        whole = lower_as_run(loaded.model, joint, options)
        return candidates(loaded.model, whole, study_lowered(loaded.model, whole, options), options)

    def pieces(self) -> Iterator[Candidate]:
        """Return the step in one piece, then in more and more chunks."""
        for number in count():
            if number == len(self.chunked):
                following = next(self.rest, None)
                if following is None:
                    return
                self.chunked.append(following)
            yield self.chunked[number]

    def planned(self, budget: str, lever: Lever) -> Result:
        """Return a row."""
        _, whole = next(self.pieces())
        asked: dict[str, Any] = {"activation_budget" if budget.endswith("%") else "budget": budget}
        problem = whole.posed(Budget(**asked))
        budget_bytes = problem.budget_bytes + whole.graph.total_static_bytes
        begun = time.perf_counter()

        def plan(step: Candidate, why: str) -> tuple[Plan, str]:
            study = step[1] if lever.recompute else _without_recompute(step[1])
            made = study.plan(
                budget=budget_bytes,
                time_limit_seconds=self.time_limit_seconds,
                offload=lever.offload,
                host_budget=HOST_BUDGET if lever.offload else None,
                compare=False,
            )
            return made, why

        row: Result = {"budget_bytes": budget_bytes}
        if lever == LEVERS["recompute"]:
            floor = minimum_peak(whole.graph, whole.costs)
            row["proven_floor_bytes"] = floor.proven_peak_bytes + whole.graph.total_static_bytes
            row["floor_at"] = floor.proven_operation
        try:
            steps = self.pieces() if lever.chunks else [next(self.pieces())]
            found, why = cheapest(steps, plan, lambda made: made[0])
            row |= {"status": found.status, "why": why, **_found(found, problem.baseline.seconds)}
        except NoPlanFitsError as error:
            row |= {
                "status": "infeasible",
                "smallest_known_bytes": error.minimum_feasible_peak_bytes,
                "proven_minimum_bytes": error.report["proven_minimum_peak_bytes"],
                "why": str(error),
            }
        return {**row, "seconds": time.perf_counter() - begun}


def _without_recompute(study: Study) -> Study:
    operations = tuple(replace(operation, recomputable=False) for operation in study.graph.operations)
    return replace(study, graph=replace(study.graph, operations=operations))


def _found(plan: Plan, baseline_seconds: float) -> Result:
    seconds = plan.baseline_step_seconds
    return {
        "peak_bytes": plan.whole_step_peak_bytes,
        "step_seconds": seconds + plan.added_seconds,
        "overhead": (seconds + plan.added_seconds) / baseline_seconds - 1,
        "lower_bound_overhead": (seconds + plan.lower_bound_seconds) / baseline_seconds - 1,
        "recompute_overhead": plan.recompute_seconds / baseline_seconds,
        "stall_overhead": (plan.added_seconds - plan.recompute_seconds) / baseline_seconds,
        "host_bytes": plan.offloading.host_bytes if plan.offloading else 0,
        "slices": chunks_of(plan.fingerprint),
        "solver": plan.solver,
    }


def _missed(rows: Sequence[Result], name: str) -> Iterator[str]:
    """Say which goals a case misses."""
    own = [row for row in rows if row["case"] == name]
    together = {row["budget"]: row for row in own if row["lever"] == "all"}
    for row in own:
        best = together[row["budget"]]
        if row["status"] != "infeasible" and (
            best["status"] == "infeasible" or best["overhead"] > row["overhead"] + _ENOUGH
        ):
            yield f"{name}, {row['budget']}: {row['lever']} alone is better than all together"
    reached = [row["peak_bytes"] for row in together.values() if row["status"] != "infeasible"]
    for row in own:
        floor_bytes = row.get("proven_floor_bytes", 0)
        if _LOGITS in row.get("floor_at", "") and min(reached, default=floor_bytes) >= floor_bytes:
            yield f"{name}: no plan of all together is below what recompute alone can reach"
            return


def _llama(sizes: Mapping[str, Any]) -> ZooModel:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=4 * sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"] // 4,
        max_position_embeddings=sizes["seq_len"],
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with fake_mode(), _parameters_in(torch.bfloat16):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.zeros(sizes["batch_size"], sizes["seq_len"], dtype=torch.long)
    return ZooModel(name="llama", model=model, example_kwargs={"input_ids": ids, "labels": ids})


@contextmanager
def _parameters_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _of_zoo(name: str) -> Callable[[Mapping[str, Any]], ZooModel]:
    return lambda sizes: zoo.build(name, **sizes, fake_mode=fake_mode())


_ZOO = {"batch_size": 16, "dtype": "bfloat16"}
"""Four times the zoo's batch: with that, the gradients of LLaMA 7B alone are a fourth of what its step allocates."""

CASES: dict[str, Case] = {
    "gpt2-774m": Case(_of_zoo("gpt2-774m"), {**_ZOO, "seq_len": 1024}, ("50%", "30%", "20%", "10%")),
    "llama-7b": Case(_of_zoo("llama-7b"), {**_ZOO, "seq_len": 2048}, ("50%", "30%", "20%", "10%", "8%")),
    "128k-vocabulary": Case(
        _llama,
        {"layers": 16, "width": 2048, "heads": 32, "vocabulary": 128_256, "batch_size": 4, "seq_len": 4096},
        ("24GiB",),
        device="rtx-4090",
        optimizer="adamw",
    ),
}
"""The last: logits in float32, their logarithms and their gradient take 7.8 GiB each, and no recompute makes them
smaller."""


def _cells(row: Result) -> list[str]:
    cells = [row["case"], row["budget"], format_bytes(row["budget_bytes"]), row["lever"]]
    if row["status"] == "infeasible":
        return [*cells, f"none; {format_bytes(row['smallest_known_bytes'])} do", *"-----", f"{row['seconds']:.0f} s"]
    return [
        *cells,
        format_bytes(row["peak_bytes"]),
        percent(row["overhead"]),
        percent(row["lower_bound_overhead"]),
        percent(row["stall_overhead"]),
        format_bytes(row["host_bytes"]) if row["host_bytes"] else "-",
        str(row["slices"]) if row["slices"] > 1 else "-",
        f"{row['seconds']:.0f} s",
    ]


_HEADINGS = ["case", "budget", "bytes", "lever", "peak", "costs", "bound", "of it waiting", "host", "chunks", "took"]


def _page(result: Result) -> str:
    rows = result["rows"]
    cases = [
        f"**{name}**: {common.sizes_text(case.sizes)}; device {case.device}, optimizer {case.optimizer}."
        for name, case in CASES.items()
        if any(row["case"] == name for row in rows)
    ]
    floors = {row["case"]: row for row in rows if row["lever"] == "recompute"}
    return common.page(
        "Levers",
        result,
        *cases,
        f"Per cent are of what the step allocates without recompute, in one piece. Costs are of its time; the bound is "
        f"of all plans of the same levers, for a step in as many chunks. The host gives {result['host_budget']}.",
        common.table(_HEADINGS, [_cells(row) for row in rows]),
        *(
            f"{name}: no plan that only recomputes needs less than {format_bytes(row['proven_floor_bytes'])}, at "
            f"{row['floor_at']}."
            for name, row in floors.items()
        ),
        "\n".join(f"- {row['case']}, {row['budget']}, {row['lever']}: {row['why']}" for row in rows if row["why"]),
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
