"""Stores the size of the running call in a file, for the case that the task is killed in it.

When a container exceeds its memory limit, the kernel kills all of its processes, so none is left to
make the call smaller. A file on the task's disk, which survives a restart of the container, has the
size of the call. It is only written for calls that are larger than all that succeeded before.

Design: docs/design/engine.md#memory.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_MARGIN = 1.1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallSize:
    """The epochs of a call, and the bytes of their rows."""

    epochs: int
    bytes: int


FILE_NAME = "attempt.json"
"""The name that older releases read."""


class CallSizeFile:
    """The file of one task, in its data directory. If it cannot be written, calls continue."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._largest_succeeded = 0  # bytes
        self._written = False
        self._thread: int | None = None  # of the newest call

    def interrupted(self) -> CallSize | None:
        """The call in which the task was killed; None if there was none."""
        try:
            content = json.loads(self._path.read_text())
            return CallSize(int(content["epochs"]), int(content["bytes"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, call: CallSize) -> None:
        """The calling thread begins a call."""
        self._thread = threading.get_ident()
        if self._written or call.bytes <= self._largest_succeeded * _MARGIN:
            return
        self._write(call)

    def _write(self, call: CallSize) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(asdict(call)))
            self._written = True
        except OSError as error:
            _log.warning("the size of a call cannot be written to %s: %s", self._path, error)

    @contextmanager
    def during_wait(self) -> Iterator[None]:
        """A context in which the call waits for state that is fetched from the checkpoint store,
        perhaps for long, and needs no memory: if the task is killed then, the size of the call is
        not the reason. Does nothing in other threads than that of the call."""
        size = self.interrupted() if self._written else None
        if size is None or self._thread != threading.get_ident():
            yield
            return
        self._remove()
        try:
            yield
        finally:
            self._write(size)

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        self._written = False

    def end(self, succeeded: CallSize | None = None) -> None:
        """The call has ended; `succeeded`: its size if it succeeded."""
        if succeeded is not None:
            self._largest_succeeded = max(self._largest_succeeded, succeeded.bytes)
        if self._written:
            self._remove()
