"""Search for a better plan in a process beside training, which goes on under the plan that was found at once."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from planner.analysis.study import Study
from planner.common.options import Search
from planner.plans.plan import Plan
from planner.solving import solution_cache

_log = logging.getLogger(__name__)

_BETTER = 1e-3
"""By so much of the step a plan must be cheaper to take the place of the one in force: its graphs are written anew."""

_PROGRAM = "from planner.analysis.search_beside import main; main()"


class SearchBeside:
    """A search in another process; what it finds is in :mod:`planner.solving.solution_cache` once it is taken.

    ``asked`` are the keywords of :meth:`planner.analysis.study.Study.plan`. The process is of low priority, imports no
    torch, and ends with this object.
    """

    def __init__(self, study: Study, plan: Plan, asked: Mapping[str, Any]) -> None:
        self._plan, self._found = plan, tempfile.TemporaryFile()  # noqa: SIM115, the process writes it
        search = replace(asked["search"], progress=None, told=None, compare=False)
        with tempfile.TemporaryFile() as given:
            pickle.dump((study, {**asked, "search": search}), given)
            given.seek(0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=given, stdout=self._found, stderr=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        weakref.finalize(self, self._process.kill)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def take(self) -> bool:
        """Take what a process that is over has found, and return whether it is better than the plan in force."""
        if self._process.returncode:
            _log.info("the search beside training failed: the plan stays as it is")
            return False
        self._found.seek(0)
        found = json.load(self._found)
        solution_cache.remember(found["solutions"])
        return bool(found["added_seconds"] < self._plan.added_seconds - _BETTER * self._plan.step_seconds)


def main() -> None:
    """Make the plan that standard input asks for, and write its solutions to standard output."""
    with suppress(AttributeError, OSError):
        os.nice(10)
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print
    study, asked = pickle.load(sys.stdin.buffer)
    solutions = solution_cache.collect()
    plan = study.plan(**asked)
    with os.fdopen(answer, "w") as out:
        json.dump({"added_seconds": plan.added_seconds, "solutions": solutions}, out)


def is_worth_it(plan: Plan, search: Search) -> bool:
    """Whether a longer search may find a better plan than a quick one did."""
    return plan.added_seconds - plan.lower_bound_seconds > max(search.enough, _BETTER) * plan.step_seconds
