"""What is asked, and recorded, of a step that is computed in slices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from planner.errors import UsageError

SLICES = "slices"
"""Where the fingerprint of a plan says how many slices there are."""

AUTO, OFF = "auto", "off"

COUNTS = (2, 4, 8, 16, 32, 64)
"""What is tried in turn where the planner is to choose."""

TOLERANCE = 2e-6
"""How far loss and gradients of a sliced step may be from those of the step in one piece; see
:func:`planner.diagnose.verification.compare`. Products and sums are the same, added up in another order."""

Chunk = int | str
"""``"off"``, ``"auto"``, or how many slices; 1 is ``"off"``."""


def check_chunk(chunk: Chunk) -> Chunk:
    """Give the number of slices that is asked for, 1 for none, or :data:`AUTO`.

    Raises
    ------
    UsageError
        If it is neither.

    Examples
    --------
    >>> check_chunk("off"), check_chunk(8), check_chunk("auto")
    (1, 8, 'auto')
    """
    if isinstance(chunk, int) and not isinstance(chunk, bool) and 1 <= chunk < 2**31:
        return chunk
    if chunk == OFF:
        return 1
    if chunk == AUTO:
        return AUTO
    near = difflib.get_close_matches(str(chunk), (AUTO, OFF), n=1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"chunk must be 'auto', 'off' or a number of slices above zero, not {chunk!r}{hint}")


def slices_of(fingerprint: Mapping[str, str | int]) -> int:
    """Give the number of slices that a plan was made for, 1 if its step is in one piece."""
    return int(fingerprint.get(SLICES, 1))
