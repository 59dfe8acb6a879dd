"""The runtime of checkpointed modules: what eager would do, to the byte and to the bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import planner
from planner.capture.eager.graph import lower_eager
from planner.capture.eager.record import record
from planner.capture.inputs import Inputs
from planner.capture.memory import measure_peak
from planner.capture.torch_internals import VERSION, installed_call
from planner.common.limits import SolveLimits
from planner.common.options import grouped
from planner.errors import InfeasibleBudgetError, RuntimeUnsupportedError, UnsupportedModelError, UsageError
from planner.ir.builder import StepContext
from planner.ir.checkpoints import Region, schedule_of
from planner.ir.graph import OperationCost
from planner.ir.problem import Problem
from planner.ir.simulator import simulate
from planner.plans.module_choices import modules_of
from planner.solving.modules.ilp import Chooser, cheapest, exclusive_sets, variants_of
from tests import models
from tests.models import WIDTH, Convolutions, Layers, OneLinear, linear, looked_at, mean_square, perceptron, rows
from tests.runtimes.steps import assert_gradients, assert_same, beside, hold_peak, measured_bytes, train
from tests.tiers import tiered


def _inner() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class Mlp(Layers, inner=_inner):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, str]:
        return x + scale * self.inner(x), "beside"


class Stack(models.Stack):
    """Blocks that take keyword arguments and numbers, and give tuples."""

    def __init__(self, depth: int = 4, **given: Any) -> None:
        super().__init__(depth, Mlp, **given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        return x.square().mean()


class Branching(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if looked_at(self, x) > 1e9 else -x)


def _layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Detached(Layers, encoder=lambda: nn.Sequential(*(_layer() for _ in range(4))), decoder=_layer):
    """A codec: what its encoder gives is rounded, so that no gradient comes back to the encoder."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).round().detach()).square().mean()


def problem_of(model: nn.Module, x: torch.Tensor) -> tuple[Problem, tuple[Region, ...]]:
    inputs = Inputs.of(x)
    step = lower_eager(record(model, inputs), model, inputs.tensors(), StepContext(alignment_bytes=64))
    graph = step.lowered.graph
    costs = tuple(
        OperationCost(seconds=1e-6 * (op.moved_bytes + op.flops), workspace_bytes=op.flops % 4096)
        for op in graph.operations
    )
    return Problem(graph=graph, costs=costs, budget_bytes=0), step.regions


class Scaled(nn.Module):
    """Saves 64 numbers, and next to nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(32):
            x = 1.5 * x / 1.5
        return x.sum()


def test_numbers_that_autograd_keeps_are_counted() -> None:
    x = torch.randn(16, requires_grad=True)  # a storage of 64 bytes: no rounding hides what is missed
    plan = planner.plan(Scaled(), x, budget="100%", runtime="modules", search=planner.Search(compare=False))
    peak_bytes, _ = measure_peak(lambda: Scaled()(x).backward(), torch.device("cpu"))
    predicted_bytes = plan.peak_bytes - plan.total_static_bytes
    assert 64 * 8 < peak_bytes <= predicted_bytes <= peak_bytes + 70 * 64


def test_errors_say_of_what_a_smallest_budget_is_proven() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"no choice of modules needs less than [\d.]+ KiB\)"):
        planner.plan(Stack(), rows(), budget=planner.Budget(activations=1), runtime="modules")


def choices(variants: Sequence[Region]) -> list[tuple[int, ...]]:
    """Return every choice, at most one on each path of the module tree."""
    together = [set(numbers) for numbers in exclusive_sets(variants)]
    found: list[tuple[int, ...]] = [()]
    for number in range(len(variants)):
        found += [
            (*chosen, number)
            for chosen in found
            if not any(number in numbers and not numbers.isdisjoint(chosen) for numbers in together)
        ]
    return found


@pytest.mark.parametrize(("model", "x"), [(Stack(3), rows(64)), (Convolutions(2), models.images(2, size=8))])
def test_the_choice_is_the_best_of_all(model: nn.Module, x: torch.Tensor) -> None:
    problem, regions = problem_of(model, x)
    variants = variants_of(regions, problem.graph, problem.costs)
    outcome = {
        chosen: (
            simulate(
                problem.graph, problem.costs, schedule_of(problem.graph, [variants[r] for r in chosen])
            ).peak_bytes,
            sum(problem.costs[index].seconds for r in chosen for index in variants[r].recompute),
        )
        for chosen in choices(variants)
    }
    lowest = min(peak for peak, _ in outcome.values())
    whole = {chosen: found for chosen, found in outcome.items() if not any(variants[r].kept for r in chosen)}
    cheaper = 0
    for budget in {lowest + (problem.baseline.peak_bytes - lowest) * part // 4 for part in range(5)}:
        posed = Problem(graph=problem.graph, costs=problem.costs, budget_bytes=budget)
        chooser = Chooser(posed, variants, SolveLimits(time_limit_seconds=30).clock())
        found, bound_seconds = chooser.choose()
        best = min(seconds for peak, seconds in outcome.values() if peak <= budget)
        assert outcome[tuple(sorted(found))][0] <= budget
        assert outcome[tuple(sorted(found))][1] == pytest.approx(best, rel=1e-6, abs=1e-12)
        assert bound_seconds <= best * (1 + 1e-9)
        assert bound_seconds == pytest.approx(best, rel=1e-4, abs=1e-12)
        assert outcome[tuple(sorted(chooser.lowest()))][0] == lowest
        cheaper += all(best < seconds for peak, seconds in whole.values() if peak <= budget)
    assert cheaper


class RunsOut:
    """A clock that says so many times that there is time left."""

    counts_work = False

    def __init__(self, times: int) -> None:
        self.times = times

    def left(self) -> float:
        self.times -= 1
        return 30.0 if self.times >= 0 else 0.0


def test_whole_modules_are_chosen_where_no_time_is_left_for_more() -> None:
    problem, regions = problem_of(Stack(3), rows(64))
    problem = Problem(graph=problem.graph, costs=problem.costs, budget_bytes=problem.baseline.peak_bytes * 3 // 4)
    clock: Any = RunsOut(10**6)
    chooser = Chooser(problem, regions, clock)
    whole = chooser.schedule(chooser.choose()[0])
    whole_seconds = problem.evaluate(whole).recompute_seconds
    asked = 10**6 - clock.times
    assert cheapest(problem, regions, clock).recompute_seconds < whole_seconds
    found = cheapest(problem, regions, RunsOut(asked))  # type: ignore[arg-type]
    assert found.schedule == whole and found.lower_bound_seconds <= whole_seconds
    with pytest.raises(InfeasibleBudgetError):
        cheapest(replace(problem, budget_bytes=64), regions, RunsOut(10**6))  # type: ignore[arg-type]


def test_nothing_is_left_in_the_model_between_calls() -> None:
    model = planner.auto_wrap(Stack(), rows(), budget=planner.Budget(activations="60%"), runtime="modules")
    assert modules_of(planner.plan_of(model))
    loss = model(rows())
    assert all(installed_call(m) is None for name, m in model.named_modules() if name)
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)
    loss.backward()


def test_hooks_and_double_backward_work_as_in_eager() -> None:
    plain = Stack().eval()
    wrapped = copy.deepcopy(plain)
    seen: list[str] = []
    wrapped.blocks[1].inner.register_full_backward_hook(lambda *_: seen.append("hook"))
    planner.auto_wrap(wrapped, rows().requires_grad_(), budget=planner.Budget(activations="60%"), runtime="modules")
    for model in (plain, wrapped):
        x = rows().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        gradient.square().sum().backward()
    assert seen
    assert_gradients(plain, wrapped)


def test_a_backward_that_is_differentiated_counts_to_the_end_of_the_step() -> None:
    """The second derivative need not come to the model's output again: what it held went unseen."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = planner.auto_wrap(nn.Sequential(*layers), budget="1MiB", runtime="modules")
    with pytest.warns(UserWarning, match="no plan fits"):
        for _ in range(5):
            x = torch.rand(512, WIDTH, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            curve.square().sum().backward()


def test_a_part_that_the_forward_differentiates_is_left_to_modules() -> None:
    class Forces(Layers, energy=perceptron):
        def forward(self, places: torch.Tensor) -> torch.Tensor:
            energy = self.energy(places.requires_grad_()).square().sum()
            return energy + torch.autograd.grad(energy, places, create_graph=True)[0].square().sum()

    with pytest.raises(planner.CaptureError, match="differentiates energy twice"):
        planner.auto_wrap(Forces(), budget="1GiB", runtime="parts")(rows()).backward()
    model = planner.auto_wrap(Forces(), budget="1GiB")
    with pytest.warns(UserWarning, match=r"call it before the model, or on a copy"):
        model(rows()).backward()
    assert planner.plan_of(model).runtime == "modules"


@pytest.mark.filterwarnings("ignore:.* instead of", "ignore:data decide what")
@pytest.mark.parametrize("runtime", tiered(["modules", "auto"], quick=["modules"]))
def test_a_frozen_model_runs_as_it_is_until_it_trains_again(runtime: str) -> None:
    model = Branching().requires_grad_(False)
    planner.auto_wrap(model, budget=planner.Budget(activations="60%"), runtime=runtime)
    assert not model(rows()).requires_grad
    model.requires_grad_(True)(rows()).backward()
    plan = planner.plan_of(model)
    assert modules_of(plan)
    model.requires_grad_(False)
    assert not model(rows()).requires_grad
    hook = model.blocks[0].register_forward_hook(lambda module, given, output: (output[0] * weight, output[1]))
    weight = nn.Parameter(torch.ones(1))
    for _ in range(2):  # a weight that is none of the model's: it is planned for once it was seen
        model(rows()).backward()
    assert weight.grad is not None and planner.plan_of(model) is not plan
    hook.remove()
    assert not model(rows()).requires_grad


@pytest.mark.parametrize("state", ["bias", "buffer", "attribute"])
def test_what_is_changed_before_the_backward_is_refused(state: str) -> None:
    model = Stack()
    for block in model.blocks:
        block.inner.register_buffer("unread", torch.zeros(1))
        block.inner.mask = torch.zeros(1)
    planner.auto_wrap(model, rows(), budget=planner.Budget(activations="60%"), runtime="modules")
    chosen = model.get_submodule(modules_of(planner.plan_of(model))[0])
    loss = model(rows())
    assert isinstance(chosen, Mlp)
    changed = {"bias": chosen.inner[0].bias, "buffer": chosen.inner.unread, "attribute": chosen.inner.mask}[state]
    with torch.no_grad():
        changed.add_(0.1)
    with pytest.raises(RuntimeUnsupportedError, match="changed in place between the forward and its backward"):
        loss.backward()
    model(rows()).backward()


def freeze(block: Any) -> None:
    block.inner[0].requires_grad_(False)


def drop_more(block: Any) -> None:
    block.inner[2].p = 0.5


def hook_outputs(block: Any) -> None:
    block.inner[0].register_forward_hook(lambda module, given, output: 2 * output)


def replace_part(block: Any) -> None:
    block.inner[1] = nn.SiLU()


def replace_forward(block: Any) -> None:
    block.inner[1].forward = torch.sin


@pytest.mark.parametrize("change", [nn.Module.eval, freeze, drop_more, hook_outputs, replace_part, replace_forward])
def test_a_module_runs_again_as_it_was(change: Callable[[Any], object]) -> None:
    plain, wrapped = beside(Stack(), rows(), activation_budget="60%", runtime="modules")
    chosen = modules_of(planner.plan_of(wrapped))
    assert chosen
    for model in (plain, wrapped):
        torch.manual_seed(7)
        loss = model(rows())
        for block in model.blocks:
            change(block)
        changed = [dict(vars(part)) for part in model.blocks.modules()]
        loss.backward()
        assert [vars(part) for part in model.blocks.modules()] == changed
    assert_gradients(plain, wrapped)


class Growing(Layers, calls=int, seen=lambda: [1.0], first=linear(WIDTH, 4 * WIDTH), second=linear(4 * WIDTH, WIDTH)):
    """Scales by what it keeps in Python: a number and a list, which each call adds to, and a tensor that it is lent."""

    scale = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.seen[-1] / 2)
        hidden = torch.tanh(self.first(x) * self.calls * self.scale)
        return x + self.second(torch.sigmoid(hidden) * self.seen[-1])


def test_a_second_run_finds_what_a_module_keeps_in_python_and_adds_nothing_to_it() -> None:
    model = nn.Sequential(*(Growing() for _ in range(4)))
    plain, wrapped = beside(model, rows(), activation_budget="85%", loss_fn=mean_square, runtime="modules")
    assert modules_of(planner.plan_of(wrapped))
    for model in (plain, wrapped):
        losses = []
        for scale in (0.5, 2.0):  # two forwards before a backward, each lent a tensor of its own
            for block in model:
                block.scale = torch.full((1,), scale)
            losses.append(mean_square(model(rows())))
        sum(losses).backward()
        assert [(block.calls, len(block.seen)) for block in model] == 4 * [(2, 3)]
    assert_gradients(plain, wrapped)


def test_an_inner_step_is_differentiated_with_the_parameters_that_it_ran_with() -> None:
    plain, wrapped = beside(Stack().eval(), activation_budget="60%", runtime="modules")
    for model in (plain, wrapped):
        trained = dict(model.named_parameters())
        for _ in range(2):  # the second step is of computed parameters
            loss = functional_call(model, trained, (rows(),))
            gradients = torch.autograd.grad(loss, list(trained.values()), create_graph=True)
            trained = {name: p - 0.1 * g for (name, p), g in zip(trained.items(), gradients, strict=True)}
        functional_call(model, trained, (rows(),)).backward()
    assert modules_of(planner.plan_of(wrapped))
    assert_gradients(plain, wrapped)


@pytest.mark.filterwarnings("ignore:data decide what Sequential runs")
def test_a_scripted_part_runs() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model, x = nn.Sequential(perceptron(), scripted, perceptron()), rows()
    for _ in range(3):  # TorchScript itself rounds otherwise after its first runs
        expected = torch.autograd.grad(mean_square(model(x)), [*model.parameters()])
    planner.auto_wrap(model, budget=planner.Budget(activations="80%"), runtime="modules", loss_fn=mean_square)
    mean_square(model(x)).backward()
    assert modules_of(planner.plan_of(model))
    for gradient, parameter in zip(expected, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_a_part_of_another_size_is_planned_for() -> None:
    model = planner.auto_wrap(Stack(), budget="1GiB", runtime="modules")
    model(rows()).backward()
    before = planner.plan_of(model)
    model.blocks[1].inner[0] = nn.Linear(WIDTH, 16 * WIDTH)
    model.blocks[1].inner[3] = nn.Linear(16 * WIDTH, WIDTH)
    model(rows()).backward()
    hold_peak(model, rows())
    assert planner.plan_of(model).total_static_bytes > before.total_static_bytes


class GradientCheckpointingLayer(Mlp):
    """Named like the class of transformers from which its layers derive."""

    gradient_checkpointing = False


def test_layers_that_a_model_declares_are_the_candidates() -> None:
    model = Stack()
    model.blocks[1] = GradientCheckpointingLayer()
    model.blocks[2] = GradientCheckpointingLayer()
    plan = planner.plan(model, rows(), **grouped(activation_budget="75%", runtime="modules", compare=False))
    assert all(name.startswith(("blocks.1", "blocks.2")) for name in modules_of(plan))
    model.blocks[1].gradient_checkpointing = True
    with pytest.raises(UsageError, match="set its gradient_checkpointing = False"):
        planner.plan(model, rows(), budget=planner.Budget(activations="75%"), runtime="modules")


class CheckpointsItself(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0].inner(x)
        x = checkpoint(torch.sin, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_calls_checkpoint_itself_is_refused_with_the_line(use_reentrant: bool) -> None:
    model = CheckpointsItself(use_reentrant=use_reentrant)
    source, first = inspect.getsourcelines(type(model).forward)
    line = first + next(number for number, text in enumerate(source) if "checkpoint" in text)
    with pytest.raises(UsageError, match=rf"test_modules.py:{line};.*decides.*runtime 'graph'"):
        planner.plan(model, rows(), budget=planner.Budget(activations="80%"), runtime="modules")
    with pytest.raises(UsageError, match="checkpoint itself, at"):
        planner.auto_wrap(model, budget=planner.Budget(activations="80%"), runtime="modules")(rows())
    assert all(installed_call(module) is None for name, module in model.named_modules() if name)


def test_a_wrapped_model_may_run_under_a_checkpoint_of_the_callers() -> None:
    model = planner.auto_wrap(Stack(), budget=planner.Budget(activations="100%"), runtime="modules")
    checkpoint(model, rows(), use_reentrant=False).backward()
    assert planner.plan_of(model).recomputations == {}


class Classifier(Stack, head=linear(WIDTH, 1024)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.int64))


class Given(NamedTuple):
    """Named as models of transformers name what they return."""

    loss: torch.Tensor
    past_key_values: torch.Tensor | None


class Caching(Stack):
    config = SimpleNamespace(use_cache=True)

    def forward(self, x: torch.Tensor) -> Any:
        return Given(loss=super().forward(x), past_key_values=x if self.config.use_cache else None)


def test_findings_are_those_of_whole_graphs() -> None:
    model = Classifier()
    model.head.register_full_backward_hook(lambda *_: None)
    assert findings(model) == set()  # hooks are called, as in eager
    part = model.blocks[0].inner
    assert findings(part) == {"loss-not-counted"} and findings(part, loss_fn=torch.sum) == set()
    model = Caching()
    assert findings(model) == {"use-cache"}
    model.config = SimpleNamespace(use_cache=False)
    assert findings(model) == set()
    found = findings(Classifier(), budget="80%")
    assert "logits-dominate" in found and found == findings(Classifier(), budget="60%", runtime="graph")


def findings(model: nn.Module, *, budget: str = "100%", runtime: str = "modules", **options: Any) -> set[str]:
    made = planner.plan(model, rows(), **grouped(budget=budget, runtime=runtime, compare=False, **options))
    return {warning.rule for warning in made.warnings}


class CountsItsCalls(Layers, linear=linear(WIDTH, WIDTH), calls=lambda: nn.Buffer(torch.zeros(()))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).sigmoid().tanh()


class Summed(OneLinear):
    """Sums over all ranks within, by torch.distributed's own call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x).sigmoid().tanh()
        torch.distributed.all_reduce(made.detach().clone())
        return made


@pytest.mark.parametrize("kind", [CountsItsCalls, Summed])
def test_what_cannot_run_twice_or_talks_to_other_processes_is_left_alone(kind: Any, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        _, regions = problem_of(nn.Sequential(*(kind() for _ in range(3)), nn.Linear(WIDTH, 1)), rows())
    finally:
        torch.distributed.destroy_process_group()
    assert regions == ()


class Decaying(Layers, layers=lambda: perceptron(WIDTH, hidden=8 * WIDTH)):
    """Gives its weights other memory in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.layers.parameters():
            parameter.data = parameter.data * 0.9
        return x + self.layers(x)


def test_weights_that_are_given_other_memory_are_left_to_this_runtime() -> None:
    model, x = nn.Sequential(*(Decaying() for _ in range(2))), rows()
    asked: dict[str, Any] = {"budget": planner.Budget(activations="100%"), "loss_fn": mean_square}
    is_captured = VERSION >= (2, 14)
    said = r"new memory by \.data = \(.*test_modules.py:\d+\)"
    with nullcontext() if is_captured else pytest.raises(UnsupportedModelError, match=said):
        planner.plan(model, x, runtime="graph", **asked)
    plain = copy.deepcopy(model)
    planner.auto_wrap(model, runtime="modules" if is_captured else "auto", **asked)
    said = "'modules' instead of 'graph'.* new memory"
    with nullcontext() if is_captured else pytest.warns(UserWarning, match=said):
        found = train(model, x, mean_square)
    assert_same(train(plain, x, mean_square), found)
    plan = planner.plan_of(model)
    assert plan.runtime == "modules"
    measured_bytes(model, x, mean_square)  # from now on the profiler knows how large the memory is that a step gives up
    assert measured_bytes(model, x, mean_square) <= plan.peak_bytes - plan.total_static_bytes  # as if that was not so


def _ends_in_noise() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.RReLU())


@pytest.mark.parametrize("runtime", tiered(["modules", "parts", "regional", "graph"], quick=["modules"]))
def test_saved_before_it_is_filled(runtime: str) -> None:
    """RReLU saves its noise and then draws it: torch's second run of a module would end in between."""
    wide = [perceptron(WIDTH, hidden=8 * WIDTH) for _ in range(2)]
    model, x = nn.Sequential(*(_ends_in_noise() for _ in range(3)), *wide), rows()
    plain, model = beside(model, activation_budget="85%", runtime=runtime, loss_fn=mean_square)
    assert_same(train(plain, x, mean_square), train(model, x, mean_square))
    _, regions = problem_of(nn.Sequential(_ends_in_noise(), nn.Sequential(_ends_in_noise(), nn.Tanh())), rows())
    assert {region.module for region in regions}.isdisjoint({"0", "1.0"})


def test_no_other_operator_fills_what_it_was_given_to_save() -> None:
    """Of torch's operators that are not in place, these alone write into an argument: the rest are statistics."""
    written = {
        f"{schema.name}: {argument.name}"
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and str(schema.returns[0].type if schema.returns else "") == "Tensor"
        if not schema.name.endswith("_") and not any(a.is_out for a in schema.arguments)
        for argument in schema.arguments[1:]
        if argument.alias_info is not None and argument.alias_info.is_write and str(argument.type) == "Tensor"
    }
    rest = ("running_m", "running_v", "scale", "zero_point", "out")  # the last of operators without gradients
    assert {one for one in written if not one.split(": ")[1].startswith(rest)} == {"aten::rrelu_with_noise: noise"}
