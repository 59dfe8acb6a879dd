"""Build the site from the pages as they are read on GitHub: ``python docs/build_site.py build/docs``.

``docs/README.md`` is the navigation: a heading is a section, and what it links to are its pages.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

SHOWN = ("*.md", "LICENSE", "docs/**/*.md", "docs/**/*.svg", "docs/**/*.png", "benchmarks/**/*.md",
         "benchmarks/**/*.svg", "notebooks/*.ipynb", "tests/cuda/fakecuda/README.md")  # fmt: skip
"""What pages are, and what they link to or show."""

REFERENCE = "reference/planner.html"
"""First page of the API reference."""

Navigation = list[dict[str, "str | Navigation"]]


def shown() -> list[Path]:
    """Return every file of the site, relative to the root of the repository."""
    return sorted({path.relative_to(ROOT) for pattern in SHOWN for path in ROOT.glob(pattern)})


def navigation() -> Navigation:
    """Return sections of pages, as ``docs/README.md`` has them."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    sections: Navigation = [{"Home": "README.md"}]
    listed = {"README.md"}
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        pages: Navigation = []
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", part):
            path = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
            if path not in listed:
                listed.add(path)
                pages.append({title_of(path): path})
        sections.append({part.splitlines()[0]: pages})
    rest = [path.as_posix() for path in shown() if path.suffix == ".md" and path.as_posix() not in listed]
    return [*sections, {"More": [{title_of(path): path} for path in rest]}, {"API": REFERENCE}]


def title_of(path: str) -> str:
    """Return the first heading of a page, without marks; of a notebook its name."""
    if not path.endswith(".md"):
        return Path(path).stem
    heading = re.search(r"^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1].replace("`", "") if heading else Path(path).stem


def figures() -> str:
    """Return the table of lines of code, counted now."""
    sys.path.insert(0, str(ROOT))
    from tests.project.lines import BUDGETS, code_lines, files, rooms

    trees = {tree: sum(len(code_lines(path)) for path in files(tree)) for tree in BUDGETS["code"]}
    rows = [(f"`{tree}/`", lines, BUDGETS["code"][tree]) for tree, lines in trees.items()]
    rows += [(room, lines, BUDGETS["rooms"][room]) for room, lines in rooms().items()]
    lines = [f"| {name} | {count:,} | {most:,} |" for name, count, most in rows]
    modules = f"`planner/` has {len(files('planner'))} modules."
    return "\n".join(["| | Lines of code | Budget |", "| --- | --- | --- |", *lines, "", modules])


def main(folder: str) -> None:
    """Write the site; a dead link is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as pages:
        for path in shown():
            copy = Path(pages, path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
        architecture = Path(pages, "docs", "architecture.md")
        text = architecture.read_text(encoding="utf-8")
        architecture.write_text(text.replace("<!-- figures -->", figures()), encoding="utf-8")
        runpy.run_path(str(ROOT / "docs" / "reference.py"))["main"](str(Path(pages, REFERENCE).parent))
        build(
            load_config(
                str(ROOT / "docs" / "mkdocs.yml"),
                nav=navigation(),
                docs_dir=pages,
                site_dir=str(Path(folder).resolve()),
                strict=True,
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
