"""Every notebook runs from top to bottom, and its stored outputs are of a run like it."""

from __future__ import annotations

import re
from copy import deepcopy
from itertools import islice
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BEFORE = """
import dataclasses
import gc
import torch._dynamo
from planner.common.limits import SolveLimits

def hurried(limits, clock=SolveLimits.clock, replace=dataclasses.replace):
    return clock(replace(limits, time_limit_seconds=limits.time_limit_seconds / 5))

SolveLimits.clock = hurried
torch._dynamo.config.run_gc_after_compile = False
gc.freeze()
"""
"""Solvers get a fifth of their time: of what they find, nothing is compared that this changes. And what is imported
is not walked by each of the many collections of garbage to come."""


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["own_solver", "quick_start", "read_a_report", "what_if"]


def test_they_run():
    """In one kernel, so that torch is imported once; each begins without the names of those before it."""
    stored = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    forget = nbformat.v4.new_code_cell("%reset -f")
    cells = [cell for book in deepcopy(stored) for cell in (*book.cells, forget)]
    run = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BEFORE), *cells])
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    ran = iter(run.cells[1:])
    for path, book in zip(NOTEBOOKS, stored, strict=True):
        assert [shape(cell) for cell in islice(ran, len(book.cells))] == [shape(cell) for cell in book.cells], path.name
        next(ran)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_stored_is_a_whole_run_of_no_machine_in_particular(path: Path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = "\n".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert text.strip() and "Traceback" not in text
    assert str(ROOT) not in text
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|opt)/", text)


def shape(cell: nbformat.NotebookNode) -> str:
    """Return how many pictures a cell drew and the first word that it printed: the rest depends on the machine."""
    outputs = cell.get("outputs", [])
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return f"{pictures} {printed.split(maxsplit=1)[0] if printed.strip() else ''}"
