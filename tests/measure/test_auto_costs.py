"""Costs as a plan has them where nobody said how: measured for a moment where that can be, and kept."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import planner
from cost_models.measured import Measurement
from planner.capture import fake_mode, operands
from planner.capture.in_place import called_over
from planner.common import cache_folder
from planner.common.options import grouped
from planner.measure import costing, devices, profiling, runs, workspace
from planner.session import step as step_module
from tests.models import WIDTH, Stack

CPU = torch.device("cpu")

MEASURED = costing._measured_for_a_moment
"""What plans have by default; tests of other things have the data sheet's figures."""


@pytest.fixture(autouse=True)
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costing, "_measured_for_a_moment", MEASURED)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    forget(monkeypatch)
    monkeypatch.setattr(costing, "SECONDS_FOR_EACH_OPERATION", 10.0)  # a busy machine measures all as well
    monkeypatch.setattr(profiling.Trials, "suffices", lambda *_: False)  # and takes no first run for long
    return tmp_path / profiling.KIND


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know no more than a new process."""
    monkeypatch.setattr(profiling, "_known", {})
    monkeypatch.setattr(profiling, "_trusted", set())
    monkeypatch.setattr(workspace, "_known", {})


def study(**options: Any) -> planner.Study:
    return planner.study(Stack(1), torch.randn(64, WIDTH), **grouped(**options))


def seconds(step: planner.Study) -> list[float]:
    """Return what operations take, without the host's part, which stands at the loss."""
    return [0.0 if index == step.graph.loss_index else cost.seconds for index, cost in enumerate(step.costs)]


def test_a_real_model_on_a_device_that_is_here_is_measured() -> None:
    plan = planner.plan(Stack(1), torch.randn(64, WIDTH), budget="100%")
    assert plan.cost_model == "measured"


def test_elsewhere_it_is_the_roofline() -> None:
    assert study(device="a100-80").origin.cost_model == "roofline"
    with fake_mode():
        model, x = Stack(1), torch.randn(64, WIDTH)
    assert planner.study(model, x).origin.cost_model == "roofline"


def test_another_process_tries_two_operations_again_and_else_takes_what_was_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = seconds(study())
    assert list(folder.glob("*.json"))
    forget(monkeypatch)
    tried = []
    monkeypatch.setattr(profiling, "_time", lambda *_: tried.append(1) or Measurement(seconds=1.0, runs=3))
    assert seconds(study()) == first and len(tried) == 2


def test_times_that_were_kept_of_a_busy_machine_are_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = seconds(study())
    for _ in range(2):
        forget(monkeypatch)
        monkeypatch.setattr(profiling, "_time", lambda *_: Measurement(seconds=1e-9, runs=3))
        assert sum(seconds(study())) < 0.1 * sum(kept)  # and the next process finds those of now


def test_who_asks_for_a_profile_is_told_what_operations_take_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study()
    forget(monkeypatch)
    monkeypatch.setattr(profiling, "_time", lambda *_: Measurement(seconds=7.0, runs=3))
    found = planner.profile(Stack(1), torch.randn(64, WIDTH))
    assert {one.seconds for one in found.measurements.values()} == {7.0}


def test_what_writes_over_its_input_costs_what_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(profiling, "_time", lambda called, *_: Measurement(seconds=5.0 if called.over else 1.0, runs=3))
    step = study()
    assert any(operation.then for operation in step.graph.operations)
    for operation, cost in zip(step.graph.operations, step.costs, strict=True):
        assert not operation.signature or cost.seconds == 1.0 + 5.0 * len(operation.then)


def test_what_is_read_from_memory_is_timed_before_a_cache_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def several(call: Any, trials: profiling.Trials, before: Any) -> list[float]:
        order.append("hot" if trials.seconds else "cold")
        return [1.0 if trials.seconds else 3.0]

    monkeypatch.setattr(profiling, "_several", several)
    monkeypatch.setattr(profiling, "_LEAST_BYTES_PER_SECOND", 10.0)  # 16 bytes are read in 1.6 seconds at most
    graph = fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = torch.empty(4, device="meta")
    call = profiling._Call(graph.call_function(torch.ops.aten.neg.default, (given,)), None, 0)
    found = profiling._time(call, CPU, profiling.QUICK, torch.empty(1 << 20, dtype=torch.uint8))
    assert (order, found.seconds, found.cold_seconds) == (["cold", "hot"], 1.0, 1.6)


def test_the_host_costs_what_eager_calls_and_what_a_captured_step_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "seconds_of_a_call", lambda: 1.0)
    step, parameters = study(), len(list(Stack(1).parameters()))
    assert step.costs[step.graph.loss_index].seconds == costing._CAPTURED_STEP + costing._PARAMETER * parameters
    assert step.origin.eager is not None
    calls = step.origin.eager.step_seconds / costing._EAGER_CALL
    assert calls > len(step.graph.operations) and calls == pytest.approx(round(calls), abs=0.1)
    eager = study(runtime="modules")
    assert eager.regions
    for region in eager.regions:
        stop = eager.costs[region.recompute[-1]]
        assert stop.seconds > costing._REGION and stop.first_seconds == 0


def test_a_small_call_is_timed_with_data_whatever_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[torch.Tensor] = []
    monkeypatch.setattr(runs, "timed", lambda call: (results.extend(call()), runs.Run(1.0)))
    with fake_mode():
        runs.seconds_of_a_call.__wrapped__()
    assert {type(result) for result in results} == {torch.Tensor}  # with fake ones a call took forty times as long


def test_an_operation_in_place_is_called_as_the_step_calls_it() -> None:
    graph, given = fx.Graph(), [torch.ones(4), torch.full((4,), 3.0)]
    nodes = [graph.placeholder(name) for name in "ab"]
    node = graph.call_function(torch.ops.aten.div.Tensor, tuple(nodes))
    result = called_over(node, nodes[1], given, {})()
    assert result is given[1] and result.tolist() == pytest.approx([1 / 3] * 4)


def test_page_faults_are_not_an_operations_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_seconds_of_one", lambda: 1e-5)
    assert runs.Run(13e-3, 1152).without_faults == pytest.approx(1.48e-3) and not runs.Run(13e-3, 1152).is_clean
    assert runs.Run(6e-4, 3).is_clean and runs.Run(1e-3, 1000).without_faults == pytest.approx(5e-5)
    took = iter([runs.Run(9.0, 10**6), runs.Run(1.0), runs.Run(9.0, 10**6), runs.Run(3.0)])
    monkeypatch.setattr(profiling, "timed", lambda call: (None, next(took)))
    trials = profiling.Trials(least_runs=2, most_runs=9, seconds=0.0, long_seconds=9.0)
    assert profiling._several(lambda: None, trials, lambda: None) == [1.0, 3.0]
    took = iter([runs.Run(9.0, 10**6)] * 3)
    assert profiling._several(lambda: None, trials, lambda: None) == [9.0] * 3  # and no more of these


@pytest.mark.parametrize(("little", "most"), [(0.0, 7), (1.1, 3)])
def test_what_takes_little_of_the_step_is_run_less_often(
    folder: Path, monkeypatch: pytest.MonkeyPatch, little: float, most: int
) -> None:
    given: list[profiling.Trials] = []
    monkeypatch.setattr(profiling, "QUICK", dataclasses.replace(profiling.QUICK, little=little))
    monkeypatch.setattr(
        profiling, "_time", lambda called, device, trials, _: given.append(trials) or Measurement(seconds=1.0)
    )
    study()
    assert {trials.most_runs for trials in given} == {most}


def test_groups_of_another_librarys_products_have_rows() -> None:
    with torch.library._scoped_library("groups", "DEF") as library:
        library.define("multiply(Tensor left, Tensor right, Tensor offs) -> Tensor")
        graph, names = fx.Graph(), ("left", "right", "offs")
        with fake_mode():
            sizes = (torch.empty(6, 2), torch.empty(3, 2, 5), torch.empty(3, dtype=torch.int32))
        nodes = [graph.placeholder(name) for name in names]
        for node, size in zip(nodes, sizes, strict=True):
            node.meta["val"] = size
        node = graph.call_function(torch.ops.groups.multiply.default, tuple(nodes))
        (_, _, ends), _ = operands.arguments(node, CPU)
    assert ends.tolist() == [6, 6, 6]


def test_what_there_is_no_time_for_costs_what_its_first_run_took(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costing, "SECONDS_FOR_EACH_OPERATION", 0.0)
    monkeypatch.setattr(profiling, "QUICK", dataclasses.replace(profiling.QUICK, long_seconds=math.inf))
    monkeypatch.setattr(profiling, "_time", None)
    step = study()
    assert step.origin.cost_model == "measured"
    tried = {signature: one.run.without_faults for (*_, signature), one in workspace._known.items()}
    for operation, cost in zip(step.graph.operations, step.costs, strict=True):
        if operation.signature and not operation.then:
            assert cost.seconds == tried[operation.signature]
    assert not folder.exists(), "what a library does once is in a first run: nobody else is to be told"


def test_what_nothing_was_seen_of_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(profiling, "_time", lambda *_: Measurement(seconds=1.0, runs=2))
    see = workspace.measure
    product = "aten.addmm.default"

    def seen_but_products(lowered: Any, *rest: Any) -> dict[int, Any]:
        operations = lowered.graph.operations
        return {i: one for i, one in see(lowered, *rest).items() if operations[i].target != product}

    def measure(lowered: Any, *rest: Any, **options: Any) -> profiling.Outcome:
        outcome = timed(lowered, *rest, **options)
        known = {s: one for s, one in outcome.measurements.items() if not s.startswith(product)}
        return dataclasses.replace(outcome, measurements=known)

    timed = profiling.measure
    monkeypatch.setattr(step_module, "may_overwrite", lambda *_, **__: {})  # each operation is one of its own
    monkeypatch.setattr(workspace, "measure", seen_but_products)
    monkeypatch.setattr(profiling, "measure", measure)
    step, guess = study(), study(cost_model="roofline")
    rows = list(zip(step.graph.operations, seconds(step), seconds(guess), strict=True))
    known = [row for row in rows if row[0].signature and row[0].target != product]
    scale = sum(row[1] for row in known) / sum(row[2] for row in known)
    scaled = [row for row in rows if row[0].target == product]
    assert scaled and all(row[1] == pytest.approx(scale * row[2]) for row in scaled)


def test_a_file_of_another_place_is_as_good_as_none(folder: Path) -> None:
    profiling.keep("here", {"a": Measurement(seconds=1.0)})
    assert profiling.found_before("here") == {"a": Measurement(seconds=1.0)}
    (path,) = folder.glob("*.json")
    path.write_text('{"place": "elsewhere", "took": {}}')
    assert profiling.found_before("here") == {} and not path.exists()


def test_what_is_kept_grows_to_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST", 2)
    for name in "abc":
        profiling.keep("here", {name: Measurement(seconds=1.0)})
    assert list(profiling.found_before("here")) == ["b", "c"]


def test_of_fused_code_library_calls_are_measured_and_one_plain_operation(calls: Any) -> None:
    timed = calls(profiling, "_time")
    model, x = Stack(1), torch.randn(64, WIDTH)
    plan = planner.plan(model, x, budget="1GiB", runtime="inductor", search=planner.Search(compare=False))
    assert plan.cost_model == "measured"
    alone = [node for (node, *_), *_ in timed if not str(node.target).startswith(("aten.mm.", "aten.addmm."))]
    assert timed and len(alone) <= 1


@pytest.mark.parametrize("able", [False, True])
def test_a_processor_without_fast_kernels_for_16_bits_is_known(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_onednn", lambda dtype: able)
    rates = devices.here(CPU).flops_per_second
    assert (rates["bfloat16"] == rates["float16"]) is not able


def test_what_is_to_be_the_same_every_time_is_not_made_from_the_clock() -> None:
    plan = planner.plan(Stack(1), torch.randn(64, WIDTH), budget="100%", search=planner.Search(deterministic=True))
    assert plan.cost_model == "roofline"
    assert study(deterministic=True).origin.cost_model == "roofline"
