"""Hand-built training graphs for tests: what a capture would give, without torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from planner.ir.graph import Operation, OperationCost, Phase, TrainingGraph, Value
from planner.ir.schedule import Schedule, recompute_lazily

ROUND_BYTES = 64


class Builder:
    """Adds operations in base order and keeps the bookkeeping of values, keys and costs."""

    def __init__(self, alignment_bytes: int = 64) -> None:
        self.alignment_bytes = alignment_bytes
        self.operations: list[Operation] = []
        self.values: list[Value] = []
        self.costs: list[OperationCost] = []
        self._occurrence: Counter[str] = Counter()

    def add(
        self,
        target: str,
        inputs: list[int],
        sizes: list[int],
        *,
        module: str = "",
        phase: Phase = Phase.FORWARD,
        seconds: float = 1e-3,
        workspace: int = 0,
        kind: str = "activation",
        retained: bool = False,
        recomputable: bool = True,
        state_bytes: int = 0,
        region: str = "",
    ) -> list[int]:
        """Add one operation and give the values that it makes."""
        stem = f"{module}|{target}|{phase}"
        occurrence = self._occurrence[stem]
        self._occurrence[stem] += 1
        outputs = []
        for size in sizes:
            outputs.append(len(self.values))
            rounded = -(-size // self.alignment_bytes) * self.alignment_bytes
            self.values.append(Value(name=f"v{len(self.values)}", size_bytes=rounded, kind=kind, retained=retained))
        self.operations.append(
            Operation(
                name=f"op{len(self.operations)}",
                key=f"{stem}+{occurrence}",
                target=target,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                phase=phase,
                module=module,
                source=f"model.py:{10 + len(self.operations) % 40}" if phase is Phase.FORWARD else "",
                recomputable=recomputable,
                state_bytes=state_bytes,
                region=region,
                flops=int(seconds * 1e12),
                moved_bytes=sum(sizes),
            )
        )
        self.costs.append(OperationCost(seconds=seconds, workspace_bytes=workspace))
        return outputs

    def graph(self, name: str, static_bytes: dict[str, int]) -> TrainingGraph:
        """Close the graph."""
        return TrainingGraph(
            operations=tuple(self.operations),
            values=tuple(self.values),
            static_bytes=static_bytes,
            alignment_bytes=self.alignment_bytes,
            name=name,
        )


def by_reads(
    reads: Sequence[Sequence[int]], sizes: Sequence[int], *, forward: int | None = None, retained: Sequence[int] = ()
) -> TrainingGraph:
    """Return a step by what each operation reads and how many bytes it makes, and how many of them are forward."""
    operations = (
        Operation(name=f"o{i}", key=f"o{i}", target="", inputs=tuple(inputs), outputs=(i,))
        for i, inputs in enumerate(reads)
    )
    return TrainingGraph(
        operations=tuple(
            one if forward is None or i < forward else replace(one, phase=Phase.BACKWARD)
            for i, one in enumerate(operations)
        ),
        values=tuple(Value(name=f"v{i}", size_bytes=size, retained=i in retained) for i, size in enumerate(sizes)),
    )


def transformer(
    layers: int = 6, *, unit_bytes: int = 2**20, vocabulary: int = 4
) -> tuple[TrainingGraph, tuple[OperationCost, ...]]:
    """Return a transformer-like step of ``layers`` equal blocks, with dropout, loss and parameter gradients."""
    b, unit = Builder(), unit_bytes
    tape: list[tuple[str, str, list[int], float]] = []  # module, target, saved values, seconds

    def forward(target: str, module: str, inputs: list[int], sizes: list[int], saved: list[int] | None, s: float,
                state: int = 0) -> list[int]:  # fmt: skip
        made = b.add(target, inputs, sizes, module=module, seconds=s, state_bytes=state)
        tape.append((module, target, made if saved is None else saved, s))
        return made

    x = forward("aten.embedding.default", "transformer.wte", [], [unit], [], 1e-4)[0]
    for i in range(layers):
        block = f"transformer.h.{i}"
        n, rstd = forward("aten.native_layer_norm.default", f"{block}.ln_1", [x], [unit, 4096], [x], 2e-4)
        q = forward("aten.addmm.default", f"{block}.attn.c_attn", [n], [3 * unit], [n, rstd], 3e-3)[0]
        a = forward("aten._scaled_dot_product_flash_attention.default", f"{block}.attn", [q], [unit], None, 2e-3)[0]
        p = forward("aten.addmm.default", f"{block}.attn.c_proj", [a], [unit], [a, q], 1e-3)[0]
        d, mask = forward("aten.native_dropout.default", f"{block}.attn.drop", [p], [unit, unit // 4], [], 2e-4, 64)
        tape[-1] = (*tape[-1][:2], [mask], tape[-1][3])
        x = forward("aten.add.Tensor", block, [x, d], [unit], [], 2e-4)[0]
        n = forward("aten.native_layer_norm.default", f"{block}.ln_2", [x], [unit], [x], 2e-4)[0]
        h = forward("aten.addmm.default", f"{block}.mlp.0", [n], [4 * unit], [n], 4e-3)[0]
        g = forward("aten.gelu.default", f"{block}.mlp.1", [h], [4 * unit], [h], 4e-4)[0]
        p = forward("aten.addmm.default", f"{block}.mlp.2", [g], [unit], [g], 4e-3)[0]
        x = forward("aten.add.Tensor", block, [x, p], [unit], [], 2e-4)[0]
    n = forward("aten.native_layer_norm.default", "transformer.ln_f", [x], [unit], [x], 2e-4)[0]
    logits = forward("aten.mm.default", "lm_head", [n], [vocabulary * unit], [n], 8e-3)[0]
    loss = b.add("aten.nll_loss_forward.default", [logits], [4], module="", kind="output", retained=True)[0]
    seed = b.add("tangent", [loss], [4], phase=Phase.LOSS, kind="tangent", retained=True, seconds=0.0)[0]

    gradient = b.add("aten.nll_loss_backward.default", [seed, logits], [vocabulary * unit], phase=Phase.BACKWARD)[0]
    for module, target, saved, seconds in reversed(tape):
        weight = "mm" in target or "norm" in target or "embedding" in target
        gradient = b.add(
            target.replace(".default", "_backward.default"), [gradient, *saved], [unit],
            module=module, phase=Phase.BACKWARD, seconds=seconds, workspace=unit // 8 if "attention" in target else 0,
        )[0]  # fmt: skip
        if weight:
            b.add("aten.mm.default", [gradient, *saved[:1]], [unit // 2], module=module, phase=Phase.BACKWARD,
                  kind="gradient", retained=True, seconds=seconds)  # fmt: skip
    static = {"parameters": 8 * unit * layers, "buffers": 4096, "inputs": 65536}
    return b.graph("toy", static), tuple(b.costs)


def random_drops(graph: TrainingGraph, seed: int) -> Schedule:
    """Return a schedule with drops anywhere, nested recomputation included."""
    chance = random.Random(seed)
    dropped: dict[int, list[int]] = {}
    for value in range(len(graph.values)):
        for _ in range(chance.randrange(3)):
            dropped.setdefault(chance.randrange(graph.producer[value], len(graph.operations)), []).append(value)
    return recompute_lazily(graph, dropped)
