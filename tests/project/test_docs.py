"""The pages under docs/ lead somewhere, their pictures are of today, and what people call is described in full."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers

import planner
from planner import solvers

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FRONT = ("README", "CONTRIBUTING", "CHANGELOG")
PUBLIC = {name: getattr(planner, name) for name in planner.__all__}


def parameters_of(docstring: str) -> list[str]:
    """Return the names that the section ``Parameters`` describes."""
    _, _, section = docstring.partition("\nParameters\n----------\n")
    names = []
    for line in section.split("\n\n")[0].splitlines():
        if not line.startswith(" "):
            names += [name.strip().lstrip("*") for name in line.split(":")[0].split(",")]
    return names


def fields_of(kind: type) -> list[str]:
    """Return the fields of a dataclass that are described beside them, by a text each or one for a few in a row."""
    described, waiting = [], []
    for node in ast.parse(inspect.getsource(kind)).body[0].body[1:]:
        if isinstance(node, ast.AnnAssign):
            waiting.append(node.target.id)
        elif isinstance(node, ast.Expr):
            described += waiting
            waiting = []
    return described


def headings_of(page: Path) -> set[str]:
    """Return the names by which links find the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def is_error(public: object) -> bool:
    """Whether something is an error: these are described on a page of their own, see ``test_site.py``."""
    return inspect.isclass(public) and issubclass(public, planner.PlannerError)


@pytest.mark.parametrize("public", [p for p in PUBLIC.values() if callable(p) and not is_error(p)])
def test_what_people_call_is_described_in_full(public):
    described = parameters_of(inspect.getdoc(public) or "")
    if dataclasses.is_dataclass(public):
        described += fields_of(public)
    assert sorted(described) == sorted(inspect.signature(public).parameters)
    if not inspect.isclass(public):
        returns = inspect.signature(public).return_annotation not in (None, "None")
        assert ("\nReturns\n-------\n" in (inspect.getdoc(public) or "")) == returns


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / f"{name}.md" for name in FRONT)], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    text = page.read_text(encoding="utf-8")
    for target, heading in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
        if heading and not target.startswith("https://"):
            assert heading in headings_of(page.parent / target if target else page), f"{target}#{heading}"


def test_every_block_of_python_is_run_by_some_test():
    """A page that shows Python for the first time needs a test that runs it, and a place in this list."""
    shown = {page.name for page in PAGES if "```python" in page.read_text(encoding="utf-8")}
    by_parts = {name for name in shown if name.startswith("add-a")}  # test_add_a_part.py
    by_readme = {"budget.md", "command-line.md", "frameworks.md", "python.md", "training.md"}  # test_readme.py
    assert shown == by_parts | by_readme | {"quick-start.md"}


@pytest.mark.usefixtures("hurried")
def test_the_quick_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for snippet in snippets:
        if "Trainer" not in snippet:
            exec(compile(snippet, "quick-start.md", "exec"), names)
    assert "bytes would do; it is tight at" in capsys.readouterr().out
    assert Path("model.plan").stat().st_size


@pytest.mark.usefixtures("hurried")
def test_the_quick_start_of_the_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(from transformers.*?)^```$", text, re.MULTILINE | re.DOTALL)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    row = torch.arange(32)
    names = {
        "planner": planner,
        "model": transformers.GPT2LMHeadModel(config),
        "dataset": [{"input_ids": row, "labels": row}] * 4,
    }
    exec(compile(snippet, "quick-start.md", "exec"), names)
    assert planner.plan_of(names["model"]).recomputations  # type: ignore[arg-type]


def test_every_solver_is_described():
    text = (ROOT / "docs" / "solvers.md").read_text(encoding="utf-8")
    assert [name for name in solvers.names() if f"## `{name}`" not in text] == []


def test_every_page_can_be_found():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in PAGES if f"({p.name})" not in index and f"(docs/{p.name})" not in front] == []


def test_pictures_are_what_the_simulator_says_today():
    drawn = runpy.run_path(str(ROOT / "docs" / "how_it_works.py"))["pictures"]()
    assert drawn == {name: (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") for name in drawn}
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} == set(drawn)
