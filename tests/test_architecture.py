"""The rules that keep the one way through the code, read off the source: who may import what."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES_AT_MOST = 450

TOUCHES_TORCH = {
    "cost_models.flops",
    "planner.agreement",
    "planner.api",
    "planner.auditing",
    "planner.asking",
    "planner.calibration",
    "planner.capture",
    "planner.chunk_region",
    "planner.chunk_rewrite",
    "planner.chunk_rules",
    "planner.costing",
    "planner.cuda_attention",
    "planner.cuda_workspace",
    "planner.devices",
    "planner.drafts",
    "planner.diagnose.check",
    "planner.diagnose.facts",
    "planner.diagnose.observe",
    "planner.eager_graph",
    "planner.eager_record",
    "planner.eager_sends",
    "planner.eager_session",
    "planner.eager_trace",
    "planner.engine_internals",
    "planner.engine_sums",
    "planner.failures",
    "planner.gradient_sums",
    "planner.host_copies",
    "planner.hugging_face",
    "planner.inductor_internals",
    "planner.inputs",
    "planner.joint",
    "planner.layouts",
    "planner.local_graph",
    "planner.loss",
    "planner.lowering",
    "planner.masks",
    "planner.memory",
    "planner.min_cut",
    "planner.needless_reruns",
    "planner.operands",
    "planner.optimizers",
    "planner.pipelining",
    "planner.parallel",
    "planner.profiling",
    "planner.provenance",
    "planner.region_trace",
    "planner.regions",
    "planner.resident",
    "planner.recurrent",
    "planner.rewrite",
    "planner.rounding",
    "planner.session",
    "planner.shard_rules",
    "planner.shard_views",
    "planner.shards",
    "planner.step_planning",
    "planner.studying",
    "planner.tensor_parallel",
    "planner.torch_internals",
    "planner.verification",
    "planner.whole_step",
    "planner.workspace",
    "planner.wrapped",
    "planner.zoo",
    "planner.zoo_catalogue",
    "planner.zoo_inputs",
    "planner.zoo_modules",
    "planner.zoo_transformers",
    "planner.zoo_unets",
}
"""With the runtimes, all that may import torch. Every other module, a new one too, is of the core that runs without."""

PRIVATE_TORCH = {"planner.engine_internals", "planner.inductor_internals", "planner.torch_internals"}
"""All that may touch what torch keeps to itself."""

ONLY_IN = {
    "pulp": ("planner.solvers._pulp",),
    "highspy": ("planner.solvers._pulp",),
    "networkx": ("planner.chunk_region",),
    "rich": ("planner.report", "planner.terminal"),
    "jinja2": ("planner.report",),
    "matplotlib": ("planner.report.curve_picture",),
    "plotext": ("planner.report.terminal_plot",),
    "transformers": ("planner.zoo_transformers",),
}

RUN_LATE = {
    "planner.api",
    "planner.auditing",
    "planner.calibration",
    "planner.capture",
    "planner.devices",
    "planner.diagnose.check",
    "planner.inputs",
    "planner.memory",
    "planner.min_cut",
    "planner.zoo",
}
"""What the torch-free commands import once they know that torch is needed."""

DOCUMENTED_DESPITE_THE_UNDERSCORE = ("torch.utils._pytree", "torch.utils._python_dispatch")
"""Torch's own guides to custom dispatch and nested containers tell their readers to import these."""


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    _module_name(path): path
    for path in [ROOT / "cli.py", *(ROOT / "planner").rglob("*.py"), *(ROOT / "cost_models").rglob("*.py")]
}
CORE = sorted(name for name in MODULES if name not in TOUCHES_TORCH and not name.startswith("planner.runtimes."))


def test_the_modules_are_found():
    assert {"cli", "planner", "planner.commands.plan", "planner.solvers.ilp", "cost_models.roofline"} <= set(CORE)
    assert set(MODULES) >= TOUCHES_TORCH, "a module that this test names is gone"


def test_nothing_imports_what_stands_above_it():
    above = {"cost_models": {"planner", "cli", "tests"}, "planner": {"cli", "tests"}, "cli": {"tests"}}
    assert _violations(lambda name: {i for i in _imports(name) if _package(i) in above[_package(name)]}) == {}


def test_the_core_imports_no_torch_and_nothing_that_does():
    def wrong(name: str) -> set[str]:
        imported = _imports(name, run=True)
        torch = {i for i in imported if _package(i) in ("torch", "transformers")}
        reached = {i for i in imported if i in MODULES and i not in CORE}
        return torch | (reached - (RUN_LATE if _within(name, "planner.commands") else set()))

    assert _violations(wrong, CORE) == {}


def test_importing_the_core_imports_no_torch():
    lines = [f"import {name}" for name in CORE] + ["import sys", "assert 'torch' not in sys.modules"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_solvers_know_neither_each_other_nor_torch():
    def wrong(name: str) -> set[str]:
        # Files that begin with an underscore are no solvers but what several of them use.
        solvers = {i for i in _imports(name) if _within(i, "planner.solvers") and i != "planner.solvers"}
        return {i for i in solvers if not i.split(".")[2].startswith("_")} | {
            i for i in _imports(name) if _package(i) == "torch"
        }

    assert _violations(wrong, (name for name in MODULES if name.startswith("planner.solvers."))) == {}


def test_libraries_stay_where_they_belong():
    def wrong(name: str) -> set[str]:
        elsewhere = {library for library, homes in ONLY_IN.items() if not _within(name, *homes)}
        return {i for i in _imports(name) if _package(i) in elsewhere}

    assert _violations(wrong) == {}


def test_private_modules_of_torch_are_imported_in_one_place_only():
    def wrong(name: str) -> set[str]:
        torch = {i for i in _imports(name) if _package(i) == "torch" and "._" in i}
        return {i for i in torch if not _within(i, *DOCUMENTED_DESPITE_THE_UNDERSCORE)}

    assert _violations(wrong, set(MODULES) - PRIVATE_TORCH) == {}


def test_private_attributes_of_other_objects_are_touched_in_one_place_only():
    assert _violations(_foreign_private_attributes, set(MODULES) - PRIVATE_TORCH) == {}


def test_modules_stay_short():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length >= LINES_AT_MOST} == {}


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
    imported = {package for name in MODULES for package in map(_package, _imports(name))}
    imported -= {"planner", "cost_models", "cli", *sys.stdlib_module_names}
    assert {"matplotlib", "plotext"} == {
        line.split(">=")[0] for line in config["options.extras_require"]["plot"].split()
    }
    imported -= {"matplotlib", "plotext"}
    assert declared == imported | {"highspy"}  # which PuLP loads by itself
    assert config["options.extras_require"]["zoo"].split(">=")[0].strip() == "transformers"


def _violations(wrong, names: Iterable[str] = MODULES) -> dict[str, list[str]]:
    """Give what a rule finds wrong in each module that breaks it."""
    return {name: found for name in sorted(names) if (found := sorted(wrong(name)))}


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def _imports(name: str, *, run: bool = False) -> frozenset[str]:
    """Give the dotted names that a module imports anywhere in its code; with ``run`` only those that are run."""
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
    # "from planner import loss" imports a module, "from planner.graph import Value" something in one.
    submodules = [f"{module}.{name}" for name in names if f"{module}.{name}" in MODULES]
    yield from submodules
    if len(submodules) < len(names):
        yield module


def _only_for_types(tree: ast.Module) -> Iterator[ast.AST]:
    """Give what stands under ``if TYPE_CHECKING``: it is never run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from ast.walk(node)


def _foreign_private_attributes(name: str) -> Iterator[str]:
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node):
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
    return base in ("self", "cls", "aten", "argparse") or base.startswith(("aten.", "torch.ops."))


def _package(dotted: str) -> str:
    return dotted.split(".", 1)[0]


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
