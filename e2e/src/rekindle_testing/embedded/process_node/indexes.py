"""Which 127.INDEX.0.0/16 a node or a test gets, on a machine where several runs share loopback."""

from __future__ import annotations

import socket

from rekindle_testing.embedded.errors import EmbeddedError

# 127.0.0.0/16 is the machine's own.
_FIRST, _LAST = 1, 254


class IndexTakenError(EmbeddedError):
    """Another node on this machine has the index, or all are taken."""


class IndexReservation:
    """Reserves an index until it is released, or until the process ends.

    By an abstract socket, whose name the kernel releases when the process ends.
    """

    def __init__(self, index: int | None) -> None:
        if index is not None and not _FIRST <= index <= _LAST:
            raise IndexTakenError(f"index {index} of a node must be in {_FIRST}..{_LAST}")
        candidates = range(_FIRST, _LAST + 1) if index is None else [index]
        for candidate in candidates:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                held.bind(f"\0rekindle-process-node-{candidate}")
            except OSError:
                held.close()
                continue
            self.index = candidate
            self._held = held
            return
        which = "every index" if index is None else f"index {index}"
        raise IndexTakenError(f"{which} belongs to another process node on this machine")

    def release(self) -> None:
        self._held.close()
