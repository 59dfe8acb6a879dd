"""What does each lever reach that recompute alone does not: the same step, planned with one after the other.

A case is a model, a device and a budget; nothing is run. For each lever: whether there is a plan, its peak,
what it costs, and where there is none the smallest budget that is known to do, and what binds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Result, percent
from planner import api
from planner.capture import fake_mode
from planner.planning import NoPlanFitsError, Plan
from planner.slices import slices_of
from planner.units import format_bytes
from planner.zoo import ZooModel

LEVERS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "recompute and slices": {"chunk": "auto"},
}
"""What a plan may do, and how that is asked for."""


@dataclass(frozen=True)
class Case:
    """A step, and what it is planned for."""

    build: Callable[[Mapping[str, Any]], ZooModel]
    sizes: Mapping[str, Any]
    asked: Mapping[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("levers", __doc__)
    parser.add_argument("--cases", metavar="NAMES", help=f"with commas, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=10.0, help="for each solve (default: 10)")
    args = parser.parse_args(arguments)
    names = common.chosen(args.cases, list(CASES))
    common.check_destination(args.json)
    result: Result = {**common.environment("levers", arguments), "rows": []}
    for name in names:
        for lever in LEVERS:
            row = _row(name, lever, args.time_limit)
            result["rows"].append(row)
            common.progress(" | ".join(_cells(row)))
            common.write(args.json, result, _page(result))
    return 0 if all(_keeps_goal(name, result["rows"]) for name in names) else 1


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


CASES: dict[str, Case] = {
    "128k-vocabulary": Case(
        _llama,
        {"layers": 16, "width": 2048, "heads": 32, "vocabulary": 128_256, "batch_size": 4, "seq_len": 4096},
        {"budget": "24GiB", "device": "rtx-4090", "optimizer": "adamw"},
    ),
}
"""Logits in float32, their logarithms and their gradient take 7.8 GiB each, and no recompute makes them smaller."""


def _row(name: str, lever: str, time_limit_seconds: float) -> Result:
    case = CASES[name]
    loaded = case.build(case.sizes)
    begun = time.perf_counter()
    row: Result = {"case": name, "sizes": dict(case.sizes), "asked": dict(case.asked), "lever": lever}
    try:
        plan = api.plan(
            loaded.model,
            example_kwargs=loaded.example_kwargs,
            name=loaded.name,
            time_limit_seconds=time_limit_seconds,
            **{**case.asked, **LEVERS[lever]},
        )
        row |= {"status": plan.status, **_found(plan)}
    except NoPlanFitsError as error:
        row |= {
            "status": "infeasible",
            "budget_bytes": error.report["budget_bytes"],
            "smallest_known_bytes": error.minimum_feasible_peak_bytes,
            "proven_minimum_bytes": error.report["proven_minimum_peak_bytes"],
            "why": str(error),
        }
    return {**row, "seconds": time.perf_counter() - begun}


def _found(plan: Plan) -> Result:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.whole_step_peak_bytes,
        "step_seconds": plan.baseline_step_seconds + plan.recompute_seconds,
        "overhead": plan.overhead,
        "lower_bound_overhead": plan.lower_bound_overhead,
        "smallest_known_bytes": plan.minimum_feasible_peak_bytes,
        "slices": slices_of(plan.fingerprint),
        "why": "; ".join(w.evidence for w in plan.warnings if w.rule in ("why-slices", "in-slices")),
    }


def _keeps_goal(name: str, rows: Sequence[Result]) -> bool:
    """Whether recompute alone has no plan for a case, and some other lever has one."""
    own = [row for row in rows if row["case"] == name]
    return all((row["status"] == "infeasible") == (row["lever"] == "recompute") for row in own)


def _cells(row: Result) -> list[str]:
    feasible = row["status"] != "infeasible"
    return [
        row["case"],
        row["lever"],
        row["status"],
        format_bytes(row["peak_bytes"]) if feasible else "-",
        format_bytes(row["smallest_known_bytes"]),
        f"{row['step_seconds']:.2f} s" if feasible else "-",
        percent(row["overhead"]) if feasible else "-",
        percent(row["lower_bound_overhead"]) if feasible else "-",
        str(row["slices"]) if feasible else "-",
        f"{row['seconds']:.0f} s",
    ]


def _page(result: Result) -> str:
    headings = ["case", "lever", "status", "peak", "smallest known", "step", "recompute", "bound", "slices", "took"]
    cases = [
        f"**{name}**: {common.sizes_text(case.sizes)}; {common.sizes_text(case.asked)}."
        for name, case in CASES.items()
        if any(row["case"] == name for row in result["rows"])
    ]
    why = [f"- {row['case']}, {row['lever']}: {row['why']}" for row in result["rows"] if row["why"]]
    return common.page(
        "Levers", result, *cases, common.table(headings, [_cells(row) for row in result["rows"]]), "\n".join(why)
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
