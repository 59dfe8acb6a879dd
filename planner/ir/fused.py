"""Operations of which a compiler makes one kernel, each one operation with what alone reads it.

What is made inside a kernel, and read only there, is never in memory. So plans see the kernel as one operation, and
neither offer to keep what is inside it nor count it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from planner.ir.graph import TrainingGraph
from planner.ir.in_place import InPlace, written_anew


def stretches(graph: TrainingGraph, written: Collection[int]) -> list[int]:
    """Return for each operation the stretch of the base order that it is in: others than those written end one."""
    return list(accumulate(index not in written for index in range(len(graph.operations))))


def fused(graph: TrainingGraph, written: Collection[int]) -> InPlace:
    """Join the operations that a compiler writes itself, in O(operations + reads).

    Of those that are ``written``, one whose readers are all one kernel's joins it if it is of the same phase, and
    nothing that is not written runs in between.
    """
    operations, stretch = graph.operations, stretches(graph, written)
    kernel = list(range(len(operations)))
    for index in sorted(written, reverse=True):
        operation = operations[index]
        readers = {kernel[reader] for value in operation.outputs for reader in graph.readers[value]}
        if len(readers) != 1 or any(graph.values[value].retained for value in operation.outputs):
            continue
        (last,) = readers
        if last in written and operations[last].phase is operation.phase and stretch[last] == stretch[index]:
            kernel[index] = last
    parts: list[list[int]] = [[] for _ in operations]
    for index, last in enumerate(kernel):
        parts[last].append(index)
    inside = {
        value: operations[last].outputs[0]
        for index, last in enumerate(kernel)
        if index != last
        for value in operations[index].outputs
    }
    return written_anew(graph, parts, inside)
