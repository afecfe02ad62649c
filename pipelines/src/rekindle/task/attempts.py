"""What outlives a task that is killed in a call: how large the call was.

The kernel ends all of a container's processes when its memory is used up, so nobody is left to
make the call smaller. A note on the task's disk, which a restart of the container finds, says what
was under way. It is written only for calls that are larger than all that succeeded before.

Design: docs/design/engine.md#memory.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

_MARGIN = 1.1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A call under way: its epochs and the bytes of their rows."""

    epochs: int
    bytes: int


class Attempts:
    """The note of one task, in its data directory. What the disk refuses is not noted."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "attempt.json"
        self._proven = 0
        self._noted = False

    def left(self) -> Attempt | None:
        """What was under way when the task was killed; None if nothing was."""
        try:
            said = json.loads(self._path.read_text())
            return Attempt(int(said["epochs"]), int(said["bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, attempt: Attempt) -> None:
        if self._noted or attempt.bytes <= self._proven * _MARGIN:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            said = {"epochs": attempt.epochs, "bytes": attempt.bytes}
            self._path.write_text(json.dumps(said))
            self._noted = True
        except OSError as error:
            _log.warning("the size of a call is not noted: %s", error)

    def end(self, attempt: Attempt | None = None) -> None:
        """The call is over, and succeeded if it is given."""
        if attempt is not None:
            self._proven = max(self._proven, attempt.bytes)
        if self._noted:
            self._path.unlink(missing_ok=True)
            self._noted = False
