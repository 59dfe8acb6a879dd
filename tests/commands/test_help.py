"""``--help``: every command says what it does and ends with examples that can be typed."""

from __future__ import annotations

import shlex

import pytest

import cli
from planner.commands import Command, commands


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
