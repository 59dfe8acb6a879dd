"""Tables of captured models for the search over splits, and what the planner itself says beside an estimate."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import planner
from planner import zoo
from planner.capture import fake_mode
from planner.capture.inputs import Inputs
from planner.common.options import Search, Target, Training
from planner.errors import UsageError
from planner.extras.splits import best_splits
from planner.extras.splits.captured_table import split_table
from planner.extras.splits.layers import cut
from planner.extras.splits.table import FULL, KEEP, ModelTable
from planner.extras.splits.types import FSDP2, REPLICATED
from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.session.step import Options
from tests.example_graphs import transformer


@cache
def table_of(name: str, *, length: int = 64, layers: int = 3, optimizer: str = "adamw") -> ModelTable:
    loaded = zoo.build(name, batch_size=1, seq_len=length, layers=layers, dtype="bfloat16", fake_mode=fake_mode())
    options = Options(target=Target("h100", cost_model="roofline"), training=Training(optimizer, master_weights=True))
    inputs = Inputs.of(loaded.example_args, loaded.example_kwargs)
    return split_table(loaded.model, inputs, loaded.loss_fn, options, tokens=length)


def parameter_bytes(table: ModelTable) -> int:
    """Return those of all layers."""
    ends = table.first.parameter_bytes + table.last.parameter_bytes - table.tied_bytes
    return ends + sum(table.kinds[kind].parameter_bytes for kind in table.row)


def test_a_table_counts_what_the_model_has() -> None:
    table = table_of("llama-7b", layers=3)
    loaded = zoo.build("llama-7b", batch_size=1, seq_len=64, layers=3, dtype="bfloat16", fake_mode=fake_mode())
    assert parameter_bytes(table) == sum(2 * parameter.numel() for parameter in loaded.model.parameters())
    assert table.is_uniform and table.tensor_degrees == (1, 2, 4, 8, 16, 32)
    kind = table.kinds[-1]
    assert kind.gradient_bytes == kind.parameter_bytes
    assert kind.optimizer_bytes == 6 * kind.parameter_bytes  # two moments and a copy, of 4 bytes for 2
    names = [choice.name for choice in kind.choices]
    assert (names[0], names[-1]) == (KEEP, FULL)
    saved = [choice.saved_bytes for choice in kind.choices]
    assert saved == sorted(saved, reverse=True) and not kind.choices[0].reruns
    # Two sums forward and two backward of a hidden state.
    assert kind.summed_forward_bytes == kind.summed_backward_bytes == 2 * 64 * 4096 * 2
    assert kind.boundary_bytes == 64 * 4096 * 2


def test_more_layers_are_like_those_that_were_captured() -> None:
    few, more = table_of("llama-7b", layers=2).deeper(3), table_of("llama-7b", layers=3)
    assert few.row == more.row and parameter_bytes(few) == parameter_bytes(more)
    assert few.kinds == more.kinds and (few.first, few.last) == (more.first, more.last)


def test_layers_are_shared_only_where_their_heads_can_be() -> None:
    assert table_of("gemma3-1b", layers=2).tensor_degrees == (1,)  # one head for keys and values


def test_tied_weights_are_counted_once() -> None:
    table = table_of("gpt2", layers=2)
    loaded = zoo.build("gpt2", batch_size=1, seq_len=64, layers=2, dtype="bfloat16", fake_mode=fake_mode())
    assert table.tied_bytes and parameter_bytes(table) == sum(2 * p.numel() for p in loaded.model.parameters())


def test_estimates_are_near_what_the_planner_itself_finds() -> None:
    loaded = zoo.build("llama-7b", batch_size=1, seq_len=512, layers=3, dtype="bfloat16", fake_mode=fake_mode())
    answer = best_splits(
        loaded.model,
        Inputs.of(loaded.example_args, loaded.example_kwargs),
        gpus=8,
        global_batch=128,
        device="h100",
        training=Training("adamw", master_weights=True),
        engines=("torchtitan",),
        top=20,
    )
    own = {REPLICATED: "ddp", FSDP2: "fsdp2"}
    alone = [one for one in answer.best if one.split.data == 8 and one.split.sharding in own]
    assert alone
    for one in alone[:2]:
        samples = zoo.build(
            "llama-7b", batch_size=one.split.micro_batch, seq_len=512, layers=3, dtype="bfloat16", fake_mode=fake_mode()
        )
        training = Training(
            optimizer="adamw",
            master_weights=True,
            gradient_accumulation=one.split.micro_batches(128) > 1,
            data_parallel=own[one.split.sharding],
            ranks=8,
        )
        inputs = Inputs.of(samples.example_args, samples.example_kwargs)
        target = Target("h100", cost_model="roofline")
        step = planner.study(samples.model, inputs, training=training, search=Search(deterministic=True), target=target)
        device = answer.question.device
        plan = step.plan(budget=answer.question.memory_bytes + device.library_bytes)
        assert one.peak_bytes == pytest.approx(plan.whole_step_peak_bytes - device.library_bytes, rel=0.03)


def test_inputs_of_several_samples_are_refused() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    with pytest.raises(UsageError, match="inputs of one sample"):
        best_splits(model, torch.zeros(2, 8), gpus=2, global_batch=4, device="h100")


def test_layers_hold_all_operations_and_hand_over_what_others_read() -> None:
    graph, costs = transformer(4)
    layers = cut(graph, costs)
    assert sorted(index for layer in layers for index in layer.operations) == list(range(len(graph.operations)))
    names = ["transformer.wte", *(f"transformer.h.{i}" for i in range(4)), "transformer.ln_f", "lm_head"]
    assert [name for layer in layers for name in layer.layers] == names
    gradients = [value.size_bytes for value in graph.values if value.kind == "gradient"]
    assert sum(layer.gradient_bytes for layer in layers) == sum(gradients)
    assert sum(c.seconds for layer in layers for c in layer.costs) == pytest.approx(sum(c.seconds for c in costs))
    for layer in layers:
        by_name = {op.name: op for op in layer.graph.operations}
        received = [layer.graph.values[v].size_bytes for v in by_name["activations received"].outputs]
        assert sorted(received) == ([0, 0] if layer is layers[0] else [0, 0, 2**20])
        assert (not by_name["gradients received"].outputs) == (layer is layers[-1])


def shared_parameter() -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return a step whose first and last layer share a parameter, so that their gradients are summed."""
    rows = [
        # name, module, phase, inputs, sizes, retained gradient
        ("embed", "first", Phase.FORWARD, (), 4, False),
        ("mm", "last", Phase.FORWARD, (0,), 4, False),
        ("loss", "", Phase.LOSS, (1,), 1, False),
        ("grad_weight", "last", Phase.BACKWARD, (2, 0), 16, False),
        ("grad_input", "last", Phase.BACKWARD, (2,), 4, False),
        ("embed_backward", "first", Phase.BACKWARD, (4,), 16, False),
        ("add", "", Phase.BACKWARD, (3, 5), 16, True),
    ]
    operations, values = [], []
    for index, (name, module, phase, inputs, size, retained) in enumerate(rows):
        operations.append(Operation(name=name, key=name, target=name, inputs=inputs, outputs=(index,), phase=phase,
                                    module=module))  # fmt: skip
        values.append(
            Value(name=name, size_bytes=size, retained=retained, kind="gradient" if retained else "activation")
        )
    return TrainingGraph(operations=tuple(operations), values=tuple(values)), (OperationCost(seconds=1.0),) * len(rows)


def test_each_layer_keeps_its_share_of_a_shared_gradient() -> None:
    first, last = cut(*shared_parameter())
    assert (first.gradient_bytes, last.gradient_bytes) == (16, 16)
    assert "add" not in {op.name for op in (*first.graph.operations, *last.graph.operations)}
    sent = next(op for op in last.graph.operations if op.name == "gradients sent")
    assert sum(last.graph.values[v].size_bytes for v in sent.inputs) == 4
