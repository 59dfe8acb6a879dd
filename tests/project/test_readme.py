"""What the README and the pages of its parts show is what happens: snippets, commands, set-up, report, picture."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import cli
from planner import zoo
from planner.measure import calibration, profiling
from planner.zoo.modules import MiniGPT

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("python.md", "frameworks.md", "training.md", "command-line.md", "budget.md")
"""What the README leaves to pages of its own, in the order in which their snippets are run."""
VERDICT = re.compile(
    r"FITS \S+ of \S+ [KMG]iB · [+-]\d+\.\d% step time( vs eager)?( \(no plan below [^\n]*\))? · [^\n]* recomputed"
)

PRINTED = {
    **dict.fromkeys(("plan", "verify"), VERDICT.pattern + "\n"),
    "models": r"\s[^\n]*\n".join(map(re.escape, zoo.names())) + r"\s[^\n]*\n$",
    "export": r".*def checkpoint_modules\(model",
    "profile": "MEASURED ",
    "explain": r"blocks\.0 keeps ",
    "audit": r"you pay \+[\d.]+%[^\n]*; it (fits|does not fit) 3\.00 GiB",
    "check": r"no problems(, \d+ notes?)? in minigpt\n",
    "what-if": "(KNEE|TRADE-OFF) ",
    "calibrate": "CALIBRATED ",
}
"""How what each command prints begins."""
WRITTEN = ("minigpt.plan", "plan.json", "minigpt.profile", "curve.html", "this-machine.json")


def page(name: str) -> str:
    """Return a page of the documentation."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def fenced(language: str, *texts: str) -> list[str]:
    """Return the code blocks of a language, in their order; by default those of the README."""
    return re.findall(rf"^```{language}\n(.*?)^```$", "\n".join(texts or (README,)), re.M | re.DOTALL)


def commands() -> list[list[str]]:
    """Return the arguments of every ``python cli.py`` command that the page on it shows on its own line."""
    lines = [line for block in fenced("sh", page("command-line.md")) for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("python cli.py ")]


def small(name: str) -> list[str]:
    """Return the options that make a model of the zoo small enough to be planned and run in seconds."""
    if name not in zoo.names():
        return []
    if name == "minigpt":  # the only one that is run
        return ["--layers", "1", "--seq-len", "32", "--batch-size", "2"]
    return ["--layers", "1", "--seq-len", "256"]  # AdamW leaves minimind no smaller budget


def test_two_commands_do_all_the_set_up():
    plan, test = (block.strip() for block in fenced("sh") if "-m venv" in block)
    assert "\n" not in plan + test
    assert plan.endswith(".venv/bin/python cli.py plan gpt2 --budget 60%")
    assert test.split(" && ")[-1].startswith(".venv/bin/python -m pytest")
    for command in (plan, test):
        assert command.startswith("python3.11 -m venv .venv && ")
        assert "-c constraints.txt" in command
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count(test) == 1


def test_every_installed_package_is_pinned():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    declared = re.findall(r"^    ([\w-]+)>=", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.M)
    assert pinned["torch"] == "2.13.0"
    assert {name.lower() for name in declared} <= {name.lower() for name in pinned}


@pytest.mark.usefixtures("hurried")
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    model = MiniGPT(layers=1, width=64, heads=2, hidden=256, vocabulary=128, positions=32)
    inputs, labels = torch.randint(128, (8, 32)), torch.randint(128, (8, 32))
    names: dict[str, Any] = {"model": model, "inputs": inputs, "labels": labels}
    blocks = fenced("python", README, *map(page, PAGES))
    snippets = [block for block in blocks if not block.startswith("# my_model.py")]
    assert len(snippets) == 12
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        for snippet in snippets:
            exec(compile(snippet, snippet.splitlines()[0], "exec"), names)
        names["model"](inputs, labels).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert names["proof"].exact
    assert VERDICT.search(capsys.readouterr().out)


@pytest.mark.usefixtures("hurried")
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "_LEAST_SECONDS", 0.01)
    monkeypatch.setitem(calibration._SIZES, "cpu", 64)
    monkeypatch.setitem(profiling._CACHE_BYTES, "cpu", 1 << 20)  # written before each of a thousand runs
    (own,) = fenced("python", page("command-line.md"))
    Path("my_model.py").write_text(own, encoding="utf-8")
    (report,) = fenced("text", page("report.md"))
    (beginning,) = fenced("text")
    assert report.startswith(beginning) and len(beginning.splitlines()) <= 15 and len(report.splitlines()) <= 40
    assert VERDICT.fullmatch(report.splitlines()[0])
    shown = commands()
    assert {arguments[0] for arguments in shown} == set(PRINTED)
    for arguments in shown:
        code = cli.main([*arguments, *small(arguments[1] if len(arguments) > 1 else "")])
        output = capsys.readouterr()
        assert code == 0, output.err
        assert re.match(PRINTED[arguments[0]], output.out, re.DOTALL)
        assert output.err.startswith("fsdp: ") or arguments[0] != "export"
        if arguments[:2] == ["plan", "minimind-26m"]:
            assert headings(output.out) == headings(report)
    assert all(Path(name).stat().st_size for name in WRITTEN)


def headings(report: str) -> list[str]:
    """Return what stays the same from one report to the next: the first words of its parts."""
    return re.findall(r"^(Peak memory|Beside other ways|Layers|Memory over the step|What to do next)", report, re.M)


def test_every_zoo_model_and_exit_code_is_listed():
    for name in zoo.names():
        assert f"`{name}`" in page("zoo.md")
    assert re.findall(r"^\| (\d) \|", page("command-line.md"), re.M) == ["0", "1", "2", "3", "4"]


def test_the_readme_is_short_and_its_figures_of_a_gpu_are_those_measured():
    assert len(README.splitlines()) <= 90
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_peers.json").read_text(encoding="utf-8"))["rows"]
    measured = {f"{100 * row['over']:+.1f}%" for row in rows if "over" in row}
    shown = re.findall(r"[+-][\d.]+%", "".join(re.findall(r"^\| (?:ResNet|ViT|Llama).*$", README, re.M)))
    assert len(shown) == 13 and measured.issuperset(shown)


def test_the_picture_is_what_was_measured():
    drawn = runpy.run_path(str(ROOT / "docs" / "picture.py"))["picture"]()
    assert drawn == (ROOT / "docs" / "overhead.svg").read_text(encoding="utf-8")
