"""Every rule fires on a small model that has the trouble, stays silent on one that has not, and tells the truth."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import checkpoint as checkpointing

import cli
import planner
from planner.diagnose.check import RULES
from planner.errors import CaptureError
from planner.findings.finding import Diagnosis, Severity
from tests import models
from tests.models import Layers, OneLinear, Trained

ROOT = Path(__file__).parent.parent.parent
X = (16, 8)


class Routed(Layers, router=models.linear(8, 4, bias=False), experts=lambda: nn.ModuleList(linear() for _ in range(4))):
    """The weighted sum of two of four layers, all of which see every row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, index = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        weights = torch.zeros(len(x), 4).scatter(-1, index, best)
        return sum(w.unsqueeze(-1) * expert(x) for expert, w in zip(self.experts, weights.unbind(-1), strict=True))


class Region(nn.Module):
    """Layers that are checkpointed."""

    def __init__(self, *layers: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)
        self.options = {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpointing.checkpoint(self.inner, x, **self.options)
        return result


class Counting(Layers, scale=lambda: nn.Buffer(torch.ones(()))):
    """Writes into a buffer of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(2)
        return x * self.scale


class Branching(OneLinear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).mean()
        return y if y > 0 else -y


class Classifying(Layers, head=models.linear(8, 2000)):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.int64))


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def hooked() -> nn.Module:
    model = Trained(linear())
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def gpt2(layers: int = 2, *, dropout: float = 0.0, use_cache: bool = False, **checkpoint_options: Any) -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {"n_layer": layers, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 16}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **rates, use_cache=use_cache)).train()
    model.loss_type = "ForCausalLM"
    if checkpoint_options:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=checkpoint_options)
    return model


def sharded(*, checkpointed: bool) -> nn.Module:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = Trained(Region(linear()) if checkpointed else linear())
    unit = model[0].inner if checkpointed else model[0]
    fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


Example = Callable[[], nn.Module]
TOKENS = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.zeros(2, 8, dtype=torch.int64)}
PLAIN, BRANCHING = (lambda: Trained(linear())), partial(Branching, 8)

EXAMPLES: dict[str, tuple[Example, Example]] = {
    "random-state-not-kept": (
        lambda: Trained(linear(), Region(linear(), nn.Dropout(), preserve_rng_state=False)),
        lambda: Trained(linear(), Region(linear(), nn.Dropout())),
    ),
    "reentrant-without-gradient": (
        lambda: Trained(Region(linear(), use_reentrant=True), linear()),
        lambda: Trained(linear(), Region(linear(), use_reentrant=True)),
    ),
    "state-updated-twice": (
        lambda: Trained(linear(), Region(linear(), nn.BatchNorm1d(8))),
        lambda: Trained(linear(), Region(linear(), nn.LayerNorm(8)), nn.BatchNorm1d(8)),
    ),
    "routing-recomputed": (lambda: Trained(linear(), Region(Routed())), lambda: Trained(Region(linear()), Routed())),
    "nested-checkpoints": (
        lambda: Trained(linear(), Region(linear(), Region(linear()))),
        lambda: Trained(linear(), Region(linear()), Region(linear())),
    ),
    "checkpointing-already-on": (lambda: Trained(linear(), Region(linear())), PLAIN),
    "not-captured": (BRANCHING, PLAIN),
    "full-backward-hooks": (hooked, PLAIN),
    "use-cache": (lambda: gpt2(1, use_cache=True), lambda: gpt2(1, use_cache=False)),
    "sharded-inside-checkpoint": (lambda: sharded(checkpointed=True), lambda: sharded(checkpointed=False)),
    "loss-not-counted": (lambda: nn.Sequential(linear()), PLAIN),
    "batch-norm": (lambda: Trained(linear(), nn.BatchNorm1d(8)), lambda: Trained(linear(), nn.BatchNorm1d(8)).eval()),
    "not-followed": (BRANCHING, PLAIN),
    "static-dominates": (
        lambda: Trained(frozen(nn.Sequential(nn.Linear(8, 500), nn.Linear(500, 500), nn.Linear(500, 8))), linear()),
        lambda: Trained(linear(), linear()),
    ),
    "logits-dominate": (Classifying, lambda: Trained(nn.Linear(8, 2000))),
    "one-value-dominates": (
        lambda: Trained(nn.Linear(8, 2000, bias=False), nn.AvgPool1d(2000)),
        lambda: Trained(*(nn.Sequential(linear(), nn.GELU()) for _ in range(6))),
    ),
}
"""For each rule a model on which it fires, and a near one on which it does not."""


def checked(model: nn.Module) -> Diagnosis:
    return planner.check(model, TOKENS if hasattr(model, "config") else torch.randn(X))


@cache
def checked_once(example: Example) -> Diagnosis:
    """Check an example, which may be that of several rules."""
    return checked(example())


def rules(diagnosis: Diagnosis) -> set[str]:
    return {finding.rule for finding in diagnosis.findings}


def test_names_are_unique_and_kebab_case():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)
    assert set(EXAMPLES) == set(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_fires_on_its_trouble_and_nowhere_else(rule: Any):
    fires, silent = EXAMPLES[rule.name]
    finding = {finding.rule: finding for finding in checked_once(fires).findings}[rule.name]
    assert finding.severity is rule.severity
    assert finding.evidence and finding.cause and finding.fix
    assert rule.name not in rules(checked_once(silent))


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.severity is Severity.ERROR], ids=lambda rule: rule.name
)
def test_what_is_called_an_error_gives_wrong_numbers(rule: Any, monkeypatch: pytest.MonkeyPatch):
    def step(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model(torch.randn(X)).backward()
        gradients = {name: torch.zeros(0) if p.grad is None else p.grad for name, p in model.named_parameters()}
        return {**gradients, **dict(model.named_buffers())}

    def same(build: Example) -> bool:
        torch.manual_seed(0)
        model = build()
        torch.manual_seed(0)
        plain = build()
        checkpointed = step(model)
        with monkeypatch.context() as patch:
            patch.setattr(checkpointing, "checkpoint", lambda function, *args, **_: function(*args))
            expected = step(plain)
        return all(torch.equal(expected[name], checkpointed[name]) for name in expected)

    fires, silent = EXAMPLES[rule.name]
    assert not same(fires)
    assert same(silent)


def test_a_buffer_of_ones_own_counts_as_state():
    found = checked(Trained(linear(), Region(Counting())))
    (finding,) = [finding for finding in found.findings if finding.rule == "state-updated-twice"]
    assert "1.inner.0.scale" in finding.evidence


def test_the_switch_of_hugging_face_is_seen_through():
    found = planner.check(gpt2(dropout=0.1, use_reentrant=False, preserve_rng_state=False), TOKENS)
    by_rule = {finding.rule: finding for finding in found.findings}
    assert {"random-state-not-kept", "checkpointing-already-on"} <= set(by_rule)
    assert "transformer.h.0, transformer.h.1" in by_rule["random-state-not-kept"].evidence


def test_a_plan_warns_of_a_models_own_checkpointing():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    warned = planner.plan(Trained(linear(), checkpoint_wrapper(linear())), torch.randn(X), budget="100%").warnings
    assert [finding.rule for finding in warned] == ["eager-unknown", "checkpointing-already-on"]
    assert warned[1].evidence.startswith("1; ")
    assert planner.plan(Trained(linear(), linear()), torch.randn(X), budget="100%").warnings == ()


def test_the_model_is_left_as_it_was():
    class Stepping(Trained):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x)

    model = Stepping(linear(), Region(nn.BatchNorm1d(8), nn.Dropout()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(X)
    random_state, profiled = torch.get_rng_state(), sys.getprofile()
    found = planner.check(model, x)
    assert "state-updated-twice" in rules(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.steps == 0 and sys.getprofile() is profiled
    model(torch.randn(X)).backward()  # and it still trains


def test_a_wrapped_model_can_be_checked():
    model = planner.auto_wrap(Trained(linear(), nn.GELU(), linear()), torch.randn(X), budget="100%")
    assert checked(model).captured


def test_the_worst_comes_first():
    region = Region(nn.BatchNorm1d(8), nn.Dropout(), preserve_rng_state=False)
    found = checked(Trained(frozen(linear()), linear(), region))
    severities = [finding.severity for finding in found.findings]
    assert severities == sorted(severities, key=list(Severity).index)
    assert len(found.problems) + len(found.notes) == len(found.findings)


def test_the_documentation_lists_every_rule():
    text = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z-]+)` \| (\w+) \|", text, re.MULTILINE)
    assert sorted(listed) == sorted((rule.name, str(rule.severity)) for rule in RULES)


FACTORIES = """
import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self, trouble):
        super().__init__()
        self.linear, self.norm, self.trouble = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), trouble

    def forward(self, x):
        if self.trouble == "print":
            print(x.shape)
        if self.trouble == "branch" and self.linear(x).sum() > 0:
            x = -x
        x = self.linear(x)
        return (checkpoint(self.norm, x, use_reentrant=False) if self.trouble else self.norm(x)).square().mean()


def sound():
    return Model(""), torch.randn(16, 8)


def twice():
    return Model("twice"), torch.randn(16, 8)


def branch():
    return Model("branch"), torch.randn(16, 8)


def prints():
    return Model("print"), torch.randn(16, 8)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FACTORIES, encoding="utf-8")


@pytest.mark.parametrize(
    ("factory", "code", "answer"),
    [
        ("sound", 0, "no problems, 1 note in mine.py:sound"),
        ("twice", 1, "2 problems in mine.py:twice"),
        ("branch", 4, "1 problem, 2 notes in mine.py:branch, which cannot be captured"),
        ("prints", 4, "3 problems in mine.py:prints, which cannot be captured"),
    ],
)
@pytest.mark.usefixtures("factories")
def test_the_first_line_is_the_answer(factory: str, code: int, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", f"mine.py:{factory}"]) == code
    streams = capsys.readouterr()
    assert answer in streams.out.splitlines()[:3]
    assert streams.err == ""
    if code == 4:
        assert re.search(r"warning \[not-captured\].*mine\.py:\d+", " ".join(streams.out.split()))


@pytest.mark.usefixtures("factories")
def test_json_stands_alone_and_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "mine.py:twice", "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == 2 and report["captured"] is True
    assert {"rule", "severity", "evidence", "cause", "fix"} == set(report["findings"][0])
    assert cli.main(["check", "mine.py:twice", "--json", "found.json"]) == 1
    assert json.loads(Path("found.json").read_text(encoding="utf-8")) == report


def test_a_forward_that_fails_is_no_matter_of_the_capture() -> None:
    model = Trained(nn.Linear(8, 8))
    with pytest.raises(CaptureError, match="TypeError: "):
        planner.check(model, planner.Inputs.of(torch.randn(X), {"y": 1}))
    with pytest.raises(CaptureError, match=r"forward of Trained fails: RuntimeError"):
        planner.check(model, torch.randn(16, 9))
