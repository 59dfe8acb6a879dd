"""Two processes that train together: the same bits, the predicted peak on each, gradients as early as in eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
from tests.runtimes.rank.common import FEW_ROWS, LARGER
from tests.tiers import tiered

ROOT = Path(__file__).parent.parent.parent
RANKS = range(2)


RUNS = {
    "two": (
        "ddp,fsdp2,observed,offloading,sharded_first,last_batch,saved,shardings,micro_batches,tensor_parallel,"
        "two_meshes,divided_experts,divided_sequence,fails_on_rank_0,fails_on_rank_1,"
        "fails_where_layers_are_shared,differs,wrong_order,dies",
        2,
    ),
    "more": (
        "observed_in_other_ways,offloading_under_ddp,compiled_blocks,sharded_first_in_more_ways,"
        "divided_sequence_in_more_ways,more_micro_batches",
        2,
    ),
    "four": ("two_meshes,micro_batches_of_four", 4),
}
"""Scenarios that are run one after the other, and by how many ranks; a rank that dies comes last."""

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Run a set of scenarios when a test first asks for it, in one start: most of what a process takes is imports."""

    @cache
    def run(name: str) -> Path:
        scenarios, ranks = RUNS[name]
        return run_ranks(tmp_path_factory.mktemp(name), scenarios, range(ranks))

    return run


@pytest.fixture(scope="module")
def folder(runs: Folders) -> Path:
    return runs("two")


def run_ranks(made: Path, scenarios: str, ranks: range = RANKS) -> Path:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.runtimes.rank", scenarios, str(made)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(len(ranks))}
    processes, logs = [], [made / f"{rank}.log" for rank in ranks]
    for rank, log in zip(ranks, logs, strict=True):
        with log.open("w") as errors:
            own = {**environment, "RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, cwd=ROOT, stderr=errors))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=500) == 0, log.read_text(errors="replace")[-4000:]
    finally:
        for process in processes:
            process.kill()
    return made


def results(folder: Path, scenario: str, ranks: range = RANKS) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{scenario}.{rank}.json").read_text(encoding="utf-8")) for rank in ranks]


def in_more_ways(scenario: str, more: str) -> pytest.MarkDecorator:
    """Run a test on a scenario, and in the slow tier on another that tries more of the same."""
    return pytest.mark.parametrize(
        ("name", "scenario"), tiered([("two", scenario), ("more", more)], slow=[("more", more)])
    )


def check(found: dict[str, Any]) -> None:
    """Hold a planned step to the bits of the same without a plan, to its prediction, and to its budget."""
    assert found["equal"]
    assert 0.999 * found["predicted_bytes"] <= found["peak_bytes"] <= found["predicted_bytes"], found
    assert found["predicted_bytes"] <= found["budget_bytes"] < found["baseline_bytes"]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_gradients_are_the_mean_of_single_processes_and_peaks_as_predicted(folder: Path, way: str) -> None:
    for result in results(folder, way):
        check(result)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_every_rank_has_the_same_plan_and_every_block_another(folder: Path, way: str) -> None:
    plans = [planner.Plan.from_json(result["plan"]) for result in results(folder, way)]
    assert plans[0] == plans[1]
    assert plans[0].runtime == "regional"
    again = [key for keys in plans[0].recomputations.values() for key in keys]
    of_blocks = [
        tuple(key[len(at) :] for key in again if key.startswith(at)) for at in ("blocks.0", "blocks.1", "blocks.2")
    ]
    assert len({*of_blocks}) == 3, again


@in_more_ways("observed", "observed_in_other_ways")
def test_ranks_plan_for_what_any_of_them_does_with_outputs_and_for_the_optimizer(
    runs: Folders, name: str, scenario: str
) -> None:
    (holds, dropped), (other, dropped_too) = (each.values() for each in results(runs(name), scenario))
    for result in (holds, dropped, dropped_too):
        check(result)
        assert "an optimizer's state is counted" in result["seen"]
        assert ("outputs are dropped" in result["seen"]) == (result is not holds)
    assert other["equal"] and other["plan"] == holds["plan"] and other["peak_bytes"] < holds["peak_bytes"]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_the_first_gradient_comes_as_early_as_in_eager(folder: Path, way: str) -> None:
    for result in results(folder, way):
        assert result["first"][0] <= 1.5 * result["eager_first"][0]  # shares of operations


def test_recompute_needs_no_gather_of_its_own(folder: Path) -> None:
    for result in results(folder, "fsdp2"):
        assert result["first"][1] == result["eager_first"][1] == 3  # one for each block


@in_more_ways("offloading", "offloading_under_ddp")
def test_what_blocks_save_waits_on_the_host_in_places_of_each_rank(runs: Folders, name: str, scenario: str) -> None:
    for found in results(runs(name), scenario):
        check(found)
        assert planner.Plan.from_json(found["plan"]).offloading.values


@pytest.mark.slow
def test_blocks_that_are_compiled_run_compiled_as_planned(runs: Folders) -> None:
    for result in results(runs("more"), "compiled_blocks"):
        for way, found in result.items():
            moved = planner.Plan.from_json(found["plan"]).offloading
            assert found["runtime"] == "inductor_blocks" and (moved.values if moved else found["recomputed"]), way
            assert found["off"] <= 1e-9, way
            assert 0.999 * found["predicted_bytes"] <= found["peak_bytes"] <= found["predicted_bytes"], way
            assert found["predicted_bytes"] <= found["budget_bytes"], way


def test_a_sharded_model_takes_a_smaller_last_batch_with_the_plan_that_it_has(folder: Path) -> None:
    for result in results(folder, "last_batch"):
        assert result["equal"] and result["recomputed"] > 0 and result["same_plan"]
        assert result["planned_for"].startswith(f"({result['larger_rows']}, ")


def test_a_sharded_model_and_its_optimizer_are_saved_and_loaded_with_and_without_a_plan(folder: Path) -> None:
    for result in results(folder, "saved"):
        assert result["equal"] == [True, True] and result["recomputed"] > 0


@in_more_ways("sharded_first", "sharded_first_in_more_ways")
def test_a_model_that_is_sharded_already_is_wrapped_by_one_line(runs: Folders, name: str, scenario: str) -> None:
    for result in results(runs(name), scenario):
        for types, found in result.items():
            check(found)
            assert found["larger_equal"] if types in LARGER else "larger_equal" not in found, types
            assert found["runtime"] == ("modules" if types in ("modules", "inside") else "regional")


SHARDINGS = {
    "kept": "block blocks.0 is sharded with reshard_after_forward=False",
    "copied": "the model is sharded over a mesh that also copies it (HSDP)",
    "whole": "blocks.0 is not sharded by itself",
    "prefetched": "block blocks.0 is sharded with prefetching of its own",
    "hook": "DDP has a communication hook",
    "unsent": "gradients of the model stay whole until a later backward (set_requires_gradient_sync)",
}


def test_a_sharding_that_the_plan_does_not_count_is_right_and_said(folder: Path) -> None:
    for result in results(folder, "shardings"):
        for counted in ("default", "offloaded"):  # on a CPU the host's memory is the device's
            assert result.pop(counted) == {"equal": True, "said": []}
        for sharding, found in result.items():
            assert found["equal"], sharding
            assert len(found["said"]) == 1 and SHARDINGS[sharding] in found["said"][0]


def check_micro_batches(found: dict[str, list[dict[str, Any]]]) -> None:
    for way, steps in found.items():
        assert any(step["recomputed"] for step in steps) or f"{FEW_ROWS} rows" in way, way
        for number, step in enumerate(steps):
            assert step["equal"] and not step["said"], way
            assert 0.999 * step["predicted_bytes"] <= step["peak_bytes"] <= step["predicted_bytes"], (way, number)
            assert step["predicted_bytes"] <= step["budget_bytes"], way


def test_every_micro_batch_keeps_its_predicted_peak(folder: Path) -> None:
    for result in results(folder, "micro_batches"):
        assert len(result) == 2
        check_micro_batches(result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scenario"), [("more", "more_micro_batches"), ("four", "micro_batches_of_four")])
def test_so_does_every_one_whatever_gradients_wait_for(runs: Folders, name: str, scenario: str) -> None:
    for result in results(runs(name), scenario, range(RUNS[name][1])):
        check_micro_batches(result)


def test_ranks_that_share_every_layer_run_one_plan(folder: Path) -> None:
    found = results(folder, "tensor_parallel")
    plans = [planner.Plan.from_json(result["plan"]) for result in found]
    assert plans[0] == plans[1] and plans[0].runtime == "modules"
    for result in found:
        check(result)
        assert result["refused"]["error"] == "RuntimeUnsupportedError" and "'modules'" in result["refused"]["message"]


def test_ranks_with_other_experts_run_the_same_modules_again_each_within_its_budget(folder: Path) -> None:
    found = results(folder, "divided_experts")
    assert found[0]["modules"] == found[1]["modules"]
    assert [module for module in found[0]["modules"] if not module.endswith("alone")]  # what sends rows is among them
    assert found[0]["predicted_bytes"] != found[1]["predicted_bytes"]  # each has its own sizes
    for result in found:
        check(result)
        assert any("data decide what Model runs" in said for said in result["said"])
    told, own = (result["tight"] for result in found)
    assert own["error"] == "NoPlanFitsError"
    assert told["message"].startswith("rank 1 failed while it planned its step: NoPlanFitsError: ")


@in_more_ways("divided_sequence", "divided_sequence_in_more_ways")
def test_what_exchanges_tokens_runs_once_whatever_it_is_written_with(runs: Folders, name: str, scenario: str) -> None:
    for result in results(runs(name), scenario):
        for how, found in result.items():
            check(found)
            assert found["recomputed"] and not found["exchanges"], how
            assert not [module for module in found["modules"] if not module.endswith("alone")], how


@pytest.mark.parametrize("name", tiered(["two", "four"], slow=["four"]))
@pytest.mark.parametrize(("mesh", "runtime"), [("layers", "modules"), ("copies", "regional")])
def test_sharding_goes_with_a_second_mesh(runs: Folders, mesh: str, runtime: str, name: str) -> None:
    found = [result[mesh] for result in results(runs(name), "two_meshes", range(RUNS[name][1]))]
    assert len({result["plan"] for result in found}) == 1
    for result in found:
        check(result)
        assert result["last_equal"] and result["runtime"] == runtime


def test_a_failure_on_rank_0_is_told_to_the_others(folder: Path) -> None:
    own, told = results(folder, "fails_on_rank_0")
    assert own["error"] == "NoPlanFitsError"
    assert told["error"] == "InfeasibleBudgetError"
    assert told["message"] == f"rank 0 failed while it planned for all: NoPlanFitsError: {own['message']}"


def test_a_failure_on_another_rank_is_told_to_all(folder: Path) -> None:
    told, own = results(folder, "fails_on_rank_1")
    assert own["error"] == "ForwardError" and "normalized_shape=[3]" in own["message"]
    assert told["message"].startswith("rank 1 failed while it captured the step: ForwardError: ")


def test_ranks_whose_steps_differ_are_told_in_what(folder: Path) -> None:
    for result in results(folder, "differs"):
        for found in result.values():
            assert found["error"] == "PlanMismatchError"
            assert "rank 1 has another step than rank 0" in found["message"]
        assert "blocks is 'blocks.0 blocks.1' there" in result["shorter"]["message"]
        assert "parameters that train is 16 there and 22 on rank 0" in result["frozen"]["message"]


def test_no_rank_waits_in_a_layer_for_one_that_has_failed(folder: Path) -> None:
    told, own = results(folder, "fails_where_layers_are_shared")
    assert own["error"] == "CaptureError" and "normalized_shape=[3]" in own["message"]
    assert told["message"].startswith("rank 1 failed while it captured the step: CaptureError: ")


def test_the_order_of_wrapping_is_said(folder: Path) -> None:
    for result in results(folder, "wrong_order"):
        assert "wrap the module inside, before" in result["ddp"]["message"]
        for what in ("sharded", "other_runtime"):
            assert "call planner.auto_wrap(model, budget=...), with runtime='regional'" in result[what]["message"]


def test_a_rank_that_dies_while_planning_leaves_nobody_waiting(folder: Path) -> None:
    result = json.loads((folder / "dies.0.json").read_text(encoding="utf-8"))
    assert result["error"] == "PlannerError"
    assert "a rank went away while the ranks agreed on a plan" in result["message"]
