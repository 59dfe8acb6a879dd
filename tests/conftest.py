"""What holds for every test: threads, random numbers, generated examples."""

from __future__ import annotations

import gc
import os
import random
import re
import sys

import hypothesis
import pytest

# Nobody's own cache: a test that wants one names its folder.
os.environ["CHECKPOINT_PLANNER_CACHE"] = "off"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Torch reads this when it is first imported, and so do processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Start every test from the same random state, whichever ran before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


SLOW = (
    # More cases of what others of the same test cover: `make test-all` runs them too.
    r"test_benchmarks.*test_(runtimes_are_held|exactness_runs)",
    r"test_carried_out.*of_one_device_runs\[(?!every|jax-offload|megatron-out|save-on-cpu|selective|unsloth)",
    r"test_correctness.*test_one_step\[(alpha|feature|rrelu|rand_like|randint|normal|uniform|exponential|gru|rnn|randperm)",
    r"test_correctness.*test_one_step\[(multinomial|gumbel|group norm|softmax|sorted|max pool|cumsum|split and cat)",
    r"test_correctness.*test_autocast\[dtype1",
    r"test_chunk.*\[(tied, sum|logits too)\]",
    r"test_exporters.*test_huggingface_checkpoints_just_these_layers\[bert\]",
    r"test_fuzz.*keeps_every_promise\[(2|3|15|16)\]",
    r"test_ground_truth.*resnet50-6gb",
    r"test_inductor.*test_(convolutions_and|code_that_needs)",
    r"test_masks.*no_more_than_eager\[(False-|True-modules)",
    r"test_masks.*a_padded_batch_is_planned_with_its_mask\[modules",
    r"test_recurrent.*gives_what_eager_gives\[(RNN|GRU)-3",
    r"test_regional.*bits_and_peak_are_exact\[Shared-x1-100%",
    r"test_offload.*changes_no_bit\[(?!native dropout|attention dropout|batch norm|convolutions|in place|mutated|lstm)",
    r"test_runtimes.*\[inductor",
    r"test_runtimes.*held_until_the_backward_ends\[regional",
    r"test_runtimes.*that_shrinks_counts_whole\[(regional|modules)",
    r"test_solvers.*mixed",  # without a host it is `auto`; with one, see test_offload
    r"test_tensor_parallel.*built_by_hand\[options[01]\]",
    r"test_trainer.*with_lora_is_that_without_a_plan\[True\]",
    r"test_zoo.*latent-diffusion-unet",
)
"""What is left out by default, by the names of tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow tier."""
    slow = re.compile("|".join(SLOW))
    for item in items:
        if slow.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of collections of garbage to come: each walks a million objects of torch."""
    if "torch" in sys.modules:
        import torch._dynamo  # noqa: F401  # the larger half of them
    gc.collect()
    gc.freeze()
