"""A bound for the memory in which calls hold epochs of spilled files, however slow readers are.

Epochs of local files are sent from the log's mapped files and need no memory. A spilled file is
fetched; a call that held it until a slow reader has taken its rows would hold all of it. So one
call at a time fetches, and copies the epochs that it sends next.

Design: docs/design/stream-sinks.md#calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from rekindle.errors import RekindleError
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.log_reading import EncodedEpoch

HELD_BYTES = 16 << 20
WAIT_S = 1.0


class TooManySpilledReads(RekindleError):
    """Other calls hold as much as is allowed; a retry may succeed."""


class SpilledReads:
    """The reads of spilled files by all calls of one task, which together hold at most `max_bytes`,
    or one larger epoch. A call waits up to `wait_s` for others. Thread-safe."""

    def __init__(self, max_bytes: int = HELD_BYTES, wait_s: float = WAIT_S) -> None:
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._fetching = threading.Lock()
        self._released = threading.Condition()
        self._held = 0

    @property
    def held_bytes(self) -> int:
        return self._held

    @contextmanager
    def read(self, log: OutputLog, epoch: int, max_bytes: int) -> Iterator[list[EpochBatch]]:
        """As `OutputLog.read`; what is read is not to be held for longer than the context. Raises
        TooManySpilledReads."""
        local = log.read(epoch, max_bytes, local=True)
        if local or log.spilled(epoch) is None:
            yield local
            return
        copies, size = self._copy(log, epoch, max_bytes)
        try:
            yield copies
        finally:
            self._release(size)

    def _copy(self, log: OutputLog, epoch: int, max_bytes: int) -> tuple[list[EpochBatch], int]:
        if not self._fetching.acquire(timeout=self._wait_s):
            raise TooManySpilledReads("another call fetches epochs from the store; try again")
        try:
            read = log.read_encoded(epoch, max_bytes)
            size = sum(e.payload.size for e in read if e.payload is not None)
            self._hold(size)
            try:
                return [log.decode(_copied(e)) for e in read], size
            except BaseException:
                self._release(size)
                raise
        finally:
            self._fetching.release()

    def _hold(self, size: int) -> None:
        with self._released:
            fits = self._released.wait_for(
                lambda: not self._held or self._held + size <= self._max_bytes, self._wait_s
            )
            if not fits:
                raise TooManySpilledReads(
                    f"slow readers hold {self._held} bytes of epochs from the store; try again, or "
                    f"read another replica"
                )
            self._held += size

    def _release(self, size: int) -> None:
        with self._released:
            self._held -= size
            self._released.notify_all()


def _copied(encoded: EncodedEpoch) -> EncodedEpoch:
    if encoded.payload is None:
        return encoded
    return encoded._replace(payload=pa.py_buffer(encoded.payload.to_pybytes()))
