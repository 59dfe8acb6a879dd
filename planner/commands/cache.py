"""``cache``: where solutions are kept that were found before, and how to be rid of them."""

from __future__ import annotations

import argparse

from planner.commands._options import Alone


class _Cache(Alone):
    name = "cache"
    summary = "show what is kept of earlier searches, or clear it"
    examples = ("cache", "cache --clear")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--clear", action="store_true", help="remove all that is kept")

    def run(self, args: argparse.Namespace) -> int:
        from planner.common.units import format_bytes
        from planner.solving import solution_cache

        place = solution_cache.folder()
        if place is None:
            print(f"the cache is off ({solution_cache.VARIABLE}=off)")
            return 0
        found = solution_cache.clear() if args.clear else solution_cache.contents()
        verb = "removed from" if args.clear else "kept in"
        print(f"{found.solutions} solutions, {format_bytes(found.size_bytes)}, {verb} {place}")
        return 0


COMMAND = _Cache()
