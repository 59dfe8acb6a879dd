"""The site holds every page, no link of it is dead, and the page of errors has the messages that the code has."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import planner.errors
from planner.errors import PlannerError

ROOT = Path(__file__).parent.parent.parent
SITE = runpy.run_path(str(ROOT / "docs" / "build_site.py"))
EXPLAINED = ("CaptureError", "ForwardError", "UnsupportedModelError", "RuntimeUnsupportedError", "PlanMismatchError",
             "ProfileMismatchError", "InfeasibleBudgetError", "HostBudgetError", "NoPlanFitsError",
             "CannotExpressError", "SolverUnavailableError", "ClaimMismatchError",
             "PlannerError")  # fmt: skip
"""Errors of which each message is on the page; a UsageError says itself what to change."""


def pages_of(entries: list[dict[str, object]]) -> Iterator[str]:
    """Yield the files of a navigation."""
    for entry in entries:
        for page in entry.values():
            yield from pages_of(page) if isinstance(page, list) else [page]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for page in pages_of(SITE["navigation"]()) if page != SITE["REFERENCE"]]
    pages = [path.as_posix() for path in SITE["shown"]() if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(pages)
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(pages)


def test_no_link_leads_out_of_the_site() -> None:
    shown = {(ROOT / path).resolve() for path in SITE["shown"]()}
    dead = [
        (page.as_posix(), target)
        for page in SITE["shown"]()
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
        if not target.startswith("https://") and (ROOT / page.parent / target).resolve() not in shown
    ]
    assert dead == []


# The page of errors.


def text_of(node: ast.expr) -> str:
    """Return what an expression writes, with ``…`` for what it fills in; of two texts the first."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("{}", "…")
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value)
    if isinstance(node, ast.IfExp):
        return text_of(node.body)
    return "…"


@functools.cache
def code() -> tuple[ast.AST, ...]:
    """Return every file of the planner, parsed."""
    files = sorted((ROOT / "planner").rglob("*.py"))
    return tuple(node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def messages() -> Iterator[str]:
    """Yield what errors say that must be on the page; those that only hand on what another said are left out."""
    calls = (node for node in code() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    texts = (text_of(node.args[0]) for node in calls if node.func.id in EXPLAINED and node.args)
    return (text for text in texts if re.search(r"\w{3}", text))


@functools.cache
def stands_for(row: str) -> Callable[[str], object]:
    """Return what finds the words of a row in a text, in this order, if it stands for that."""
    return re.compile(".*".join(re.escape(part.strip()) for part in row.split("…")), re.DOTALL).search


def rows() -> list[str]:
    """Return the messages that the page explains."""
    return re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_message_on_the_page_of_errors_is_one_of_the_code() -> None:
    texts = {text_of(node) for node in code() if isinstance(node, (ast.Constant, ast.JoinedStr))}
    assert [row for row in rows() if not any(map(stands_for(row), texts))] == []


def test_every_error_that_does_not_explain_itself_is_on_the_page() -> None:
    named = [kind for kind in EXPLAINED if hasattr(planner.errors, kind)]
    assert all(issubclass(getattr(planner.errors, kind), PlannerError) for kind in named)
    # A row of nothing but dots, or one word, would explain everything.
    assert min(len(row.replace("…", "").strip()) for row in rows()) >= 2
    explained = [row for row in rows() if len(row.replace("…", "").strip()) > 12]
    assert [text for text in messages() if not any(stands_for(row)(text) for row in explained)] == []
