"""Spilled files of a log that were fetched from the store: those read last, and those in use.

Readers at different places of a log read different files at the same time, in portions; if each
portion fetched its file again, a file would be fetched many times.

Design: docs/design/streams.md#output-log.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import pyarrow as pa


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FetchedFile:
    """`name`: of the object in the store."""

    name: str
    data: pa.Buffer


class FetchedFiles:
    """Keeps at most `max_bytes`, or the newest one; a file in use is found anyway. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, FetchedFile] = OrderedDict()
        self._in_use: WeakValueDictionary[str, FetchedFile] = WeakValueDictionary()

    def find(self, name: str) -> FetchedFile | None:
        """The file, if it is in memory."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._in_use.get(name)

    def get(self, name: str, fetch: Callable[[str], bytes]) -> FetchedFile:
        """The file; `fetch` reads it from the store if it is not in memory, and is called without a
        lock."""
        file = self.find(name)
        if file is None:
            file = FetchedFile(name, pa.py_buffer(fetch(name)))
        with self._lock:
            self._in_use[name] = self._kept[name] = file
            self._kept.move_to_end(name)
            while len(self._kept) > 1 and self._bytes() > self._max_bytes:
                self._kept.popitem(last=False)
        return file

    def drop(self, name: str) -> None:
        """Forget a file: the next `get` fetches it."""
        with self._lock:
            self._kept.pop(name, None)
            self._in_use.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._in_use.clear()

    def _bytes(self) -> int:
        return sum(file.data.size for file in self._kept.values())
