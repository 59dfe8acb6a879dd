"""The rules that keep the one way through the code, read off the source: who may import what."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

PRIVATE_TORCH = {
    "planner.capture.capture_speedups",
    "planner.capture.planned_graph_internals",
    "planner.capture.fake_internals",
    "planner.capture.fsdp_internals",
    "planner.capture.inductor_internals",
    "planner.capture.inductor_order_internals",
    "planner.capture.module_internals",
    "planner.integrations.partitioner_internals",
    "planner.capture.torch_internals",
    "planner.capture.tracing_internals",
}
"""All that may touch what torch keeps to itself."""

CORE_ROOMS = (
    "planner.common",
    "planner.ir",
    "planner.findings",
    "planner.solving",
    "planner.solvers",
    "planner.plans",
    "planner.strategies",
    "planner.analysis",
    "planner.exporters",
    "planner.report",
)
"""They run without torch."""

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")

ONLY_IN = {
    "pulp": ("planner.solving.milp",),
    "highspy": ("planner.solving.milp",),
    "networkx": ("planner.transforms.chunk_region", "planner.capture.planned_graph_internals"),
    "rich": ("planner.report", "planner.commands._terminal"),
    "jinja2": ("planner.report",),
    "plotext": ("planner.report.what_if",),
    "transformers": ("planner.zoo.transformers",),
}

DOCUMENTED_ATTRIBUTE = "os._exit"
DOCUMENTED_DESPITE_THE_UNDERSCORE = ("torch.utils._pytree", "torch.utils._python_dispatch")
"""Torch's own guides to custom dispatch and nested containers tell their readers to import these."""


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    _module_name(path): path
    for path in [ROOT / "cli.py", *(ROOT / "planner").rglob("*.py"), *(ROOT / "cost_models").rglob("*.py")]
}
CORE = sorted(
    name
    for name in MODULES
    if name == "planner" or _within(name, "cli", "planner.errors", "planner.commands", *CORE_ROOMS)
)
"""What is imported without torch: the command line imports the rest once it knows that it is needed."""


def test_the_modules_are_found():
    assert {"cli", "planner", "planner.solvers.ilp", "planner.commands.plan"} <= set(CORE)


def test_a_room_imports_only_from_rooms_below_it():
    done = subprocess.run([LINT_IMPORTS, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_its_place():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = set(re.split(r"[\s:]+", config["importlinter:contract:rooms"]["layers"].strip()))
    rooms = {name for name in MODULES if name.count(".") == 1 and name.startswith("planner.")}
    assert named == rooms | {"cost_models"}


def test_torch_free_rooms_are_under_the_contract():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(config["importlinter:contract:torch"]["source_modules"].split()) == {"planner.errors", *CORE_ROOMS}


def test_nothing_imports_the_command_line():
    assert _violations(lambda name: {i for i in imports(name) if _package(i) in ("cli", "tests")}) == {}


def test_importing_the_core_imports_no_torch():
    lines = [f"import {name}" for name in CORE] + ["import sys", "assert 'torch' not in sys.modules"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_draws_nothing_from_the_random_state():
    lines = ["import planner, random", "old = random.getstate()", "planner.report", "assert random.getstate() == old"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_libraries_stay_where_they_belong():
    def wrong(name: str) -> set[str]:
        elsewhere = {library for library, homes in ONLY_IN.items() if not _within(name, *homes)}
        return {i for i in imports(name) if _package(i) in elsewhere}

    assert _violations(wrong) == {}


def test_private_modules_of_torch_are_imported_in_one_place_only():
    def wrong(name: str) -> set[str]:
        torch = {i for i in imports(name) if _package(i) == "torch" and "._" in i}
        return {i for i in torch if not _within(i, *DOCUMENTED_DESPITE_THE_UNDERSCORE)}

    assert _violations(wrong, set(MODULES) - PRIVATE_TORCH) == {}


def test_private_attributes_of_other_objects_are_touched_in_one_place_only():
    assert _violations(_foreign_private_attributes, set(MODULES) - PRIVATE_TORCH) == {}


def test_what_is_public_says_what_it_does():
    def wrong(name: str) -> list[str]:
        tree = _tree(name)
        public = [
            node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        ]
        return [getattr(node, "name", "the module") for node in (tree, *public) if not ast.get_docstring(node)]

    assert _violations(wrong) == {}


def test_what_is_installed_is_what_is_imported():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = {line.split(">=")[0] for line in config["options"]["install_requires"].split()}
    imported = {package for name in MODULES for package in map(_package, imports(name))}
    imported -= {"planner", "cost_models", "cli", *sys.stdlib_module_names}
    assert declared == imported | {"highspy", "numpy", "pulp"}  # imported by name
    assert config["options.extras_require"]["zoo"].split(">=")[0].strip() == "transformers"


def _violations(wrong, names: Iterable[str] = MODULES) -> dict[str, list[str]]:
    """Return what a rule finds wrong in each module that breaks it."""
    return {name: found for name in sorted(names) if (found := sorted(wrong(name)))}


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str, *, run: bool = False) -> frozenset[str]:
    """Return the dotted names that a module imports anywhere in its code; with ``run`` only those that are run."""
    tree = _tree(name)
    skipped = set(_only_for_types(tree)) if run else set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import in line {node.lineno}"
            found.update(_imported_from(node.module or "", [alias.name for alias in node.names]))
    return frozenset(found)


def _imported_from(module: str, names: list[str]) -> Iterator[str]:
    # "from planner import loss" imports a module, "from planner.ir.graph import Value" something in one.
    submodules = [f"{module}.{name}" for name in names if f"{module}.{name}" in MODULES]
    yield from submodules
    if len(submodules) < len(names):
        yield module


def _only_for_types(tree: ast.Module) -> Iterator[ast.AST]:
    """Return what stands under ``if TYPE_CHECKING``: it is never run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from ast.walk(node)


def _foreign_private_attributes(name: str) -> Iterator[str]:
    for node in ast.walk(_tree(name)):
        if (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and not (_is_own(node) or ast.unparse(node) == DOCUMENTED_ATTRIBUTE)
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and _is_private(str(attribute.value)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _is_private(attribute: str) -> bool:
    return attribute.startswith("_") and not attribute.startswith("__")


def _is_own(node: ast.Attribute) -> bool:
    """Whether a private attribute is the object's own, the name of an operator, or a type of the standard library."""
    base = ast.unparse(node.value)
    return base in ("self", "super()", "cls", "aten", "argparse") or base.startswith(("aten.", "torch.ops."))


def _package(dotted: str) -> str:
    return dotted.split(".", 1)[0]
