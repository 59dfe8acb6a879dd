"""``split`` on a tiny model, from its command line to the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cli
import cost_models

TINY = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (f(h).view(*x.shape[:2], 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(mixed)
        return x + self.down(functional.gelu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 128)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def make():
    return Tiny(), (torch.zeros(1, 64, dtype=torch.int64),)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return f"{path}:make"


def ask(capsys: pytest.CaptureFixture[str], *typed: str) -> tuple[int, str, str]:
    code = cli.main(["split", *typed])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_answer_as_json(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpus", "4", "--device", "a100-40", "--global-batch", "8", "--optimizer", "adamw")
    code, out, err = ask(capsys, "--model", tiny, *asked, "--json", "-")
    assert code == 0, err
    answer: dict[str, Any] = json.loads(out)
    assert answer["status"] == "fits" and answer["gpus"] == 4 and answer["global_batch"] == 8
    assert len(answer["best"]) == 10
    times = [one["step_seconds"] for one in answer["best"]]
    assert times == sorted(times)
    for one in answer["best"]:
        split = one["split"]
        assert split["data"] * split["tensor"] * split["pipeline"] == 4
        assert one["peak_bytes"] <= answer["memory_bytes"]
        assert one["tokens_per_second"] * one["step_seconds"] == pytest.approx(8 * 64)
    shapes = {tuple(one["split"][name] for name in ("data", "tensor", "pipeline")) for one in answer["best"]}
    lost = {(one["data"], one["tensor"], one["pipeline"]) for one in answer["lost"]}
    every = {(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4), (1, 2, 2)}
    assert shapes | lost == every
    assert answer["best_of_engine"].keys() == {"torchtitan", "megatron"}


def test_the_answer_on_a_screen(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpus", "2", "--device", "h100", "--global-batch", "4", "--engine", "megatron", "--top", "3")
    code, out, err = ask(capsys, "--model", tiny, *asked)
    assert code == 0, err
    assert out.startswith("BEST of ")
    for words in ("The best 3", "Why other combinations lost", "never run"):
        assert words in out


def test_what_does_not_fit_is_said(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    device = cost_models.device("h100")
    reserve = device.memory_bytes - device.library_bytes - 100_000
    asked = ("--gpus", "2", "--device", "h100", "--global-batch", "4", "--reserve", str(reserve))
    code, out, err = ask(capsys, "--model", tiny, *asked, "--json", str(report))
    assert code == 3 and not out
    assert "no split fits" in err and "smallest peak found is" in err and "micro-batch 1" in err
    written = json.loads(report.read_text())
    assert written["status"] == "infeasible" and written["minimum_feasible_peak_bytes"] > 100_000


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--gpus", "0"), "not a whole number above zero"),
        (("--gpus", "eight"), "not a whole number above zero"),
        (("--gpus", "8", "--device", "h100"), "required: --global-batch"),
        (("--gpus", "8", "--global-batch", "8"), "required: --device"),
        (("--gpus", "8", "--global-batch", "8", "--device", "h1000"), "unknown device 'h1000'"),
        (("--gpus", "8", "--global-batch", "8", "--device", "h100", "--batch-size", "8"), "leave it out"),
        (("--gpus", "8", "--global-batch", "8", "--device", "h100", "--budget", "8GiB"), "arguments: --budget"),
        (("--gpus", "8", "--global-batch", "8", "--device", "h100", "--network", "fast"), "cannot read size"),
        (("--global-batch", "8"), "required: --gpus"),
    ],
)
def test_impossible_questions_are_refused(
    tiny: str, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], words: str
) -> None:
    code, out, err = ask(capsys, "--model", tiny, *typed)
    assert code == 2 and words in err and not out
    assert err.startswith("error: ") and err.count("\n") == 1
