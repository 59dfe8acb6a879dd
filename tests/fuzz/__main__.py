"""``python -m tests.fuzz --models 1000 --seed 0 [--jobs 2] [--json FILE]``."""

import sys

from tests.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
