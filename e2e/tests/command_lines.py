"""Which processes have something to do with a directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def command_lines_naming(directory: Path) -> list[str]:
    """The command lines of all processes that name a path in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            found += [words.decode()] if os.fsencode(directory) in words else []
    return found
