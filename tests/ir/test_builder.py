"""The builder of training graphs, by hand."""

from __future__ import annotations

from planner.ir.builder import GraphBuilder, StepContext
from planner.ir.graph import LOSS_KEY, Phase
from planner.ir.static_memory import LossMemory

LOSS = LossMemory(working_bytes=700, held_bytes=8)


def test_keys_count_by_module_target_and_phase() -> None:
    context = StepContext(alignment_bytes=512, static_bytes={"parameters": 4}, name="model", loss=LOSS)
    builder = GraphBuilder[str](context)
    a = builder.add_value("a", 1)
    builder.add("mm", (), (a,), name="first", module="h.0", node="fx")
    builder.add("mm", (a, a), name="second", module="h.0")
    builder.add_loss((a,), builder.add_loss_values())
    builder.add("mm", (a,), name="third", module="h.0")
    graph = builder.finish()
    assert [operation.key for operation in graph.operations] == ["h.0|mm|f0", "h.0|mm|f1", LOSS_KEY, "h.0|mm|b0"]
    assert [operation.phase for operation in graph.operations][2:] == [Phase.LOSS, Phase.BACKWARD]
    assert graph.operations[1].inputs == (a,)
    assert builder.operation_nodes == ["fx", None, None, None] and len(builder.value_nodes) == len(graph.values)


def test_sizes_are_rounded_up_but_for_what_a_loss_works_with() -> None:
    builder = GraphBuilder[str](StepContext(alignment_bytes=512, loss=LOSS))
    made = [builder.add_value("a", 513), *builder.add_loss_values()]
    assert [builder.values[value].size_bytes for value in made] == [1024, 700, 512]
    assert [builder.values[value].retained for value in made] == [False, False, True]
    assert GraphBuilder[str](StepContext(alignment_bytes=512)).add_loss_values() == []
