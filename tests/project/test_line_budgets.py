"""The project stays small enough to be owned: budgets of lines, and no module or function too large or too small."""

from __future__ import annotations

import ast
from collections import defaultdict

import networkx
import pytest

from tests.project.lines import BUDGETS, ROOT, code_lines, files, rooms
from tests.project.test_architecture import MODULES, imports

RULES = BUDGETS["rules"]

FOUND_BY_FILE = ("commands", "exporters", "runtimes", "solvers")
"""Rooms whose modules are found by their files: the command line and the registries import them by name at run time."""


@pytest.mark.parametrize("tree", BUDGETS["code"])
def test_trees_keep_their_budgets(tree):
    assert sum(len(code_lines(path)) for path in files(tree)) <= BUDGETS["code"][tree]


def test_rooms_keep_their_budgets():
    over = {room: lines for room, lines in rooms().items() if lines > BUDGETS["rooms"].get(room, 0)}
    assert over == {}


@pytest.mark.parametrize("page", BUDGETS["pages"])
def test_pages_keep_their_budgets(page):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= BUDGETS["pages"][page]


def test_there_are_few_modules():
    assert len(files("planner")) <= RULES["planner_modules_at_most"]


def test_no_module_is_too_long():
    lengths = {name: len(code_lines(path)) for name, path in MODULES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > RULES["module_lines_at_most"]} == {}


def test_a_small_module_with_one_importer_is_a_part_of_it():
    importers = defaultdict(set)
    for name in MODULES:
        for imported in imports(name):
            importers[imported].add(name)
    small = {
        name: importers[name]
        for name, path in MODULES.items()
        if len(importers[name]) == 1
        and path.name != "__init__.py"
        and len(code_lines(path)) < RULES["module_with_one_importer_at_least"]
        and not (set(name.split(".")) & set(FOUND_BY_FILE) and not path.name.startswith("_"))
    }
    assert small == {}


def test_no_function_is_too_long():
    def too_long():
        for name, path in MODULES.items():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    lines = code_lines(path) & set(range(node.lineno, (node.end_lineno or 0) + 1))
                    if len(lines) > RULES["function_lines_at_most"]:
                        yield f"{name}.{node.name}: {len(lines)}"

    assert list(too_long()) == []


def test_no_circle_of_modules_inside_a_room():
    graph = networkx.DiGraph()
    for name in MODULES:
        for imported in imports(name, run=True):
            if imported in MODULES and imported.split(".")[:2] == name.split(".")[:2] and imported != name:
                graph.add_edge(name, imported)
    assert [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []
