"""A step in chunks: it needs less, runs as predicted, and gives the numbers of the step in one piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import planner
from planner.analysis.study import Study
from planner.capture.inputs import Inputs
from planner.capture.joint_capture import capture
from planner.common.options import TOLERANCE, check_chunk, chunks_of, grouped
from planner.errors import InfeasibleBudgetError, UsageError
from planner.plans.plan import Plan
from planner.session.step import Options, lower_as_run
from planner.transforms.chunk_region import ChunkRegion, find_region, region_around
from planner.transforms.chunk_rules import Form
from tests.models import Layers, Stack, linear, perceptron

VOCABULARY, WIDTH, BATCH, LENGTH = 1500, 32, 2, 25
ROWS = BATCH * LENGTH
LOGITS_BYTES = ROWS * VOCABULARY * 4


class Block(Layers, norm=lambda: nn.LayerNorm(WIDTH), mlp=partial(perceptron, WIDTH)):
    """Tokens look at each other, as little as that takes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(y, y, y)
        return x + self.mlp(x)


class GPT(nn.Module):
    """A small decoder whose logits are all that is large."""

    def __init__(self, *, tied: bool = False, reduction: str = "mean", gives_logits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.reduction = reduction
        self.gives_logits = gives_logits

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.norm(self.block(self.tokens(ids))))
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return (loss, logits) if self.gives_logits else loss


class Wide(Stack):
    """Perceptrons far wider than what goes between them."""

    def __init__(self, inner: Callable[[], nn.Module] = nn.GELU, width: int = 600) -> None:
        torch.manual_seed(0)
        super().__init__(3, lambda: nn.Sequential(nn.Linear(WIDTH, width), inner(), nn.Linear(width, WIDTH)))


class Noisy(Wide):
    """Dropout between perceptrons, and a buffer that is read in them and overwritten afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(600))

    def forward(self, x: Tensor) -> Tensor:
        for up, inner, down in self.blocks:
            x = x + F.dropout(down(inner(up(x) + self.shift)), 0.2)
        self.shift.mul_(1.5)
        return x.square().mean()


class Chain(nn.Module):
    """Nothing but operations on single elements and on rows, from the input to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x.sin() * F.softmax(x, -1)).exp()
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x.mean()


class Scores(Layers, inner=linear(WIDTH, WIDTH)):
    """Attention that is written out: tokens look at each other, sequences do not."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x)
        return (F.softmax(torch.bmm(q, x.transpose(1, 2)), -1) @ x).square().mean()


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = ids.roll(-1, 1).clone()
    labels[0, :7] = -100
    return ids, labels


def rows(count: int = 60, width: int = WIDTH) -> tuple[Tensor]:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(1)),)


def smallest(step: Study) -> int:
    """Return the smallest budget for which a plan is known."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        step.plan(budget=1000, search=planner.Search(time_limit_seconds=0.2, compare=False))
    return refused.value.minimum_feasible_peak_bytes


def tight_plan(model: nn.Module, inputs: Any, chunk: int) -> Plan:
    """Return a plan at the smallest budget in chunks, which is below what the step in one piece needs."""
    whole, in_chunks = planner.study(model, inputs), planner.study(model, inputs, runtime=planner.Runtime(chunk=chunk))
    assert smallest(in_chunks) < smallest(whole)
    return in_chunks.plan(budget=smallest(in_chunks), search=planner.Search(time_limit_seconds=0.2))


@pytest.fixture(scope="module")
def whole() -> Study:
    return planner.study(GPT(), tokens())


@pytest.fixture(scope="module")
def in_four() -> Study:
    return planner.study(GPT(), tokens(), runtime=planner.Runtime(chunk=4))


def region_of(model: nn.Module, inputs: Any) -> ChunkRegion | None:
    joint = capture(model, Inputs.of(inputs, None))
    return find_region(lower_as_run(model, joint, Options()).lowered)


def targets(region: ChunkRegion) -> set[str]:
    return {str(node.target) for node in region.splits}


def assert_as_promised(model: nn.Module, inputs: Any, plan: Plan) -> None:
    proof = planner.verify(model, inputs, plan, timed_steps=1)
    assert proof.exact, "recompute changes no bit of the chunked step"
    assert proof.agrees, proof.differences
    assert proof.from_one_piece <= TOLERANCE
    for predicted, measured in (
        (plan.peak_bytes, proof.peak_bytes),
        (plan.baseline_peak_bytes, proof.baseline_peak_bytes),
    ):  # sizes are rounded up to 64 bytes, and a chunk has scalars of its own
        assert measured <= predicted <= 1.001 * measured


def test_a_head_with_its_loss_needs_less_than_recompute_can_reach_and_runs_as_predicted(
    whole: Study, in_four: Study
) -> None:
    assert smallest(in_four) < smallest(whole) - LOGITS_BYTES / 2
    plan = in_four.plan(budget=smallest(in_four), search=planner.Search(time_limit_seconds=0.2))
    assert chunks_of(plan.fingerprint) == 4
    (note,) = (w for w in plan.warnings if w.rule == "in-slices")
    assert f"13 of {ROWS} rows at a time, and 11 at last" in note.evidence
    assert_as_promised(GPT(), tokens(), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "given", "chunks"),
    [
        (partial(GPT, tied=True, reduction="sum"), tokens, 5),
        (partial(GPT, gives_logits=True), tokens, 5),
        (Wide, rows, 4),
        (Chain, lambda: (rows(128, 200)[0].requires_grad_(),), 8),
    ],
)
def test_other_steps_need_less_too(build: Callable[[], nn.Module], given: Callable[[], Any], chunks: int) -> None:
    assert_as_promised(build(), given(), tight_plan(build(), given(), chunks))


def test_every_layer_that_is_built_alike_is_chunked() -> None:
    region = region_of(Wide(), rows())
    assert region is not None
    assert len(set(region.parts.values())) == 3
    assert region.rows == 60


def test_random_numbers_and_overwritten_buffers_are_those_of_the_step_in_one_piece() -> None:
    model, inputs = Noisy(), rows(64)
    plan = planner.plan(model, inputs, **grouped(budget="90%", chunk=4, compare=False))
    assert_as_promised(model, inputs, plan)


def test_batch_entries_are_chunked_where_tokens_depend_on_each_other() -> None:
    model, inputs = Scores(), (torch.randn(6, 80, WIDTH, generator=torch.Generator().manual_seed(1)),)
    region = region_of(model, inputs)
    assert region is not None
    assert region.rows == 6
    assert "aten.bmm.default" in targets(region)
    assert_as_promised(model, inputs, tight_plan(model, inputs, 3))


def test_tokens_that_attention_mixes_are_never_chunked_through_it() -> None:
    model, inputs = Scores(), (torch.randn(6, 80, WIDTH),)
    joint = capture(model, Inputs.of(inputs, None))
    for seed in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        assert region_around(joint, seed, 6 * 80) is None


@pytest.mark.parametrize(
    ("inner", "target"),
    [(lambda: nn.Dropout(0.1), "native_dropout.default"), (lambda: nn.BatchNorm1d(600), "batch_norm")],
)
def test_random_numbers_and_statistics_over_rows_end_a_region(inner, target) -> None:
    region = region_of(Wide(inner), rows())
    assert region is None or not any(target in name for name in targets(region))


def test_what_cannot_be_chunked_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3))
    with pytest.raises(UsageError, match="nothing that is large at the peak can be computed in chunks"):
        planner.plan(model, torch.randn(4, 4, 50), budget="100%", runtime=planner.Runtime(chunk=2))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"chunk": 0}, "'auto', 'off' or a number"),
        ({"chunk": "atuo"}, "did you mean 'auto'"),
        ({"chunk": 2, "runtime": "modules"}, "leave out runtime='modules'"),
    ],
)
def test_bad_requests_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planner.plan(Wide(), rows(), **grouped(budget="100%", **asked))


def test_auto_chunks_only_where_that_makes_a_plan_feasible_or_cheaper(whole: Study) -> None:
    model, inputs = GPT(), tokens()
    assert chunks_of(planner.plan(model, inputs, budget="100%", runtime=planner.Runtime(chunk="auto")).fingerprint) == 1
    budget = smallest(whole) - LOGITS_BYTES // 2
    plan = planner.plan(model, inputs, **grouped(budget=budget, chunk="auto", time_limit_seconds=0.5))
    assert chunks_of(plan.fingerprint) > 1
    (why,) = (w for w in plan.warnings if w.rule == "why-slices")
    assert "in one piece no plan" in why.evidence
    with pytest.raises(InfeasibleBudgetError, match="--chunk auto"):
        planner.plan(model, inputs, budget=budget, search=planner.Search(time_limit_seconds=0.2))


def test_a_saved_plan_rebuilds_its_chunks_gives_the_gradients_of_eager_and_goes_to_other_sizes(
    tmp_path: Path, whole: Study
) -> None:
    model, (ids, labels) = GPT(), tokens()
    model(ids, labels).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    made = planner.plan(model, (ids, labels), **grouped(budget="85%", chunk=4, time_limit_seconds=0.5, compare=False))
    in_one_piece = whole.problem("85%")
    assert made.budget_bytes == in_one_piece.budget_bytes + in_one_piece.graph.total_static_bytes
    made.save(tmp_path / "plan")
    plan = Plan.load(tmp_path / "plan")
    assert plan == made
    planner.auto_wrap(model, budget=plan)
    model(ids, labels).backward()
    assert planner.plan_of(model).fingerprint == made.fingerprint
    assert planner.plan_of(model).recomputations == made.recomputations
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= TOLERANCE * max(expected[name].norm(), 0.01), name
    planner.auto_wrap(model, (ids, labels), **grouped(budget=made.budget_bytes, chunk=4, time_limit_seconds=0.5))
    model(ids[:, :20], labels[:, :20]).backward()
    assert chunks_of(planner.plan_of(model).fingerprint) == 4


def test_a_step_in_chunks_can_be_studied(whole: Study, in_four: Study) -> None:
    assert in_four.problem().baseline.peak_bytes < whole.problem().baseline.peak_bytes
    plan = in_four.plan(budget="90%", search=planner.Search(time_limit_seconds=0.2))
    assert chunks_of(plan.fingerprint) == 4 and planner.explain(plan).values
    with pytest.raises(UsageError, match="of one number of chunks"):
        planner.study(GPT(), tokens(), runtime=planner.Runtime(chunk="auto"))


def test_numbers_of_chunks() -> None:
    assert [check_chunk(chunk) for chunk in ("off", 1, 7, "auto")] == [1, 1, 7, "auto"]


def test_weight_gradients_are_added_up_in_place_and_only_there() -> None:
    region = region_of(GPT(), tokens())
    assert region is not None
    sums = [node for node, form in region.forms.items() if form is Form.SUM]
    assert {str(node.target) for node in sums} == {"aten.mm.default", "<built-in function getitem>"}
    assert all(isinstance(node, fx.Node) for node in sums)
