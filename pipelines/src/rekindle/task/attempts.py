"""Numbers of tentative branches that no earlier process of a task has used, in a file on its disk.

Readers prefer a later attempt to an earlier one of the same replica, so a restarted container must
not begin at 1 again. Numbers are reserved in blocks, so the file is written once at each start, and
once for BLOCK branches. Another pod has another incarnation, which is another replica to readers.

Design: docs/design/consistency.md#in-a-task.
"""

from __future__ import annotations

import logging
from pathlib import Path

BLOCK = 1 << 16
"""Numbers in a block. A record has 32 bits for a number, so there are 65,536 blocks."""

_log = logging.getLogger(__name__)


class AttemptFile:
    """`first`: the first number of this process. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.first = self._read()
        self._reserved = self.first
        self.reserve(self.first)

    def reserve(self, attempt: int) -> None:
        """To be called before a branch begins. If the disk is full, the branch begins anyway; then
        readers may prefer results of an earlier process, until they are corrected."""
        if attempt < self._reserved:
            return
        self._reserved = attempt + BLOCK
        temp = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temp.write_text(str(self._reserved))
            temp.replace(self._path)
        except OSError as error:
            _log.warning("attempts are not reserved in %s: %s", self._path, error)

    def _read(self) -> int:
        try:
            return max(1, int(self._path.read_text()))
        except FileNotFoundError:
            return 1
        except (OSError, ValueError) as error:
            _log.warning("attempts in %s cannot be read: %s", self._path, error)
            return 1
