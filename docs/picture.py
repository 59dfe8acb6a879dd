"""Draw ``docs/report.svg``, the picture of a report, from a plan file: ``python docs/picture.py gpt2.plan``."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from planner import Plan
from planner.report import alternatives, anatomy, placement, timeline, verdict
from planner.report.style import print_report

WIDTH = 104


def main(path: str) -> None:
    """Draw the parts that say most."""
    plan = Plan.load(path)
    console = Console(file=io.StringIO(), record=True, width=WIDTH, highlight=False, force_terminal=True)
    parts = (anatomy.render, alternatives.render_baselines, placement.render, timeline.render)
    print_report(console, verdict.verdict(plan), *(part(plan) for part in parts), style="bold green")
    drawn = console.export_svg(title="python cli.py plan gpt2 --budget 60%")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # whose address is in a network
    Path(__file__).with_name("report.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
