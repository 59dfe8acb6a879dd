"""Callbacks for other people's loops: the bits of the loop without one, and a measured peak within the budget.

What only some tests need, and is slow to import, is imported there: every worker reads this file.
"""

from __future__ import annotations

import doctest
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

import planner
from planner import integrations
from planner.capture.memory import Recording, record
from planner.capture.trees import tensors_in
from planner.errors import UsageError
from planner.integrations import name_of
from planner.zoo.modules import MiniGPT
from tests.models import language_model
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # what the trainers warn of is not ours

VOCABULARY, LENGTH, STEPS = 64, 64, 6
EXAMPLES = torch.randint(VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(1))
SEARCH = planner.Search(time_limit_seconds=1.0)


class Watch:
    """Records what the last steps allocate; what there is before them is counted by :meth:`peak_bytes`."""

    def __init__(self) -> None:
        self.stack, self.recordings = ExitStack(), list[Recording]()

    def begin(self, number: int) -> None:
        if number >= STEPS - 2:  # the loop is known by then
            self.recordings.append(self.stack.enter_context(record()))

    def end(self) -> None:
        self.stack.close()

    def peak_bytes(self, *held: Any) -> int:
        assert len(self.recordings) == 2
        there = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(held)}
        before_bytes = sum(tensor.untyped_storage().nbytes() for tensor in there.values())
        return before_bytes + max(recording.peak_bytes() for recording in self.recordings)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def trained(make: Any, folder: Path, budget: int | None, **arguments: Any) -> tuple[nn.Module, int]:
    """Train what ``make(callbacks, **settings)`` makes, and return its model with the measured peak of a step."""
    import transformers

    class Watched(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.end()

    torch.manual_seed(0)
    watch = Watch()
    callbacks = [] if budget is None else [integrations.PlanCallback(budget, search=SEARCH)]
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, **arguments,
    }  # fmt: skip
    trainer = make([*callbacks, Watched()], **settings)
    trainer.train()
    return trainer.model, watch.peak_bytes([*trainer.model.parameters()], [*trainer.optimizer.state.values()])


def hugging_face(folder: Path, budget: int | None, **arguments: Any) -> tuple[nn.Module, int]:
    """Train a small Llama, and return it with the measured peak of a step."""
    import transformers

    def made(callbacks: list[Any], **settings: Any) -> Any:
        sizes = {"intermediate_size": 128, "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2}
        rows = [{"input_ids": row, "labels": row} for row in EXAMPLES]
        model, given = language_model(num_hidden_layers=1, **sizes), transformers.TrainingArguments(**settings)
        return transformers.Trainer(model, given, train_dataset=rows, callbacks=callbacks)

    return trained(made, folder, budget, **arguments)


CASES: dict[str, dict[str, Any]] = {
    "checkpointing, bf16": {"gradient_checkpointing": True, "bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_trainer(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = dict(CASES[case])
    has_own = arguments.pop("gradient_checkpointing", False)
    plain, needed_bytes = hugging_face(tmp_path, None, **arguments)
    budget_bytes = int(0.75 * needed_bytes)
    planned, peak_bytes = hugging_face(tmp_path, budget_bytes, gradient_checkpointing=has_own, **arguments)
    assert same(plain, planned)
    assert peak_bytes <= budget_bytes < needed_bytes
    plan = planner.plan_of(planned)
    assert plan.recomputations and plan.static_bytes["optimizer"]
    assert ("gradients" in plan.static_bytes) == ("gradient_accumulation_steps" in arguments)
    assert ("gradient_checkpointing is replaced by a plan" in caplog.text) == has_own


@pytest.mark.slow
def test_trainer_that_compiles(tmp_path: Path) -> None:
    plain, needed_bytes = hugging_face(tmp_path, None, torch_compile=True)
    planned, peak_bytes = hugging_face(tmp_path, budget := int(0.8 * needed_bytes), torch_compile=True)
    assert planner.plan_of(planned).runtime == "inductor" and peak_bytes <= budget
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("setting", [{"torch_compile_backend": "eager"}, {"torch_compile_mode": "reduce-overhead"}])
def test_compilation_that_no_plan_goes_with_is_refused(setting: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Pass torch_compile=True alone"):
        hugging_face(tmp_path, 2**30, **setting)


@pytest.mark.parametrize("precision", tiered(["32-true", "bf16-mixed"], slow=["bf16-mixed"]))
def test_lightning(precision: str, tmp_path: Path) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MiniGPT(layers=2, width=32, heads=2, hidden=128, vocabulary=VOCABULARY, positions=LENGTH)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(batch, batch)

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("validation", self.model(batch, batch))

        def configure_optimizers(self) -> AdamW:
            return AdamW(self.parameters(), lr=1e-2)

    class Watched(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            watch.begin(index)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            watch.end()

    def train(*callbacks: Any, model: type[Lit] = Lit) -> tuple[Any, int]:
        torch.manual_seed(0)
        module = model()
        loop = lightning.Trainer(
            max_epochs=1, accelerator="cpu", precision=precision, callbacks=[*callbacks, Watched()], logger=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2, default_root_dir=tmp_path,
        )  # fmt: skip
        loop.fit(module, DataLoader(EXAMPLES, batch_size=4), DataLoader(EXAMPLES[:6], batch_size=4))
        assert same(model.load_from_checkpoint(loop.checkpoint_callback.best_model_path), module)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return module, watch.peak_bytes([*module.parameters()], gradients, [*loop.optimizers[0].state.values()])

    watch = Watch()
    plain, needed_bytes = train()
    watch, budget = Watch(), int(0.85 * needed_bytes)
    planned, peak_bytes = train(integrations.PlanLightning(budget, search=SEARCH))
    assert same(plain, planned)
    assert peak_bytes <= budget and planner.plan_of(planned.model).static_bytes["gradients"]

    class TwoParts(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

    with pytest.raises(UsageError, match=r"trains 2 parts \(model, head\): .*module="):
        train(integrations.PlanLightning(budget), model=TwoParts)
    with pytest.raises(UsageError, match="did not call the wrapped Linear"):
        train(integrations.PlanLightning(budget, module="head"), model=TwoParts)


def test_examples_in_docstrings_run() -> None:
    """Pytest collects those of all other modules."""
    modules = map(import_module, ("planner.integrations.huggingface", "planner.integrations.lightning"))
    assert set(map(doctest.testmod, modules)) == {(0, 1)}


def test_torchtitan() -> None:
    """A stand-in for its trainer: converters are built, the model is converted on meta, then allocated and trained."""

    def train(converters: Iterable[Any]) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = MiniGPT(layers=2, width=32, heads=2, hidden=64, vocabulary=VOCABULARY, positions=LENGTH)
        built = [converter.build(parallel_dims=None, model_compile_enabled=False) for converter in converters]
        assert all(c.key_filter() is c.state_dict_transform() is c.format_adapter() is None for c in built)
        for converter in built:
            converter.convert(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        optimizer = AdamW(model.parameters())
        for batch in EXAMPLES.split(8):
            model(batch, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            for converter in built:
                converter.post_optimizer_hook([model])
        return model

    planned = train([integrations.PlanConverter("70%", training="adamw", search=SEARCH)])
    assert planner.plan_of(planned).recomputations
    assert same(planned, train([]))
    converter = integrations.PlanConverter("70%")
    converter.convert(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="torchtitan took a step"):
        converter.post_optimizer_hook([])


def test_names_of_optimizers() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert name_of(AdamW(parameters), is_found=True) == "none"
    assert name_of(AdamW(parameters), "adamw_torch", is_found=False) == "adamw"
    assert name_of(SGD(parameters, momentum=0.9), is_found=False) == "momentum"
    other = type("AdamW", (torch.optim.Optimizer,), {})(parameters, {})
    asked = {"adamw_8bit": "adamw8bit", "paged_adamw_8bit": "none", "adamw_anyprecision": "adamw"}
    assert {name: name_of(other, name, is_found=True) for name in asked} == asked
