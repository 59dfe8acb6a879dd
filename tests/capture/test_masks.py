"""A batch of a Hugging Face model has a mask where it needs one, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.inputs import Inputs
from planner.capture.joint import JointGraph
from planner.capture.joint_capture import capture
from planner.capture.memory import measure_peak
from planner.common.options import grouped
from tests.models import language_model
from tests.runtimes.steps import verified
from tests.tiers import tiered

LENGTH, BATCH = 32, 3
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "vocab_size": 50}
SIZES |= {"use_cache": False, "attn_implementation": "sdpa"}
WHOLE = torch.ones(BATCH, LENGTH, dtype=torch.long)
PADDED = torch.where((torch.arange(BATCH)[:, None] == 0) & (torch.arange(LENGTH) >= LENGTH // 2), 0, WHOLE)


def llama(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return language_model(num_hidden_layers=layers, **SIZES)


def batch(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(50, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **others}


def masks(joint: JointGraph) -> list[bool]:
    """Tell for each attention call whether it is given a mask."""
    calls = [n for n in joint.graph.nodes if "attention_for_cpu.default" in str(n.target)]
    assert calls
    return [n.kwargs.get("attn_mask") is not None for n in calls]


def gradients(model: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    model(**kwargs).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("runtime", tiered(["graph", "modules", "regional"], quick=["graph"]))
@pytest.mark.parametrize("given", tiered([False, True], slow=[False]))
def test_without_recompute_a_step_needs_no_more_than_eager(given: bool, runtime: str) -> None:
    model = llama(1 if runtime == "graph" else 2)  # blocks are captured where there are several
    kwargs = batch(**({"attention_mask": WHOLE} if given else {}))
    gradients(model, kwargs)  # what is built once is built
    model.zero_grad()

    def step() -> Any:
        outputs = model(**kwargs)
        outputs.loss.backward()
        return outputs  # logits are held, as in a step that is verified

    eager_bytes, _ = measure_peak(step, torch.device("cpu"))
    plan = planner.plan(model, kwargs, budget="100%", runtime=runtime, search=planner.Search(compare=False))
    assert verified(model, kwargs, plan).peak_bytes - plan.total_static_bytes <= eager_bytes


@pytest.mark.parametrize("runtime", tiered(["modules", "regional"], slow=["regional"]))
def test_where_blocks_run_in_eager_a_padded_batch_is_planned_with_its_mask(runtime: str) -> None:
    model = llama(2)
    batches = [batch(attention_mask=mask) for mask in (WHOLE, PADDED)]
    expected = [gradients(model, kwargs) for kwargs in batches]
    model.zero_grad()
    planner.auto_wrap(model, **grouped(activation_budget="90%", runtime=runtime, time_limit_seconds=1.0))
    for kwargs, gradient in zip(batches, expected, strict=True):
        assert close(gradients(model, kwargs), gradient)  # planned
        model.zero_grad()
        peak_bytes, _ = measure_peak(lambda kwargs=kwargs: model(**kwargs).loss.backward(), torch.device("cpu"))
        plan = planner.plan_of(model)
        assert peak_bytes + plan.total_static_bytes <= plan.budget_bytes


def test_padding_gets_its_mask_and_the_plan_keeps_the_budget() -> None:
    model = llama()
    batches = [batch(attention_mask=mask) for mask in (PADDED, WHOLE)]
    expected = [gradients(model, kwargs) for kwargs in batches]
    assert not close(expected[0], expected[1])
    plan = planner.plan(model, batches[1], **grouped(activation_budget="80%", time_limit_seconds=1.0, compare=False))
    assert [w for w in plan.warnings if w.rule == "branches-taken" and "attention_mask" in w.evidence]
    planner.auto_wrap(model, budget=plan)
    for kwargs, gradient in zip(batches, expected, strict=True):
        assert close(gradients(model, kwargs), gradient)
        assert planner.plan_of(model).peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_packed_sequences_get_their_mask() -> None:
    straight = torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()
    packed = torch.arange(LENGTH).remainder(LENGTH // 2).expand(BATCH, LENGTH).contiguous()
    model = llama()
    batches = [batch(position_ids=ids) for ids in (straight, packed)]
    expected = [gradients(model, kwargs) for kwargs in batches]
    assert not close(expected[0], expected[1])
    planner.auto_wrap(model, budget="100%")
    for kwargs, gradient in zip(batches, expected, strict=True):
        assert close(gradients(model, kwargs), gradient)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    for window, stays in ((LENGTH + 1, False), (LENGTH // 2, True)):
        model = language_model("Mistral", num_hidden_layers=1, sliding_window=window, **SIZES)
        assert masks(capture(model, Inputs.of(batch()))) == [stays]


@pytest.mark.slow
def test_a_mask_is_there_at_every_length_that_needs_it_and_at_no_other() -> None:
    model = llama()
    wrapped = planner.auto_wrap(copy.deepcopy(model), budget="1GiB", target=planner.Target(cost_model="roofline"))
    for length, padded in ((32, False), (20, False), (24, False), (28, False), (26, True), (28, True), (22, False)):
        mask = torch.ones(BATCH, length, dtype=torch.long)
        mask[0, length // 2 :] = 0 if padded else 1
        kwargs = {name: ids[:, :length] for name, ids in batch().items()} | {"attention_mask": mask}
        assert close(gradients(wrapped, kwargs), gradients(model, kwargs))
        assert planner.plan_of(wrapped).fingerprint["assumes"] == f"attention_mask: {not padded}"
