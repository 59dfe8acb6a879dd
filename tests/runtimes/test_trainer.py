"""Wrapped models inside the loops that people use: Hugging Face's Trainer with PEFT, accelerate.

What only some tests need, and is slow to import, is imported there: every worker reads this file.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import planner
from planner.common.options import grouped
from planner.errors import UsageError
from planner.runtimes.graph import GraphRuntime
from tests.integrations.test_training_loops import same
from tests.models import language_model
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # what the trainers warn of is not ours

VOCABULARY, LENGTH = 64, 32
EXAMPLES = torch.randint(VOCABULARY, (20, LENGTH), generator=torch.Generator().manual_seed(1))
TOKENS = [{"input_ids": row, "labels": row} for row in EXAMPLES]
UNEVEN = 14
"""So many examples leave a smaller last batch, which is captured and planned by itself."""


def llama(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    own = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2}
    return language_model(num_hidden_layers=1, num_attention_heads=2, attention_dropout=dropout, **own)


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    adapter = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapter)


def wrap(model: nn.Module, budget: str | None) -> nn.Module:
    asked = grouped(activation_budget=budget, time_limit_seconds=1.0)
    return model if budget is None else planner.auto_wrap(model, **asked)


def trainer(model: nn.Module, folder: Path, examples: int = len(TOKENS), **arguments: Any) -> transformers.Trainer:
    """Four steps of two batches each, with an evaluation and a saved state after two steps."""
    settings = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, **arguments,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=settings, train_dataset=TOKENS[:examples], eval_dataset=TOKENS[:6])


def curve(ran: transformers.Trainer) -> list[tuple[Any, ...]]:
    """Return what was logged, unrounded: losses of training and evaluation, norms of gradients."""
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")) for row in ran.state.log_history]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[planner.Plan]:
    """Return the plans of all planned calls, call by call."""
    seen: list[planner.Plan] = []
    call = GraphRuntime.__call__

    def spy(self: GraphRuntime, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        if torch.is_grad_enabled():
            seen.append(self.plan)
        return result

    monkeypatch.setattr(GraphRuntime, "__call__", spy)
    return seen


@pytest.mark.parametrize("bf16", tiered([False, True], slow=[True]))
def test_loss_curve_with_lora_is_that_without_a_plan(tmp_path: Path, plans: list[planner.Plan], bf16: bool) -> None:
    def train(budget: str | None) -> transformers.Trainer:
        ran = trainer(wrap(with_lora(llama()), budget), tmp_path, UNEVEN if bf16 else 16, bf16=bf16)
        ran.train()
        return ran

    eager = train(None)
    assert not plans
    planned = train("75%")
    # Four examples, the same for a loop that drops the logits, as Trainer is seen to do, and the last two.
    assert len(plans) == 8 and len({id(plan) for plan in plans}) == 2 + bf16
    assert "outputs" not in plans[0].fingerprint and plans[-1].fingerprint["outputs"] == "dropped"
    assert plans[0].recomputations and plans[0].peak_bytes < plans[0].baseline_peak_bytes
    assert len(curve(eager)) == 7
    assert curve(planned) == curve(eager)
    assert same(planned.model, eager.model)


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = trainer(wrap(llama(dropout=0.1), "75%"), tmp_path)
    whole.train()
    resumed = trainer(wrap(llama(seed=1, dropout=0.1), "75%"), tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert curve(resumed) == curve(whole)
    assert same(resumed.model, whole.model)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert same(reloaded, whole.model)


@pytest.mark.slow
def test_label_smoothing_takes_the_logits(tmp_path: Path) -> None:
    curves = []
    for budget in (None, "75%"):
        ran = trainer(wrap(llama(), budget), tmp_path, label_smoothing_factor=0.1)
        ran.train()
        curves.append(curve(ran))
    assert curves[0] == curves[1]


def test_checkpointing_by_the_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="also in the trainer"):
        trainer(wrap(with_lora(llama()), "75%"), tmp_path, activation_checkpointing=True).train()


def test_checkpointing_switched_on_after_a_step_is_refused() -> None:
    model, batch = wrap(with_lora(llama()), "75%"), {"input_ids": EXAMPLES[:4], "labels": EXAMPLES[:4]}
    model(**batch).loss.backward()
    model.activation_checkpointing_enable()
    with pytest.raises(UsageError, match=r"itself, in 'base_model\.model\.model.*activation_checkpointing_disable"):
        model(**batch)
    model.activation_checkpointing_disable()
    model.disable_input_require_grads()
    model(**batch).loss.backward()


@pytest.mark.slow
def test_adapters_and_tokens_added_after_wrapping() -> None:
    batch = {"input_ids": EXAMPLES[:4], "labels": EXAMPLES[:4]}

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model.train().zero_grad()
        torch.manual_seed(3)
        model(**batch).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = wrap(llama(), "75%")
    model.resize_token_embeddings(VOCABULARY + 8)
    assert len(gradients(model)) == len(list(model.parameters()))
    whole = planner.plan_of(model)
    outer = with_lora(model)
    planned = gradients(outer)
    assert planner.plan_of(model).fingerprint["parameters"] > whole.fingerprint["parameters"]
    planner.unwrap(model)
    expected = gradients(outer)
    assert len(expected) == 4  # adapters alone
    assert all(torch.equal(a, b) for a, b in zip(planned, expected, strict=True))


@pytest.mark.parametrize(
    ("mixed_precision", "late"), tiered(product(["no", "bf16"], [False, True]), quick=[("bf16", True)])
)
def test_accelerate(mixed_precision: str, late: bool) -> None:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    loader = DataLoader(EXAMPLES, batch_size=4)

    def train(budget: str | None) -> nn.Module:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        here = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
        if not late:
            wrap(model, budget)
        prepared, optimizer, batches = here.prepare(model, optimizer, loader)
        if late:
            wrap(prepared, budget)
        for batch in batches:
            with here.accumulate(prepared):
                here.backward(prepared(input_ids=batch, labels=batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        if budget is not None:
            assert planner.plan_of(prepared).runtime == "graph"
        return here.unwrap_model(prepared)

    assert same(train(None), train("80%"))
