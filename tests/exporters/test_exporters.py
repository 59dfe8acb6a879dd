"""Exporters: what they write is accepted and does what it says, and nothing that they can say costs less."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import json
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cli
import cost_models
import planner
from planner import exporters
from planner.analysis.study import Study
from planner.capture.inputs import Inputs, run_step
from planner.capture.memory import measure_peak
from planner.common.options import AUTO
from planner.errors import PlanMismatchError, UsageError
from planner.exporters._export import Export, Label
from planner.ir.checkpoints import region_of, schedule_of
from planner.ir.graph import OperationCost, Phase, TrainingGraph
from planner.ir.layers import is_within
from planner.ir.simulator import simulate
from planner.ir.static_memory import StaticMemory
from planner.plans.module_choices import modules_of
from planner.plans.plan import PlanOrigin
from planner.zoo.modules import MiniGPT
from tests.example_graphs import Builder, transformer
from tests.runtimes.steps import Left, assert_same, train
from tests.tiers import tiered

TARGETS = {"accelerate", "fsdp", "huggingface"}
NAMING = ("accelerate", "fsdp")


def study_of(graph: TrainingGraph, costs: tuple[OperationCost, ...]) -> Study:
    fingerprint = {"model": "toy.Toy", "assumes": "", "device": "cpu"}
    fingerprint |= {"parameters": len(graph.values), "graph": f"{len(graph.operations)}"}
    return Study(graph=graph, costs=costs, origin=PlanOrigin(fingerprint=fingerprint), static_memory=StaticMemory())


def eager(study: Study) -> Study:
    """Return a step in which every block, and every part of one, can be checkpointed."""
    modules = dict.fromkeys(
        module[: end.start()]
        for module in (f"{op.module}." for op in study.graph.operations if ".h." in op.module)
        for end in [*re.finditer(r"\.", module)][2:4]
    )
    forward = [(index, op) for index, op in enumerate(study.graph.operations) if op.phase is Phase.FORWARD]
    inside = {module: [index for index, op in forward if is_within(op.module, module)] for module in modules}
    regions = (region_of(study.graph, module, operations) for module, operations in inside.items())
    return Study(
        graph=study.graph, costs=study.costs, static_memory=study.static_memory,
        origin=dataclasses.replace(study.origin, runtime="modules"), regions=tuple(r for r in regions if r),
    )  # fmt: skip


STUDY = study_of(*transformer(6))
EAGER = eager(STUDY)


def export(plan: planner.Plan, to: str, study: Study | None = None) -> Export:
    return planner.export(plan, to=to, study=EAGER if study is None else eager(study))


def plan_of(budget: str, study: Study = STUDY) -> planner.Plan:
    return study.plan(
        budget=budget, search=planner.Search("auto", time_limit_seconds=0.5, deterministic=True, compare=False)
    )


PLANS = {budget: plan_of(budget) for budget in ("100%", "80%", "60%")}


def run(made: Export) -> dict[str, Any]:
    """Run generated Python and give its names."""
    names: dict[str, Any] = {}
    exec(compile(made.text, made.target, "exec"), names)
    return names


# The contract, of every exporter.


def test_all_targets_are_found():
    assert set(exporters.targets()) == TARGETS
    with pytest.raises(UsageError, match="did you mean 'huggingface'"):
        exporters.get("hugingface")


@pytest.mark.parametrize("to", exporters.targets())
@pytest.mark.parametrize("budget", tiered(["80%", "60%"], slow=["80%"]))
def test_an_export_keeps_the_budget_and_says_what_it_costs(to: str, budget: str):
    plan = PLANS[budget]
    made = export(plan, to)
    assert made.label is Label.APPROXIMATE and made.reason and made.predicted is not None
    assert made.predicted.peak_bytes <= plan.budget_bytes
    assert made.predicted.overhead >= plan.lower_bound_overhead > 0
    assert made.plan.peak_bytes == plan.peak_bytes
    assert made.modules
    assert json.loads(json.dumps(made.report()))["label"] == "approximate"
    header = "\n".join(line for line in made.text.splitlines() if line.startswith("#")).replace("\n#  ", "")
    assert f"# approximate: {made.reason}." in header
    assert f"{made.predicted.peak_bytes:,} bytes" in header and f"{plan.peak_bytes:,} bytes" in header
    for line in made.lost:
        assert line in header
    ast.parse(made.text)
    assert made == export(plan, to), "the same every time"


@pytest.mark.parametrize("to", exporters.targets())
def test_a_plan_without_recompute_is_carried_over_exactly(to: str):
    made = planner.export(PLANS["100%"], to=to)
    assert made.label is Label.EXACT and made.modules == () and made.predicted == made.plan
    ast.parse(made.text)


@pytest.mark.parametrize("to", exporters.targets())
def test_what_cannot_keep_the_budget_is_unsupported_and_says_what_would_work(to: str):
    lowest = export(PLANS["80%"], to)
    tight = dataclasses.replace(PLANS["60%"], budget_bytes=STUDY.graph.total_static_bytes + 2**20)
    made = export(tight, to)
    assert made.label is Label.UNSUPPORTED and made.text == "" and made.predicted is None
    found = re.search(r"plan for --budget (\d+)", made.reason)
    assert found is not None and "auto_wrap" in made.reason
    with pytest.raises(UsageError, match="unsupported"):
        made.save("nowhere.txt")
    enough = dataclasses.replace(tight, budget_bytes=int(found[1]))
    made = export(enough, to)
    assert made.predicted is not None and lowest.predicted is not None
    assert made.predicted.peak_bytes == int(found[1]) <= lowest.predicted.peak_bytes


@pytest.mark.parametrize("to", exporters.targets())
def test_the_step_is_needed_and_must_be_the_plans(to: str):
    with pytest.raises(UsageError, match=r"planner\.study"):
        planner.export(PLANS["60%"], to=to)
    with pytest.raises(UsageError, match=r"planner\.study"):
        planner.export(PLANS["60%"], to=to, study=STUDY)
    with pytest.raises(PlanMismatchError, match="parameters is"):
        export(PLANS["60%"], to, study_of(*transformer(4)))


@pytest.mark.parametrize("to", exporters.targets())
def test_a_model_without_blocks_is_unsupported(to: str):
    b = Builder()
    x = b.add("aten.mm.default", [], [2**20], module="a")[0]
    y = b.add("aten.gelu.default", [x], [2**20], module="b")[0]
    z = b.add("aten.mm.default", [y], [64], module="c", retained=True)[0]
    b.add("aten.mm.default", [x, y, z], [64], module="a", phase=Phase.BACKWARD, kind="gradient", retained=True)
    study = study_of(b.graph("flat", {}), tuple(b.costs))
    again = {study.graph.operations[3].key: (study.graph.operations[1].key,)}
    plan = dataclasses.replace(
        PLANS["60%"], budget_bytes=2**20, fingerprint=dict(study.origin.fingerprint), recomputations=again
    )
    made = export(plan, to, study)
    assert made.label is Label.UNSUPPORTED and "no repeated blocks" in made.reason


@pytest.mark.parametrize("to", exporters.targets())
def test_a_batch_norm_is_never_run_again(to: str):
    graph, costs = transformer(4)
    operations = tuple(
        dataclasses.replace(op, target=op.target.replace("native_layer_norm", "native_batch_norm"))
        for op in graph.operations
    )
    study = study_of(dataclasses.replace(graph, operations=operations), costs)
    made = export(plan_of("80%", study), to, study)
    if to in NAMING:  # these can name the parts without one
        assert made.modules and all("mlp" in module or "attn" in module for module in made.modules)
    else:
        assert made.label is Label.UNSUPPORTED and "BatchNorm" in made.reason


# What is chosen.


def test_what_offloads_is_chosen_anew_and_what_is_in_chunks_is_refused():
    study = replace(STUDY, device=cost_models.device("h100"))
    plan = study.plan(
        budget="75%", offload=planner.Offload(host_budget="1GiB"), search=planner.Search(time_limit_seconds=1.0)
    )
    assert plan.offloading is not None and plan.offloading.values
    with pytest.raises(UsageError, match="it needs that step"):
        exporters.export(plan, to="fsdp")
    made = exporters.export(plan, to="fsdp", study=eager(study))
    assert made.label is not Label.EXACT and any("host's memory" in line for line in made.lost)
    chunked = replace(plan, fingerprint={**plan.fingerprint, "slices": 8})
    with pytest.raises(UsageError, match="in 8 chunks, which no other framework"):
        exporters.export(chunked, to="fsdp", study=study)


@pytest.mark.parametrize("percent", [90, 80, 70, 60, 55])
def test_no_other_set_of_layers_costs_less(percent: int):
    graph, costs = transformer(6)
    costs = tuple(  # layers that differ, so that it matters which
        dataclasses.replace(cost, seconds=cost.seconds * (1 + int(op.module.split(".")[2]) * 0.3))
        if op.module.startswith("transformer.h.")
        else cost
        for op, cost in zip(graph.operations, costs, strict=True)
    )
    study = study_of(graph, costs)
    problem = study.problem(f"{percent}%")
    budget_bytes = problem.budget_bytes + graph.total_static_bytes
    plan = dataclasses.replace(PLANS["60%"], budget_bytes=budget_bytes)
    made = export(plan, "huggingface", study)
    blocks = [f"transformer.h.{i}" for i in range(6)]
    sets = itertools.chain.from_iterable(itertools.combinations(blocks, count) for count in range(7))
    regions = {region.module: region for region in eager(study).regions or ()}
    schedules = [schedule_of(graph, [regions[block] for block in chosen]) for chosen in sets]
    evaluations = [simulate(graph, costs, schedule) for schedule in schedules]
    least = min(e.recompute_seconds for e in evaluations if e.peak_bytes <= problem.budget_bytes)
    assert made.predicted is not None
    assert made.predicted.overhead == pytest.approx(least / problem.baseline.seconds, rel=1e-6)
    finer = export(plan, "fsdp", study)
    assert finer.predicted is not None and finer.predicted.overhead <= made.predicted.overhead


# What the frameworks accept, by the rules of their present releases.


# What runs: the libraries that are here, on real models.


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = MiniGPT(layers=2, width=64, heads=4, hidden=256, vocabulary=128, positions=64, dropout=0.2)
    return model, (torch.randint(128, (4, 64)), torch.randint(128, (4, 64)))


SEARCH = planner.Search(time_limit_seconds=0.5, deterministic=True, compare=False)


@pytest.fixture(scope="module")
def recorded() -> Study:
    model, inputs = gpt()
    return planner.study(model, inputs, runtime="modules")


@pytest.fixture(scope="module")
def exported(recorded: Study) -> dict[str, Export]:
    model, inputs = gpt()
    plan = planner.plan(model, inputs, budget="75%", search=SEARCH)
    return {to: planner.export(plan, to=to, study=recorded) for to in NAMING}


def left_by(model: nn.Module, inputs: Any) -> Left:
    left = train(model, inputs, (lambda outputs: outputs.loss) if isinstance(inputs, dict) else None)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in left.items()}


def runs_of(model: nn.Module, inputs: Any) -> Counter[str]:
    """Count how often each module without parts runs in a step."""
    seen: Counter[str] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: seen.update([name]))
        for name, module in ((n.replace("._checkpoint_wrapped_module", ""), m) for n, m in model.named_modules())
        if not list(module.children())
    ]
    left_by(model, inputs)
    for hook in hooks:
        hook.remove()
    return seen


def assert_runs_again(model: nn.Module, checkpointed: nn.Module, inputs: Any, modules: tuple[str, ...]) -> None:
    """Check that some of each of these modules runs again, and nothing of others."""
    again = runs_of(checkpointed, inputs) - runs_of(model, inputs)
    inside = lambda name, module: f"{name}.".startswith(f"{module}.")  # noqa: E731
    assert all(any(inside(name, module) for module in modules) for name in again), (again, modules)
    assert all(any(inside(name, module) for name in again) for module in modules), (again, modules)


def assert_peak(made: Export, model: nn.Module, inputs: Any, tolerance: float = 0.001) -> None:
    """Hold the predicted peak against that of a real step."""
    assert made.predicted is not None
    left_by(model, inputs)
    model.zero_grad()
    given = Inputs.of(inputs)
    resident = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers(), *given.tensors())}
    resident_bytes = sum(t.untyped_storage().nbytes() for t in resident.values())

    one = partial(run_step, partial(model, *given.args, **given.kwargs), None, AUTO)
    measured_bytes = measure_peak(one, torch.device("cpu"))[0] + resident_bytes
    assert (1 - tolerance) * made.predicted.peak_bytes <= measured_bytes <= made.predicted.peak_bytes


@pytest.mark.parametrize("to", tiered(NAMING, slow=["accelerate"]))
def test_named_modules_are_checkpointed_and_bits_stay(to: str, exported: dict[str, Export]):
    made = exported[to]
    assert made.label is Label.APPROXIMATE and made.modules
    model, inputs = gpt()
    checkpointed, names = copy.deepcopy(model), run(made)
    names["checkpoint_modules"](checkpointed)
    if to == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        assert accelerate.FullyShardedDataParallelPlugin(**names["FSDP_OPTIONS"]).activation_checkpointing is False
        checkpointed = accelerate.Accelerator(cpu=True).prepare(checkpointed)
    assert list(checkpointed.state_dict()) == list(model.state_dict())
    assert_same(left_by(model, inputs), left_by(checkpointed, inputs))
    assert_runs_again(model, checkpointed, inputs, made.modules)
    assert_peak(made, checkpointed, inputs)


@pytest.mark.parametrize("family", tiered(["llama", "bert"], slow=["bert"]))
def test_huggingface_checkpoints_just_these_layers(family: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"vocab_size": 128, "max_position_embeddings": 64, "use_cache": False}
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    model.train()
    inputs = {"input_ids": torch.randint(128, (4, 64)), "labels": torch.randint(128, (4, 64))}
    study = planner.study(model, inputs, runtime="modules")
    plan = planner.plan(model, inputs, budget="85%", search=SEARCH)
    made = planner.export(plan, to="huggingface", study=study)
    assert made.label is Label.APPROXIMATE and len(made.modules) == 1
    checkpointed = run(made)["checkpoint_layers"](copy.deepcopy(model))
    flagged = [name for name, part in checkpointed.named_modules() if getattr(part, "gradient_checkpointing", False)]
    assert flagged == list(made.modules)
    assert checkpointed.is_activation_checkpointing
    assert_same(left_by(model, inputs), left_by(checkpointed, inputs))
    assert_runs_again(model, checkpointed, inputs, made.modules)
    assert_peak(made, checkpointed, inputs)


def test_the_options_of_the_trainer_choose_the_same_layers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    step_of = exporters.ExportStep(PLANS["60%"], EAGER)
    from planner.exporters.huggingface import _as_trainer_options

    options = _as_trainer_options(step_of, tuple(f"transformer.h.{i}" for i in (0, 2, 4)))
    assert transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options).activation_checkpointing
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=6, n_embd=32, n_head=2, n_positions=16, vocab_size=32)
    )
    kwargs = dict(options["activation_checkpointing_kwargs"])  # type: ignore[call-overload]
    model.activation_checkpointing_enable(
        every_n_layers=kwargs.pop("every_n_layers"), activation_checkpointing_kwargs=kwargs
    )
    assert [layer.gradient_checkpointing for layer in model.transformer.h] == [True, False] * 3
    assert _as_trainer_options(step_of, ("transformer.h.1",)) == {}


def test_a_plan_of_modules_is_carried_over_exactly_with_its_peak(tmp_path: Path, recorded: Study):
    model, inputs = gpt()
    assert recorded.regions is not None
    selective = recorded.plan(budget="70%", search=SEARCH)
    whole = dataclasses.replace(recorded, regions=tuple(dataclasses.replace(r, keepable=()) for r in recorded.regions))
    plan = whole.plan(budget="70%", search=SEARCH)
    plan.save(tmp_path / "a.plan")
    plan = planner.Plan.load(tmp_path / "a.plan")
    made = planner.export(plan, to="fsdp")
    assert made.label is Label.EXACT and set(made.modules) == set(modules_of(plan)) and made.predicted == made.plan
    checkpointed = run(made)["checkpoint_modules"](copy.deepcopy(model))
    assert_same(left_by(model, inputs), left_by(checkpointed, inputs))
    assert_peak(made, checkpointed, inputs)
    assert selective.kept and not plan.kept
    made = planner.export(selective, to="fsdp", study=recorded)
    assert made.label is Label.APPROXIMATE and any("plan keeps results" in line for line in made.lost)


# The command.

MODEL = """
import torch

def make(width=256):
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(1024, width), lambda output: output.square().mean()

def wider():
    return make(320)
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(MODEL, encoding="utf-8")
    assert cli.main(["plan", "toy.py:make", "--budget", "90%", "--save", "toy.plan", "--time-limit", "1"]) == 0
    capsys.readouterr()
    assert cli.main(["export", "toy.py:make", "toy.plan", "--to", "fsdp"]) == 0
    output = capsys.readouterr()
    ast.parse(output.out)
    assert output.err.startswith("fsdp: ") and "the export peaks at" in output.err and output.err.count("\n") == 1
    assert cli.main(["export", "toy.py:make", "toy.plan", "--to", "fsdp", "--output", "a.py", "--json", "a.json"]) == 0
    assert capsys.readouterr().out == output.err
    assert Path("a.py").read_text(encoding="utf-8") == output.out
    report = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert report["label"] in ("exact", "approximate") and report["predicted"]["peak_bytes"] <= report["budget_bytes"]
    assert cli.main(["export", "toy.plan", "--to", "huggingface"]) == 0, "the plan names its model"
    capsys.readouterr()
    for arguments, words in (
        (["toy.py:make", "toy.plan", "--to", "nothing"], "there is no exporter"),
        (["toy.py:wider", "toy.plan", "--to", "fsdp"], "parameters is"),
        (["toy.py:make", "toy.plan"], "--to"),
    ):
        assert cli.main(["export", *arguments]) == 2
        output = capsys.readouterr()
        assert words in output.err and output.out == "", output


def test_the_command_refuses_what_cannot_be_expressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    STUDY.plan(budget="52%", search=planner.Search("sqrt", compare=False)).save(tmp_path / "a.plan")
    monkeypatch.setattr("planner.commands._asked.working", lambda args: nullcontext((None, None)))
    monkeypatch.setattr("planner.commands._asked.ask_or_build", lambda *_, **__: EAGER)
    monkeypatch.setattr("planner.commands._asked.check_model", lambda args: None)
    code = cli.main(["export", str(tmp_path / "a.plan"), "--to", "huggingface", "--json", str(tmp_path / "a.json")])
    output = capsys.readouterr()
    assert code == 2 and output.out == "" and "huggingface: unsupported" in output.err and "auto_wrap" in output.err
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["label"] == "unsupported"
