"""The roofline beside published training times of whole models."""

from __future__ import annotations

import pytest

import planner
from planner import zoo
from planner.capture.fake_internals import fake_mode
from planner.common.options import grouped

MIXED_A100, TF32_A100 = 2470, 938
"""Images a second of a ResNet-50 of NVIDIA's examples, from which the shares of convolutions were taken."""
H100_OVER_A100 = 14.4 / 7.8, 28.7 / 13.466
"""Minutes of MLPerf Training: 16 cards each, both in round 3.0 by Dell; 8 cards each, in rounds 2.0 and 3.0."""


def images_per_second(device: str, dtype: str) -> float:
    built = zoo.build("resnet50", batch_size=256, dtype=dtype, fake_mode=fake_mode())
    plan = planner.plan(
        built.model,
        planner.Inputs.of(built.example_args or None, built.example_kwargs),
        **grouped(activation_budget="100%", device=device, cost_model="roofline", compare=False, runtime="graph"),
    )
    return 256 / plan.step_seconds


@pytest.mark.slow
def test_a_resnet_is_as_fast_as_published() -> None:
    mixed = images_per_second("a100-80", "bfloat16")
    assert mixed == pytest.approx(MIXED_A100, rel=0.05)
    assert images_per_second("a100-80", "float32") == pytest.approx(TF32_A100, rel=0.05)
    least, most = H100_OVER_A100
    assert least <= images_per_second("h100", "bfloat16") / mixed <= most
