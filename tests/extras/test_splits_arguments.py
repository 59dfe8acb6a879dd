"""Splits as arguments of the engines that run them."""

from __future__ import annotations

import shlex

from planner.extras.splits.arguments import split_arguments
from planner.extras.splits.types import FSDP2, FSDP2_KEPT, OPTIMIZER, REPLICATED, Estimate, Mixed, Split
from tests.extras.test_splits_search import model, question


def estimate(split: Split, *stages: Mixed) -> Estimate:
    return Estimate(
        split=split,
        seconds={"compute": 1.0},
        peak_bytes=1,
        memory_bytes={},
        stages=stages,
        tokens=1,
        gpus=16,
        fits=True,
    )


def told(split: Split, *stages: Mixed, layers: int = 8) -> dict[str, str]:
    """Return options and their values, flags with none."""
    words = shlex.split(split_arguments(estimate(split, *stages), model(layers), question(gpus=16, batch=64)))
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--") or ":" in word:
            found[word] = ""
        else:
            found[list(found)[-1]] = word
    return found


KEPT = Mixed(layers=2, first="keep all", others="keep all", count=0)


def test_torchtitan_is_told_every_degree() -> None:
    found = told(Split(2, 2, 4, 4, 1, FSDP2, "torchtitan"), *[KEPT] * 4)
    degrees = {"data_parallel_shard": "2", "data_parallel_replicate": "1", "tensor_parallel": "2",
               "pipeline_parallel": "4"}  # fmt: skip
    assert {name: found[f"--parallelism.{name}_degree"] for name in degrees} == degrees
    assert found["--parallelism.fsdp_reshard_after_forward"] == "always"
    assert found["--parallelism.pipeline_parallel_schedule"] == "1F1B"
    assert found["--parallelism.pipeline_parallel_layers_per_stage"] == "2"
    assert found["--parallelism.pipeline_parallel_first_stage_less_layers"] == "0"
    assert found["--parallelism.num_pp_microbatches"] == "8"  # 64 samples over 2 replicas, 4 at a time
    assert found["--training.num_tokens_per_microbatch_per_dp_rank"] == str(4 * 4096)
    assert found["--training.num_tokens_per_train_step"] == str(64 * 4096)
    assert "activation_checkpoint:none" in found


def test_torchtitan_keeps_the_share_that_a_plan_keeps() -> None:
    split = Split(16, 1, 1, 4, 1, FSDP2_KEPT, "torchtitan")
    full = told(split, Mixed(layers=8, first="full", others="keep all", count=8))
    assert "activation_checkpoint:full" in full
    assert full["--parallelism.fsdp_reshard_after_forward"] == "never"
    half = told(split, Mixed(layers=8, first="full", others="keep all", count=4))
    assert half["--activation_checkpoint.memory_budget"] == "0.50" and "--compile.enable" in half


def test_ends_with_a_layer_less_are_told_to_both() -> None:
    titan = told(Split(2, 2, 4, 4, 2, FSDP2, "torchtitan"), *[KEPT] * 4, layers=14)
    assert titan["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert titan["--parallelism.pipeline_parallel_layers_per_stage"] == "2"
    assert titan["--parallelism.pipeline_parallel_last_stage_less_layers"] == "1"
    megatron = told(Split(2, 2, 4, 4, 2, OPTIMIZER, "megatron"), *[KEPT] * 4, layers=14)
    assert megatron["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"} <= megatron.keys()


def test_megatron_is_told_the_most_that_a_stage_runs_again() -> None:
    stages = [Mixed(layers=4, first="full", others="keep all", count=count) for count in (3, 1)]
    found = told(Split(4, 2, 2, 2, 2, OPTIMIZER, "megatron"), *stages)
    assert found["--recompute-granularity"] == "full" and found["--recompute-method"] == "block"
    assert found["--recompute-num-layers"] == "2"  # of each of two chunks
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce"} <= found.keys()
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("2", "64")
    plain = told(Split(1, 1, 1, 2, 1, REPLICATED, "megatron"), KEPT)
    assert not {"--sequence-parallel", "--use-distributed-optimizer", "--recompute-granularity"} & plain.keys()
