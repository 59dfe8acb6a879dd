"""``models`` and ``completion``: names that can be typed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from planner.commands._options import Alone
from planner.common.program import NAME
from planner.errors import UsageError


class _Models(Alone):
    name = "models"
    summary = "list the models that can be named"
    examples = ("models",)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, args: argparse.Namespace) -> int:
        from planner import zoo

        width = max(map(len, zoo.names()))
        for name in zoo.names():
            print(f"{name:{width}}  {zoo.describe(name)}")
        return 0


_FILES = ("FILE", "PLAN")


"""How the metavar of what names a file begins."""


class _Completion(Alone):
    name = "completion"
    summary = "print what a shell completes commands with"
    examples = ("completion bash", "completion zsh")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")

    def run(self, args: argparse.Namespace) -> int:
        if find_spec("shtab") is None:
            raise UsageError("completion is written by shtab: pip install 'checkpoint-planner[completion]'")
        import shtab

        from planner.commands._main import make_parser

        parser = make_parser()
        parser.prog = NAME  # a shell completes a command by its name, however this one was started
        known = _known()
        for action in _actions(parser):
            if (action.metavar or "") and str(action.metavar).startswith(_FILES):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.choices is None and action.dest in known:
                action.choices = known[action.dest]
        print(shtab.complete(parser, shell=args.shell))
        return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield what can be typed, in every command."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _known() -> dict[str, Sequence[str]]:
    """Return by option the names that it takes."""
    import cost_models
    from cost_models.devices import device_names
    from planner import exporters, runtimes, solvers, strategies, zoo
    from planner.common.options import OPTIMIZERS

    return {
        "name": [*zoo.names()],
        "device": device_names(),
        "cost_model": cost_models.names(),
        "optimizer": OPTIMIZERS,
        "runtime": runtimes.names(),
        "solver": solvers.names(),
        "strategy": strategies.names(),
        "to": exporters.targets(),
    }


COMMAND = (_Models(), _Completion())
