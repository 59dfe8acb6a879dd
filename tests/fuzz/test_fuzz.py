"""A few random models on every run; ``python -m tests.fuzz --models 1000`` tries many."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import source
from tests.fuzz.check import check
from tests.tiers import tiered

SEEDS = (2, 3, 5, 9, 10, 12, 15, 16)
"""Cheap ones of the first few: convolutions, attention, in-place changes, buffers, random draws."""

FOUND = {
    4: (),  # gradients of outputs that are views of each other, which the graph never sees, were not counted
    68: (2,),  # a copy of a part copies the whole storage: fake tensors say so only the first time they are asked
    214: (),  # a loss outside the model, in 16 bits: its kernel sums in 32
    621: (),  # BatchNorm used twice in 16 bits: what converts its statistics ran again, and held the first ones
}
"""Seeds that broke a promise once, with the blocks that it took."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("seed", tiered(SEEDS, quick=(12,)))
def test_a_random_model_keeps_every_promise(seed: int) -> None:
    outcome = check(seed)
    assert not outcome.failures, f"{outcome}\n{source.write(seed)}"
    assert not outcome.invalid


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_mended(seed: int) -> None:
    outcome = check(seed, FOUND[seed])
    assert not outcome.failures, f"{outcome}\n{source.write(seed, FOUND[seed])}"


def test_a_seed_gives_the_same_source_whatever_is_left_out() -> None:
    whole = source.write(7)
    assert whole == source.write(7) == source.write(7, range(source.count(7)))
    lines = whole.splitlines()
    for block in range(source.count(7)):
        assert set(source.write(7, [block]).splitlines()) <= set(lines)


def test_every_source_is_python() -> None:
    for seed in range(300):
        compile(source.write(seed), str(seed), "exec")
