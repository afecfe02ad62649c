"""Stores the highest fence that a task has accepted on its disk (I9).

A restarted container is the same incarnation: without this it would accept polls of a coordinator
that was replaced before the restart. The pod's volume outlives its containers and ends with the
pod.

Design: docs/design/fencing.md#fences.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from rekindle.protocol import TaskRef

NO_FENCE = -1
_log = logging.getLogger(__name__)


class FenceFile:
    """One small file for one incarnation of one topology's task; `topology`: its UID. Not shared
    between threads."""

    def __init__(self, data: Path, topology: str, ref: TaskRef) -> None:
        name = f"{ref.segment}-{ref.partition}-{ref.replica}-{ref.incarnation}"
        self._path = data / "fence" / (topology or "none") / name

    def read(self) -> int:
        """The fence on the disk; NO_FENCE at the first start."""
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return NO_FENCE
        except (OSError, ValueError) as error:
            _log.warning("the fence in %s cannot be read: %s", self._path, error)
            return NO_FENCE

    def write(self, fence: int) -> bool:
        """Returns whether it was written; a full disk must not stop polls."""
        temp = self._path.with_name(f".{self._path.name}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temp.open("w") as file:
                file.write(str(fence))
                file.flush()
                os.fsync(file.fileno())
            temp.replace(self._path)
            _flush(self._path.parent)
        except OSError as error:
            _log.warning("fence %d cannot be written to %s: %s", fence, self._path, error)
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
            return False
        return True


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
