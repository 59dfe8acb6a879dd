"""Draw ``docs/report.svg``, the picture of a report, from a plan file: ``python docs/picture.py gpt2.plan``."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from planner import Plan
from planner.report import anatomy, baselines, placement, timeline, verdict

WIDTH = 104


def main(path: str) -> None:
    """Draw the parts that say most."""
    plan = Plan.load(path)
    console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False, force_terminal=True)
    verdict.print_verdict(verdict.verdict(plan), console, style="bold green")
    for part in (anatomy.render(plan), baselines.render(plan), placement.render(plan), timeline.render(plan)):
        console.print()
        console.print(part)
    drawn = console.export_svg(title="python cli.py plan gpt2 --budget 60%")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # whose address is in a network
    Path(__file__).with_name("report.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
