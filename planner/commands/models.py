"""``models``: the zoo."""

from __future__ import annotations

import argparse

from planner.commands._options import Alone


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


COMMAND = _Models()
