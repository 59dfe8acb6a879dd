"""``python -m planner``: the command line."""

from __future__ import annotations

import sys

from planner.commands._main import main

if __name__ == "__main__":
    sys.exit(main())
