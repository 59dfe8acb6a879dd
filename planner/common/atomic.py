"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from planner.errors import UsageError


def write_text(path: str | Path, text: str) -> None:
    """Write a text as UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically, through a temporary one beside it.

    A UsageError says that it cannot be written there. What was there before is untouched then.
    """
    target = Path(path)
    if os.path.isdir(target):
        raise UsageError(f"cannot write {target}: it is a directory; name a file")
    temporary = None
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)  # a pipe or a device cannot be replaced
            return
        target = target.resolve()  # a link stays a link, what it points at is replaced
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:32]}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
        temporary = None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot write {path}: {reason}; name a file in a directory that can be written") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def check_writable(path: str | Path) -> None:
    """Say now, before long work, that a path is a directory, or in one that is missing or closed.

    What cannot be told now shows later.
    """
    target = Path(path)
    try:
        folder, wrong = target.resolve().parent, None
        # A new file changes its directory, a pipe or a device does not.
        written = (folder,) if not target.exists() else (target, folder) if target.is_file() else (target,)
        if target.is_dir():
            wrong = "it is a directory; name a file"
        elif not folder.is_dir():
            wrong = f"there is no directory {folder}; make it first"
        elif not all(os.access(place, os.W_OK) for place in written):
            wrong = "permission denied; name a file in a directory that can be written"
    except (OSError, ValueError, RuntimeError) as error:
        wrong = getattr(error, "strerror", None) or str(error)
    if wrong:
        raise UsageError(f"cannot write {path}: {wrong}")


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
