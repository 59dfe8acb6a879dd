"""``--help``: every command says what it does and ends with examples that can be typed."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import fields

import pytest

import cli
from planner.commands import Command, commands
from planner.common.options import GROUPS


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_help_ends_with_the_examples(command: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main([command.name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: checkpoint-planner {command.name} ")
    wanted = [f"  checkpoint-planner {example}" for example in command.examples]
    assert wanted and shown.splitlines()[-len(wanted) - 1 :] == ["examples:", *wanted]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_examples_can_be_typed(command: Command):
    for example in command.examples:
        arguments = shlex.split(example)
        assert arguments[0] == command.name
        assert cli.make_parser().parse_args(arguments).run == command.run


def test_help_of_plan_fits_on_two_screens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    lines = []
    for asked in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main(["plan", asked])
        lines.append(capsys.readouterr().out.splitlines())
    usual, everything = lines
    assert len(usual) <= 48
    assert set(usual) < set(everything) and any("--offload-at-least" in line for line in everything)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_docstrings_of_groups_describe_their_options(group: type):
    described = re.findall(r"^(\w+) : ", inspect.getdoc(group) or "", re.MULTILINE)
    names = [field.name for field in fields(group) if field.metadata]
    assert set(names) <= set(described)
