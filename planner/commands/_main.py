"""The command line: plan a model for a memory budget, prove it by real steps, find what is wrong.

Exit codes: 0 fits or sound, 1 failed or problems found, 2 wrong usage, 3 no plan fits, 4 the model cannot be captured,
130 interrupted. Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial

from planner import __version__
from planner.commands import commands
from planner.commands._options import HelpAll, Parser, rare
from planner.commands._terminal import INTERRUPTED, ending_at_once
from planner.common.garbage import collected_rarely
from planner.common.program import program
from planner.errors import PlannerError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        Exit code.
    """
    debug = False
    try:
        args = make_parser().parse_args(arguments)
        debug = args.debug
        if getattr(args, "no_cache", False):
            from planner.common import cache_folder

            cache_folder.turn_off()
        with ending_at_once(), collected_rarely():
            code: int = args.run(args)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough; Python must not complain at exit that it could not write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _complain("interrupted", debug)
        return INTERRUPTED
    except PlannerError as error:
        _complain(str(error), debug)
        return error.exit_code
    except Exception as error:
        _complain(f"{type(error).__name__}: {error}; this should not happen: run with --debug and report it", debug)
        return PlannerError.exit_code


def _complain(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print("error:", " ".join(message.split()), file=sys.stderr)


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog=program(), description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"checkpoint-planner {__version__}")
    common = Parser(add_help=False)
    common.add_argument("--help-all", action=HelpAll, nargs=0, help="show rare options, too")
    rare(common.add_argument("--debug", action="store_true", help="show tracebacks"))
    chosen = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands():
        added = chosen.add_parser(
            command.name,
            parents=[common, *command.parents()],
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog="\n".join(["examples:", *(f"  {parser.prog} {example}" for example in command.examples)]),
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=27),
        )
        command.add_options(added)
        added.shorten_usage()
        added.set_defaults(run=command.run)
    return parser
