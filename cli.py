"""``python cli.py``: the command line, from a clone; once installed it is ``checkpoint-planner`` too."""

from __future__ import annotations

import sys

from planner.commands._main import main, make_parser

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(main())
