"""Lines of code of a tree: ``python -m tests.project.lines`` prints each room beside its budget."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BUDGETS = tomllib.loads(Path(__file__).with_name("line_budgets.toml").read_text(encoding="utf-8"))

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the numbers of the lines that hold code: no blank lines, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    written = enumerate(map(str.strip, source.split("\n")), 1)
    lines, docstrings = {number for number, line in written if line and line[0] != "#"}, set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):  # texts may have empty lines
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return frozenset(lines - docstrings)


def files(tree: str) -> list[Path]:
    """Return the modules of a folder, however deep."""
    return sorted((ROOT / tree).rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the row of the table that a module of ``planner/`` counts in."""
    parts = path.relative_to(ROOT / "planner").parts
    room = parts[0] if len(parts) > 1 else "top"
    return "solvers" if room == "solving" else room


def rooms() -> dict[str, int]:
    """Return the lines of code of each room."""
    found = dict.fromkeys(BUDGETS["rooms"], 0)
    for path in files("planner"):
        found[room_of(path)] = found.get(room_of(path), 0) + len(code_lines(path))
    return found


if __name__ == "__main__":
    for tree, most in BUDGETS["code"].items():
        count = sum(len(code_lines(path)) for path in files(tree))
        print(f"{tree:14} {count:6,} of {most:6,} lines in {len(files(tree))} modules")
    for room, count in rooms().items():
        print(f"  {room:12} {count:6,} of {BUDGETS['rooms'].get(room, 0):6,} lines")
