"""The command line: exit codes, one-line errors, what goes to which stream."""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cli
import planner
from cost_models.measured import Profile
from planner.api import auto_wrap as wrap
from planner.commands import _asked
from planner.commands._main import make_parser
from planner.common.options import Budget
from planner.errors import CaptureError
from planner.plans import planning
from planner.plans.plan import Plan, Verification
from planner.session.step import Options
from tests.example_graphs import transformer

ROOT = Path(__file__).parent.parent.parent
GRAPH, COSTS = transformer(4)
VERDICT = re.compile(r"FITS .* of .* · [+-][\d.]+% step time .* recomputed")


class Outcome:
    """What a command gave: exit code and both streams."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def assert_error(self, code: int, *words: str) -> None:
        """Check for one line on standard error, and no traceback."""
        assert self.code == code, self.err
        assert re.fullmatch(r"error: [^\n]+\n", self.err), self.err
        for word in words:
            assert word in self.err


class FakeApi(types.ModuleType):
    """``planner.api`` with a toy graph in place of a captured model."""

    def __init__(self) -> None:
        super().__init__("planner.api")
        self.fails: BaseException | None = None
        self.asked: dict[str, Any] = {}
        self.measured = Verification(
            peak_bytes=1, baseline_peak_bytes=2, overhead=0.1, loss_equal=True, gradients_bitwise_equal=True,
            buffers_equal=True,
        )  # fmt: skip

    def plan(self, model: object, example_inputs: object, **options: Any) -> Plan:
        self.asked = options
        if self.fails:
            raise self.fails
        options["search"].tell("capturing [bold]")
        budget = options["budget"] if options["budget"].is_given else Budget("65%")
        return planning.make_plan(planning.make_problem(GRAPH, COSTS, budget), options["search"])

    def verify(self, model: object, example_inputs: object, plan: Plan, **options: Any) -> Verification:
        return self.measured


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "planner.api", fake)
    monkeypatch.setattr(planner, "api", fake, raising=False)

    def load(args: argparse.Namespace, *, real: bool) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name=args.name, model=None, example_args=(torch.zeros(1),), example_kwargs={}, loss_fn=None
        )

    monkeypatch.setattr(_asked, "load", load)
    return fake


@pytest.fixture
def run(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> Any:
    def run_command(*arguments: str) -> Outcome:
        code = cli.main(arguments)
        streams = capsys.readouterr()
        return Outcome(code, streams.out, streams.err)

    return run_command


PLAN = ("plan", "minigpt", "--solver", "sqrt")


def test_a_plan_that_fits(run: Any, api: FakeApi) -> None:
    found = run(*PLAN, "--budget", "65%", "--time-limit", "7", "--optimizer", "adam", "--device", "a100-80")
    assert found.code == 0 and found.err == ""
    assert VERDICT.fullmatch(found.out.splitlines()[0])
    assert "\x1b" not in found.out
    search, training, target = (api.asked[group] for group in ("search", "training", "target"))
    assert (search.time_limit_seconds, training.optimizer, target.device) == (7.0, "adam", "a100-80")


def test_json_of_an_activation_budget_stands_alone_on_standard_output(run: Any) -> None:
    report = json.loads(run(*PLAN, "--activation-budget", "60%", "--json", "-").out)
    assert report["schema"] == 1 and report["status"] in ("optimal", "feasible")
    assert report["budget_bytes"] == report["activation_budget_bytes"] + sum(report["static_bytes"].values())


def test_files(run: Any, tmp_path: Path) -> None:
    report, plan = tmp_path / "report.json", tmp_path / "plan.json"
    found = run(*PLAN, "--budget", "65%", "--json", str(report), "--save", str(plan))
    assert found.code == 0 and VERDICT.match(found.out)
    assert json.loads(report.read_text())["predicted"]["peak_bytes"] == Plan.load(plan).peak_bytes
    Plan.load(plan).schedule_for(GRAPH)


def test_a_second_search_is_left_out_unless_asked_for(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path))
    again = "(from the cache)"
    assert again not in run(*PLAN, "--budget", "65%", "--full").out.replace("\n", " ")
    assert again in run(*PLAN, "--budget", "65%", "--full").out.replace("\n", " ")
    assert again not in run(*PLAN, "--budget", "65%", "--full", "--no-cache").out.replace("\n", " ")


GIVEN = (
    "--budget 65%",
    "--budget 700MiB --optimizer adamw --master-weights --accumulate --outputs held --reserve 1MiB",
    "--budget 65% --data-parallel fsdp2 --ranks 4 --device a100-80 --cost-model roofline --solver ilp --seed 3",
    "--activation-budget 70% --optimizer sgd --runtime graph --chunk auto --time-limit 2.5 --deterministic",
    "--budget 95% --offload --host-budget 64GiB --device h100 --batch-size 3 --dtype bf16",
    "--budget 95% --offload --chunk 4 --profile {}/a.profile --layers 1",
    "--budget 65% --no-offload",
    "--budget 65% --host-budget 1GiB --link 64GB/s",
    "--strategy every-2 --runtime modules",
)


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_printed_can_be_copied(
    run: Any, api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    """The call takes what the plan was given, and the command for other budgets is about the same step."""
    loaded = _asked.load(argparse.Namespace(name="minigpt"), real=True)
    loaded.loss_fn = loss_fn = torch.sum if "--chunk" in given else None
    monkeypatch.setattr(_asked, "load", lambda args, *, real: loaded)
    profile = Profile(model="x", device="cpu", torch="2", date="2026-01-01", inputs=(), measurements={})
    planner.save_profile(profile, tmp_path / "a.profile")
    typed = ["plan", "minigpt", *given.format(tmp_path).split()]
    found = run(*typed, "--html", str(tmp_path / "page.html"))
    code = re.search(r"use it +(planner.*?\))\n  \w", found.out, re.DOTALL)
    assert code is not None, found.err
    page = html.unescape((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert re.sub(r"\s+", " ", code[1]) in re.sub(r"\s+", " ", page)
    arrived: dict[str, Any] = {}
    monkeypatch.setattr(planner, "auto_wrap", lambda model, **options: arrived.update(options), raising=False)
    eval(code[1], {"planner": planner, "model": loaded.model, "loss_fn": loss_fn})
    assert arrived.get("loss_fn") is loss_fn is api.asked["loss_fn"]
    no_search = dataclasses.replace(api.asked["search"], progress=None)
    asked = Options.of(api.asked | {"search": no_search, "name": ""})
    assert Options.of({"offload": "auto", "runtime": "auto", **arrived}) == asked
    model = torch.nn.Linear(2, 2)
    if "--data-parallel" not in given:  # which is for a model that is sharded by then
        assert wrap(model, **arrived) is model

    (curve,) = re.findall(r"whole curve +\S+ (.*)", found.out)
    first, then = (vars(make_parser().parse_args(words)) for words in (typed, shlex.split(curve)))
    shared = first.keys() & then.keys() - {"run", "runtime", "time_limit_seconds", "html"}
    assert {name: first[name] for name in shared} == {name: then[name] for name in shared}


def test_no_plan_fits(run: Any, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    found = run(
        *PLAN, "--budget", "35MiB", "--time-limit", "0.5", "--save", str(saved), "--json", str(tmp_path / "report.json")
    )
    found.assert_error(3, "the smallest budget known to be feasible is", "bound by aten.")
    assert found.out.startswith("DOES NOT FIT 35.0 MiB · smallest budget known to fit ")
    assert not saved.exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == "infeasible"

    smallest = str(report["minimum_feasible_peak_bytes"])
    # By the best solver: sqrt may not reach it.
    assert run("plan", "minigpt", "--budget", smallest, "--time-limit", "0.5").code == 0
    assert json.loads(run(*PLAN, "--budget", "1", "--time-limit", "0.1", "--json", "-").out)["status"] == "infeasible"


def test_a_model_that_cannot_be_captured(run: Any, api: FakeApi) -> None:
    api.fails = CaptureError("model.py:3: .item() makes the graph depend on data;\n keep it a tensor")
    run(*PLAN, "--budget", "65%").assert_error(4, "model.py:3", "keep it a tensor")


@pytest.mark.parametrize(("arguments", "words"), json.loads((Path(__file__).parent / "wrong_usage.json").read_text()))
def test_wrong_usage(run: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], words: Sequence[str]) -> None:
    monkeypatch.setattr(_asked, "load", lambda *_, **__: pytest.fail("the model was built"))
    found = run(*arguments)
    found.assert_error(2, *words)
    assert found.out == ""


def test_torchs_name_of_a_card_is_the_card(run: Any, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    for name, answer in (("device_count", lambda: 2), ("set_device", chosen.append)):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ["Tesla", "NVIDIA L4"][number])
    assert run(*PLAN, "--budget", "65%", "--device", "cuda:1").code == 0
    assert chosen == [1] and api.asked["target"].device == "NVIDIA L4"
    run(*PLAN, "--budget", "65%", "--device", "cuda").assert_error(2, "unknown device 'Tesla'", "calibrate")


def test_version(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--version")
    assert planner.__version__ in capsys.readouterr().out


def test_verify(run: Any, api: FakeApi, tmp_path: Path) -> None:
    found = run("verify", "minigpt", "--budget", "65%", "--solver", "sqrt")
    assert found.code == 0 and "gradients equal" in found.out
    measured = json.loads(run(*PLAN, "--budget", "65%", "--verify", "--json", "-").out)["measured"]
    assert measured["gradients_bitwise_equal"] is True and measured["peak_bytes"] == 1

    path = tmp_path / "plan.json"
    run(*PLAN, "--budget", "65%", "--save", str(path))
    assert run("verify", "minigpt", "--plan", str(path)).code == 0


def test_verify_fails_where_the_plan_is_broken(run: Any, api: FakeApi) -> None:
    whole = api.measured
    api.measured = dataclasses.replace(whole, gradients_bitwise_equal=False, differences=("gradient of wte.weight",))
    found = run(*PLAN, "--budget", "65%", "--verify")
    found.assert_error(1, "gradient of wte.weight")
    assert "gradients DIFFERENT" in found.out
    api.measured = dataclasses.replace(whole, peak_bytes=2**40)
    run(*PLAN, "--budget", "65%", "--verify").assert_error(1, "measured peak")


def test_what_should_not_happen(run: Any, api: FakeApi) -> None:
    api.fails = KeyError("a\nb")
    found = run(*PLAN, "--budget", "65%")
    found.assert_error(1, "KeyError", "--debug")
    debugged = run(*PLAN, "--budget", "65%", "--debug")
    assert debugged.code == 1 and "Traceback" in debugged.err
    api.fails = CaptureError("cause")
    debugged = run(*PLAN, "--budget", "65%", "--debug")
    assert debugged.code == 4 and "Traceback" in debugged.err and debugged.err.endswith("error: cause\n")
    api.fails = KeyboardInterrupt()
    run(*PLAN, "--budget", "65%").assert_error(130, "interrupted")


def test_a_factory_is_asked_only_for_sizes_that_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Not the fake: the real loader must refuse before it calls the factory.
    (tmp_path / "m.py").write_text("def make(batch_size=1):\n    raise SystemExit\n", encoding="utf-8")
    asked = ["plan", f"{tmp_path}/m.py:make", "--budget", "1GiB"]
    assert cli.main([*asked, "--batch-size", "2", "--layers", "3"]) == 2
    assert "takes no layers" in capsys.readouterr().err


# The process itself.


def test_interrupting_ends_at_once_whatever_is_at_work(tmp_path: Path) -> None:
    """A library that is long in C, and one that swallows what Ctrl-C raises."""
    (tmp_path / "m.py").write_text(
        "import hashlib\n\ndef make():\n    while True:\n        try:\n            print('busy', flush=True)\n"
        "            hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
        "        except KeyboardInterrupt:\n            pass\n",
        encoding="utf-8",
    )
    # What runs in the background ignores Ctrl-C, and so would what it starts.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "planner", "plan"]
    command += [f"{tmp_path}/m.py:make", "--budget", "1GiB"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        try:
            assert running.stdout.readline() == "busy\n"
            began = time.perf_counter()
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=60) == 130
            assert time.perf_counter() - began < 10  # half a second on an idle machine
            assert running.stderr.read().splitlines()[-1] == "error: interrupted"
        finally:
            running.kill()


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, cli\n"
        "try:\n    cli.main(['plan', '--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'highspy', 'rich', 'networkx', 'numpy', 'cost_models'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--activation-budget" in done.stdout
    assert time.perf_counter() - started < 5  # 0.05 s on an idle machine; a shared one may be slow


@pytest.mark.parametrize("arguments", [["models"], ["--help"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "cli.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.stderr == ""


def test_an_output_that_is_not_unicode(api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main((*PLAN, "--budget", "65%")) == 0
        stream.seek(0)
        assert stream.readline().startswith("FITS ")
