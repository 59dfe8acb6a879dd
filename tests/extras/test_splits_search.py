"""The search over splits on small made-up tables, against brute force over all of them. No torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cost_models
from planner.common.options import ENGINES
from planner.errors import UsageError
from planner.extras.splits.estimate import Estimator
from planner.extras.splits.search import search, shapes, splits_of
from planner.extras.splits.stages import ROW, Share, can_cut, cut_row, in_flight, stages_of
from planner.extras.splits.table import FULL, KEEP, Choice, Layer, ModelTable, Work
from planner.extras.splits.types import (
    EFFICIENCY,
    FSDP2,
    PARTS,
    REPLICATED,
    Estimate,
    Links,
    NoSplitFitsError,
    Question,
    Split,
    links_of,
)

DEVICE = cost_models.device("h100")
MIB = 2**20
NAMES = (KEEP, "plan 50%", FULL)


def product_of(flops: int, *, moved: int = 4 * MIB, weights: int = 8 * MIB) -> Work:
    """Return a product with weights."""
    return Work(target="aten.mm.default", flops=flops, moved_bytes=moved, weight_bytes=weights, dtype="bfloat16")


def layer(flops: int = 10**12, saved: int = 64 * MIB, parameters: int = 32 * MIB) -> Layer:
    """Return a layer that can keep all, half, or its input."""
    forward = product_of(flops)
    attention = product_of(flops // 4, weights=0)
    cheap = product_of(flops // 50, weights=0)
    return Layer(
        forward=(forward, attention),
        backward=(replace(forward, times=2), replace(attention, times=2)),
        choices=(
            Choice(name=KEEP, saved_bytes=saved, working_bytes=saved // 8),
            Choice(name="plan 50%", saved_bytes=saved // 2, working_bytes=saved // 4, reruns=(cheap,)),
            Choice(
                name=FULL,
                saved_bytes=saved // 16,
                working_bytes=saved,
                reruns=(forward, attention),
                summed_bytes=saved // 16,
            ),
        ),
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=6 * parameters,
        boundary_bytes=saved // 16,
        summed_forward_bytes=saved // 8,
        summed_backward_bytes=saved // 8,
    )


def model(layers: int = 8, **sizes: int) -> ModelTable:
    """Return a model of layers of two kinds, with an embedding and a head."""
    one, end = layer(**sizes), layer(**sizes)
    end = replace(end, choices=end.choices[:1], summed_forward_bytes=0, summed_backward_bytes=0)
    other = replace(one, forward=(*one.forward, product_of(10**10)))
    return ModelTable(
        name="made up",
        first=end,
        last=replace(end, parameter_bytes=2 * end.parameter_bytes),
        kinds=(one, other),
        row=tuple(int(index % 3 == 1) for index in range(layers)),
        tokens=4096,
        tensor_degrees=(1, 2, 4),
    )


def question(
    gpus: int = 8, batch: int = 16, memory: int = 2**34, most: int = 10, engines: tuple[str, ...] = ENGINES
) -> Question:
    """Return a question about H100s in nodes of four."""
    links = links_of(DEVICE, node_devices=4)
    return Question(
        gpus=gpus, global_batch=batch, device=DEVICE, links=links, memory_bytes=memory, engines=engines, most=most
    )


def all_estimates(table: ModelTable, asked: Question) -> list[Estimate]:
    """Estimate every split."""
    estimator = Estimator(table, asked)
    return [estimator.estimate(split) for shape in shapes(table, asked) for split in splits_of(shape, table, asked)]


# Others fill the best before the best of one engine comes.
@example(gpus=16, batch=4, layers=6, memory=217, flops=10**12, saved=16, engines=("torchtitan", "megatron"))
@settings(max_examples=25, deadline=None)
@given(
    gpus=st.sampled_from([1, 2, 4, 8, 16]),
    batch=st.sampled_from([4, 16, 24]),
    layers=st.sampled_from([4, 6, 8]),
    memory=st.integers(200, 4000),
    flops=st.sampled_from([10**10, 10**12]),
    saved=st.sampled_from([16, 256]),
    engines=st.sampled_from([ENGINES, ("megatron",), ("torchtitan",)]),
)
def test_the_search_finds_what_brute_force_finds(
    gpus: int, batch: int, layers: int, memory: int, flops: int, saved: int, engines: tuple[str, ...]
) -> None:
    table = model(layers, flops=flops, saved=saved * MIB)
    asked = question(gpus, batch, memory * MIB, engines=engines)
    every = all_estimates(table, asked)
    if not every:
        with pytest.raises(UsageError, match="no degrees go together"):
            search(table, asked)
        return
    fitting = sorted((one for one in every if one.fits), key=lambda one: one.key)
    if not fitting:
        with pytest.raises(NoSplitFitsError) as raised:
            search(table, asked)
        assert raised.value.minimum_feasible_peak_bytes == min(one.peak_bytes for one in every)
        return
    answer = search(table, asked)
    assert list(answer.best) == fitting[:10]
    assert answer.considered == len(every)
    for engine in engines:
        own = [one for one in fitting if one.split.engine == engine]
        assert answer.of_engine.get(engine) == (own[0] if own else None)


@settings(max_examples=20, deadline=None)
@given(
    gpus=st.sampled_from([4, 8, 16]),
    layers=st.sampled_from([4, 6, 8]),
    memory=st.integers(100, 3000),
)
def test_estimates_add_up(gpus: int, layers: int, memory: int) -> None:
    table, asked = model(layers), question(gpus, memory=memory * MIB)
    for one in all_estimates(table, asked):
        assert all(seconds >= 0 for seconds in one.seconds.values())
        assert set(one.seconds) == set(PARTS)
        assert sum(one.memory_bytes.values()) == one.peak_bytes
        assert one.fits == (one.peak_bytes <= asked.memory_bytes)


@settings(max_examples=30, deadline=None)
@given(room=st.integers(1, 600), flying=st.sampled_from([1, 1.5, 4]), engine=st.sampled_from(ENGINES))
def test_a_stage_keeps_what_runs_least_again_of_all_that_fits(room: int, flying: float, engine: str) -> None:
    table = model(5)
    (stage,) = stages_of(table, 1, 1)
    estimator, share = Estimator(table, question()), Share(1, 1)
    layers, allowed = (
        estimator.layers,
        [c for c, name in enumerate(NAMES) if engine != "megatron" or "plan" not in name],
    )
    row = [number for number in stage if number >= ROW]
    reruns = {number: estimator.timed(number, share).reruns for number in row}
    ends = [layers[number].choices[0] for number in stage if number < ROW]
    fitting, least = [], float("inf")
    for others, first, count in product(allowed, allowed, range(len(row) + 1)):
        kept = [layers[number].choices[first if at < count else others] for at, number in enumerate(row)]
        # The end is the last to run forward and the first to run backward: one micro-batch alone has it.
        saved = ceil((sum(choice.saved_bytes for choice in kept) + ends[0].saved_bytes) * flying) + ends[1].saved_bytes
        held = saved + max(choice.working_bytes for choice in (*kept, *ends))
        least = min(least, held)
        if held <= room * MIB:
            fitting.append(sum(reruns[number][first if at < count else others] for at, number in enumerate(row)))
    found = estimator.ways(stage, share).best(room * MIB, flying, engine)
    if fitting:
        assert found.seconds == pytest.approx(min(fitting)) and found.held_bytes <= room * MIB
    else:
        assert found.held_bytes == least > room * MIB


def test_in_flight_is_what_was_published_of_the_schedules() -> None:
    def held(chunks: int, micro_batches: int, stage: int = 0) -> float:
        return in_flight(Split(1, 1, 4, 1, chunks, REPLICATED, "megatron"), stage, micro_batches)

    assert [held(1, 8, stage) for stage in range(4)] == [4, 3, 2, 1]  # Narayanan et al. 2021, section 2.2
    assert held(1, 2) == held(2, 2) == 2  # no more than there are
    for chunks in (2, 3):  # Korthikanti et al. 2022, section 4.2.3
        assert held(chunks, 20) == pytest.approx(4 * (1 + (4 - 1) / (4 * chunks)))


@given(more=st.integers(0, 100), pipeline=st.integers(1, 16), chunks=st.integers(1, 4))
def test_every_layer_is_on_one_device(more: int, pipeline: int, chunks: int) -> None:
    layers = pipeline * chunks + more
    rows = cut_row(layers, pipeline, chunks)
    assert sorted(layer for row in rows for layer in row) == list(range(layers))
    if can_cut(layers, pipeline * chunks):
        inner = {len(row) for row in rows[1:-1]}
        assert len(inner) <= 1


@given(size=st.integers(0, 2**40), members=st.integers(2, 64), stride=st.sampled_from([1, 2, 8, 64]))
def test_more_bytes_never_take_less_and_networks_are_no_faster(size: int, members: int, stride: int) -> None:
    links = Links(node_devices=8, node_bytes_per_second=4e11, network_bytes_per_second=5e10)
    took = links.pass_seconds(size, members, stride)
    assert took <= links.pass_seconds(2 * size, members, stride)
    assert took >= links.pass_seconds(size, members, 1) * (1 - 1e-12) or members > 8
    within = replace(links, node_devices=4096)
    assert took >= size * (members - 1) / members / (within.node_bytes_per_second * EFFICIENCY)


def test_every_shape_is_among_the_best_or_has_a_reason() -> None:
    table, asked = model(), question(gpus=16, memory=2**30)
    answer = search(table, asked)
    winners = {one.split.shape for one in answer.best}
    reasons = {one.shape: one for one in answer.lost}
    assert winners | set(reasons) == set(shapes(table, asked)) and not winners & set(reasons)
    every = all_estimates(table, asked)
    for shape, lost in reasons.items():
        own = [one for one in every if one.split.shape == shape]
        fitting = min((one.step_seconds for one in own if one.fits), default=None)
        assert lost.reason
        if lost.slower is None:
            assert fitting is None and lost.missing_bytes is not None and lost.missing_bytes >= 0
        elif fitting is not None:
            slower = fitting / answer.best[0].step_seconds - 1
            assert lost.slower == pytest.approx(slower)


def test_slow_networks_keep_what_cannot_hide_within_nodes() -> None:
    table, asked = model(), question(gpus=16, batch=64)
    for one in search(table, asked).best:
        assert one.split.tensor <= asked.links.node_devices


def test_nothing_hides_where_the_engine_does_not_overlap() -> None:
    table, asked = model(), question()
    split = Split(8, 1, 1, 1, 1, FSDP2, "torchtitan")
    hidden = Estimator(table, asked).estimate(split).seconds["data"]
    assert Estimator(table, replace(asked, overlap=False)).estimate(split).seconds["data"] > hidden


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"gpus": 0}, "number of GPUs"),
        ({"gpus": -8}, "number of GPUs"),
        ({"gpus": True}, "number of GPUs"),
        ({"gpus": 6}, "do not fill nodes of 4"),
        ({"batch": 0}, "number of samples"),
        ({"memory": 0}, "nothing of the device is left"),
        ({"engines": ("gpipe",)}, "unknown engine"),
    ],
)
def test_questions_without_an_answer_are_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        question(**wrong)  # type: ignore[arg-type]


def test_a_batch_that_nothing_divides_is_refused() -> None:
    table = replace(model(), tensor_degrees=(1,), row=(0,))
    with pytest.raises(UsageError, match="no degrees go together: 8 GPUs, a global batch of 7"):
        search(table, question(batch=7))


def test_layers_that_differ_are_not_taken_for_alike() -> None:
    with pytest.raises(UsageError, match="the layers of made up are not alike"):
        model().deeper(26)
