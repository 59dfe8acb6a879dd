"""``cache``: where solutions and measured times are kept, and how to be rid of them."""

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
        from planner.common import cache_folder
        from planner.common.units import format_bytes
        from planner.measure import timing_cache
        from planner.solving import solution_cache

        place = cache_folder.folder("")
        if place is None:
            print(f"the cache is off ({cache_folder.VARIABLE}=off)")
            return 0
        look = cache_folder.clear if args.clear else cache_folder.contents
        solutions, measured = look(solution_cache.KIND), look(timing_cache.KIND)
        print(
            f"{solutions.files} solutions, {format_bytes(solutions.size_bytes)}, and "
            f"{format_bytes(measured.size_bytes)} of measured times, {'removed from' if args.clear else 'kept in'} "
            f"{place}"
        )
        return 0


COMMAND = _Cache()
