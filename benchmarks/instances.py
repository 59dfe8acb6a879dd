"""Planning instances for others: 40 training steps with costs, our plans and proven bounds, and what is used now.

Models are captured without memory; seconds are those of the roofline of a device, so instances are the same everywhere.
Each has three budgets: so much above the lowest peak that was reached, as a share of the way to the peak without
recompute. The page of the archive is ``docs/instances.md``, its checker ``benchmarks/instances_check.py``, which shares
no code with the planner. Exit code 1 if the checker finds something wrong, or a plan of others is better than ours.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from torch._functorch._activation_checkpointing import knapsack

from benchmarks import cases, common, instances_check, tight
from benchmarks.common import Result, mebibytes, percent
from planner import solvers, zoo
from planner.common.atomic import check_writable, write_bytes
from planner.common.limits import SolveLimits
from planner.errors import InfeasibleBudgetError, UsageError
from planner.ir.graph import OperationCost, TrainingGraph
from planner.ir.problem import Problem
from planner.ir.schedule import Schedule, recompute_lazily
from planner.ir.simulator import Evaluation, lifetimes
from planner.solvers.auto import AutoSolver
from planner.solving.peak_bounds import proven_lowest
from planner.zoo import ZooModel

SHARES = (0.1, 0.3, 0.6)
"""Budgets: how far they are from the lowest peak that was reached to the peak without recompute."""

RATIOS = [percent / 100 for percent in range(0, 100, 5)]
"""What torch's solvers may save, of the bytes of all that can be saved."""

ROUNDS = 64
"""In how many rounds the greedy drops all that can be dropped."""

OURS, CHAIN, GREEDY = "checkpoint-planner", "chain dp", "greedy at the peak"
TORCH = {"torch dp": knapsack.dp_knapsack, "torch ilp": knapsack.ilp_knapsack, "torch greedy": knapsack.greedy_knapsack}
OTHERS = (*TORCH, GREEDY, CHAIN)

_text, _images = partial(cases.of_text, count=32, length=512), partial(cases.of_images, size=224, count=32)
_FAMILIES: dict[str, Callable[[], ZooModel]] = {
    "mistral-7b": partial(_text, "MistralConfig", "MistralForCausalLM", use_cache=False),
    "falcon-7b": partial(_text, "FalconConfig", "FalconForCausalLM", use_cache=False),
    "gemma2-2b": partial(_text, "Gemma2Config", "Gemma2ForCausalLM", use_cache=False),
    "phi-1.5": partial(_text, "PhiConfig", "PhiForCausalLM", use_cache=False),
    "bloom-560m": partial(_text, "BloomConfig", "BloomForCausalLM", hidden_size=1024, n_layer=24, n_head=16,
                          use_cache=False),
    "mamba2-130m": partial(_text, "Mamba2Config", "Mamba2ForCausalLM", hidden_size=768, num_hidden_layers=24,
                           num_heads=24, n_groups=1, use_cache=False),
    "deberta-v2-xlarge": partial(_text, "DebertaV2Config", "DebertaV2ForMaskedLM", relative_attention=True,
                                 pos_att_type=["p2c", "c2p"]),
    "roformer-base": partial(_text, "RoFormerConfig", "RoFormerForMaskedLM"),
    "fnet-base": partial(_text, "FNetConfig", "FNetForMaskedLM"),
    "bart-large": partial(_text, "BartConfig", "BartForConditionalGeneration", use_cache=False),
    "swin-tiny": partial(_images, "SwinConfig", "SwinForImageClassification"),
    "regnet-y-040": partial(_images, "RegNetConfig", "RegNetForImageClassification"),
    "mobilenet-v2": partial(_images, "MobileNetV2Config", "MobileNetV2ForImageClassification"),
    "mobilevit-s": partial(_images, "MobileViTConfig", "MobileViTForImageClassification", image_size=224),
    "segformer-b0": partial(_images, "SegformerConfig", "SegformerForImageClassification"),
    "efficientnet-b7": partial(_images, "EfficientNetConfig", "EfficientNetForImageClassification"),
}  # fmt: skip
"""Of ``transformers``, with the sizes of its configurations."""

MODELS: dict[str, Callable[[], ZooModel]] = {
    **{name: partial(zoo.build, name) for name in zoo.names()},
    **{name: tight.MODELS[name] for name in ("diffusion-unet", "stacked-cells", "inception", "densenet")},
    **{name: cases.ARCHITECTURES[name] for name in ("evoformer", "graph-transformer")},
    **_FAMILIES,
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; see the module."""
    parser = common.parser("instances", __doc__)
    parser.add_argument("archive", metavar="OUT.zip", help="the file to write")
    parser.add_argument("--models", metavar="NAMES", help=f"with commas, of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--device", default="a100-80", help="whose roofline (default: a100-80)")
    parser.add_argument("--time-limit", metavar="S", type=float, default=15.0, help="for each solve (default: 15)")
    parser.add_argument("--resume", action="store_true", help="keep the instances that the file has")
    args = parser.parse_args(arguments)
    names = common.chosen(args.models, list(MODELS))
    if find_spec("scipy") is None:
        raise UsageError("torch's ilp needs scipy, which is not installed: pip install scipy")
    common.check_destination(args.json)
    check_writable(args.archive)
    shown = [argument.replace(args.archive, Path(args.archive).name) for argument in arguments]
    result: Result = {**common.environment("instances", shown), "rows": []}
    limits = SolveLimits(time_limit_seconds=args.time_limit)
    texts = _kept(args.archive) if args.resume else {}
    for name in (*texts, *(name for name in names if name not in texts)):
        if name not in texts:
            found = instance(name, tight.lowered(name, MODELS[name], args.device), limits)
            texts[name] = json.dumps({"costs": f"roofline of {args.device}", **found}, separators=(",", ":"))
        data = json.loads(texts[name])
        common.progress("\n".join(instances_check.checked(data)))
        result["rows"] += rows(data)
        common.write(args.json, result, _markdown(result))
        _write(args.archive, texts, _markdown(result))
    print(_markdown(result), file=sys.stderr if args.json == "-" else sys.stdout)
    return 1 if any(map(_is_beaten, result["rows"])) else 0


def instance(name: str, step: tight.Costed, limits: SolveLimits) -> Result:
    """Plan a step for each budget in every way, and write all of it down."""
    graph, costs = step
    problem = Problem(graph=graph, costs=costs, budget_bytes=0)
    static_bytes, peak_bytes = graph.total_static_bytes, problem.baseline.peak_bytes
    proven_bytes = proven_lowest(problem)
    lowest = AutoSolver().lowest(replace(problem, budget_bytes=proven_bytes), effort=limits)
    lowest_bytes = problem.evaluate(lowest).peak_bytes
    drafts = {by: [(each, problem.evaluate(each)) for each in found] for by, found in _drafts(problem)}
    budgets, plans = [], []
    for share in SHARES:
        asked = replace(problem, budget_bytes=lowest_bytes + int(share * (peak_bytes - lowest_bytes)))
        found = solvers.solved(asked, AutoSolver(lowest), effort=limits)
        budget = {"budget_bytes": static_bytes + asked.budget_bytes, "lower_bound_seconds": found.lower_bound_seconds}
        schedules = {OURS: found.schedule, **{by: _cheapest(fit, asked) for by, fit in drafts.items()}}
        with suppress(InfeasibleBudgetError):
            schedules[CHAIN] = solvers.solved(asked, "chain-dp", effort=limits).schedule
        for by, schedule in schedules.items():
            if schedule is not None:
                reached = problem.evaluate(schedule)
                claimed = {"peak_bytes": static_bytes + reached.peak_bytes, "added_seconds": reached.recompute_seconds}
                plans.append({"by": by, "budget_bytes": budget["budget_bytes"], **claimed, "order": schedule.order})
        budgets.append(budget)
    return {
        "name": name, "resident_bytes": static_bytes, "peak_bytes": static_bytes + peak_bytes,
        "lowest_peak_known_bytes": static_bytes + lowest_bytes,
        "lowest_peak_proven_bytes": static_bytes + proven_bytes,
        **written(graph, costs),
        "budgets": budgets, "plans": plans,
    }  # fmt: skip


def written(graph: TrainingGraph, costs: Sequence[OperationCost]) -> Result:
    """Write down a step as plain data."""
    operations = [
        {
            "name": made.key, "phase": made.phase, "inputs": made.inputs, "outputs": made.outputs,
            "seconds": cost.seconds, "workspace_bytes": cost.workspace_bytes, "recomputable": made.recomputable,
            "random_state_bytes": made.state_bytes,
        }
        for made, cost in zip(graph.operations, costs, strict=True)
    ]  # fmt: skip
    values = [{"bytes": value.size_bytes, "retained": value.retained} for value in graph.values]
    return {"operations": operations, "values": values}


def _cheapest(drafts: Sequence[tuple[Schedule, Evaluation]], asked: Problem) -> Schedule | None:
    fitting = [draft for draft in drafts if draft[1].peak_bytes <= asked.budget_bytes]
    return min(fitting, key=lambda draft: draft[1].recompute_seconds)[0] if fitting else None


def _drafts(problem: Problem) -> Iterator[tuple[str, list[Schedule]]]:
    """Give what others would recompute, from little to much; what is not saved is recomputed when it is first read.

    Torch's solvers choose what is saved of all results of the forward that the backward reads, each worth the time of
    the operation that makes it. The greedy drops what lies at the peak, most bytes for a second first.
    """
    graph, costs, turn = problem.graph, problem.costs, problem.graph.loss_index
    made = {u for index in range(turn) for u in graph.operations[index].outputs}
    may_go = {u for u in made if graph.operations[graph.producer[u]].recomputable and not graph.values[u].retained}
    items = [u for u in sorted(may_go) if max(graph.readers[u], default=0) > turn and graph.values[u].size_bytes]
    sizes, seconds = [graph.values[u].size_bytes for u in items], [costs[graph.producer[u]].seconds for u in items]

    def without(dropped: Collection[int]) -> Schedule:
        return recompute_lazily(graph, {turn: dropped})

    for by, choose in TORCH.items():
        saved = (choose([size / sum(sizes) for size in sizes], seconds, ratio)[1] for ratio in RATIOS)
        yield by, [without(may_go - {items[at] for at in each}) for each in saved]
    densest = sorted(range(len(items)), key=lambda at: sizes[at] / max(seconds[at], 1e-12), reverse=True)
    dropped: set[int] = set()
    found = [without(dropped)]
    while True:
        peak = problem.evaluate(found[-1]).peak_position
        there = {copy.value for copy in lifetimes(graph, found[-1]) if copy.born <= peak <= copy.died} - dropped
        going = [items[at] for at in densest if items[at] in there][: -(-len(items) // ROUNDS)]
        if not going:
            break
        dropped.update(going)
        found.append(without(dropped))
    yield GREEDY, found


def rows(data: Result) -> Iterator[Result]:
    """Give for each budget of an instance what every way adds, as shares of the step."""
    seconds = sum(operation["seconds"] for operation in data["operations"])
    for budget in data["budgets"]:
        plans = [plan for plan in data["plans"] if plan["budget_bytes"] == budget["budget_bytes"]]
        added = {plan["by"]: plan["added_seconds"] / seconds for plan in plans}
        yield {
            "model": data["name"], "operations": len(data["operations"]), "peak_bytes": data["peak_bytes"],
            "budget_bytes": budget["budget_bytes"], "bound": budget["lower_bound_seconds"] / seconds,
            **{by: added.get(by) for by in (OURS, *OTHERS)},
        }  # fmt: skip


def _is_beaten(row: Result) -> bool:
    return any(row[by] is not None and row[by] < row[OURS] for by in OTHERS)


def _kept(path: str) -> dict[str, str]:
    """Return the instances of an earlier archive, by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.startswith("instances/")]
            return {Path(name).stem: archive.read(name).decode() for name in names}
    except FileNotFoundError:
        return {}
    except zipfile.BadZipFile as error:
        raise UsageError(f"{path} is no archive to go on from: name another file, or start anew") from error


def _write(path: str, texts: dict[str, str], table: str) -> None:
    page = (common.ROOT / "docs" / "instances.md").read_text("utf-8")
    files = {
        "README.md": page.replace("../benchmarks/results/instances.md", "RESULTS.md"),
        "RESULTS.md": table,
        "check.py": Path(instances_check.__file__).read_text("utf-8"),
        **{f"instances/{name}.json": text for name, text in texts.items()},
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, text, zipfile.ZIP_DEFLATED)
    write_bytes(path, content.getvalue())


def _markdown(result: Result) -> str:
    found = result["rows"]
    proven = sum(row[OURS] - row["bound"] <= 1e-3 for row in found)
    ways = []
    for by in OTHERS:
        able = [row for row in found if row[by] is not None]
        extra = [100 * (row[by] - row[OURS]) for row in able]
        ways.append([by, f"{len(able)} of {len(found)}", f"{median(extra):.1f}" if extra else "-"])
    cells = [
        [row["model"], row["operations"], mebibytes(row["peak_bytes"]), mebibytes(row["budget_bytes"]),
         *(percent(row[by], 2) for by in ("bound", OURS, *OTHERS))]
        for row in found
    ]  # fmt: skip
    return common.page(
        "Planning instances",
        result,
        f"{len(found)} budgets of {len({row['model'] for row in found})} models. Added time is a share of the step "
        f"without recompute. Ours are within 0.1 points of the proven bound on {proven} of {len(found)}. Of torch's "
        f"solvers, the cheapest plan that fits, of {len(RATIOS)} ratios. A plan of others is better on "
        f"{sum(map(_is_beaten, found))}.",
        common.table(["plans of", "keep the budget", "added points more than ours (median)"], ways),
        common.table(["model", "operations", "peak, MiB", "budget, MiB", "bound", OURS, *OTHERS], cells),
    )


if __name__ == "__main__":
    sys.exit(common.run(main))
