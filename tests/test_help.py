"""``--help``: every command says what it does and ends with examples that can be typed."""

from __future__ import annotations

import shlex

import pytest

import cli
from planner.commands import Command, commands, examples

WITH_EXAMPLES = [command for command in commands() if examples(command)]


def test_who_has_examples():
    named = {command.name for command in WITH_EXAMPLES}
    assert named >= {"calibrate", "check", "models", "plan", "profile", "verify"}


@pytest.mark.parametrize("command", WITH_EXAMPLES, ids=lambda command: command.name)
def test_help_ends_with_the_examples(command: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        cli.main([command.name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: checkpoint-planner {command.name} ")
    wanted = [f"  checkpoint-planner {example}" for example in examples(command)]
    assert shown.splitlines()[-len(wanted) - 1 :] == ["examples:", *wanted]


@pytest.mark.parametrize("command", WITH_EXAMPLES, ids=lambda command: command.name)
def test_examples_can_be_typed(command: Command):
    for example in examples(command):
        arguments = shlex.split(example)
        assert arguments[0] == command.name
        assert cli.make_parser().parse_args(arguments).run == command.run
