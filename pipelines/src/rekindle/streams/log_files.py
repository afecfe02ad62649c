"""The files of an output log: consecutive epochs each, on local disk or spilled to a store.

A directory holds `<first epoch>.log`, records one after another (`streams.records`), and
`<first epoch>.spilled`, the name and the index of a file that was moved to the store. Does not
know budget or floor; `streams.log` holds the locks.

Design: docs/design/streams.md#output-log.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from rekindle.streams import records
from rekindle.streams.records import Record


class LogFile:
    """One file: `<first epoch>.log`; or, spilled, its index `<first epoch>.spilled`."""

    def __init__(self, path: Path, index: list[Record], spilled: str | None = None) -> None:
        self.path = path
        self.index = index
        self.spilled = spilled
        self._mapped: pa.Buffer | None = None

    @property
    def first(self) -> int:
        return self.index[0].epoch

    @property
    def last(self) -> int:
        return self.index[-1].epoch

    @property
    def size(self) -> int:
        return self.index[-1].end if self.index else 0

    def find(self, epoch: int) -> Record:
        return self.index[epoch - self.first]

    def map(self, record: Record) -> pa.Buffer:
        """The local file, mapped at least to the end of `record`."""
        if self._mapped is None or self._mapped.size < record.end:
            with pa.memory_map(str(self.path)) as file:
                self._mapped = file.read_buffer()
        return self._mapped

    def unmap(self) -> None:
        """Release the mapping; the next read maps the file again."""
        self._mapped = None

    def write(self, record: Record, pieces: Iterable[bytes | pa.Buffer]) -> None:
        """Add a record's bytes to the file; the caller updates the index. After OSError the file is
        unchanged."""
        with self.path.open("ab", buffering=0) as file:
            try:
                for piece in pieces:
                    view = memoryview(piece)
                    while len(view):
                        view = view[file.write(view) :]
            except OSError:
                os.truncate(self.path, record.start)
                raise

    def write_spilled_index(self, name: str) -> Path:
        """Write the index that is to replace the file, which still exists; the index's path."""
        index = self.path.with_suffix(".spilled")
        temp = index.with_suffix(".tmp")
        temp.write_text(json.dumps({"name": name, "index": [asdict(r) for r in self.index]}))
        temp.replace(index)
        return index

    def replace_by_index(self, index: Path, name: str) -> None:
        """Remove the file: its bytes are object `name` of the store, its index is in `index`."""
        self.spilled = name
        self.unmap()
        self.path.unlink(missing_ok=True)
        self.path = index


def new_log_file(directory: Path, epoch: int) -> LogFile:
    """An empty file that will begin with `epoch`."""
    path = directory / f"{epoch:012d}.log"
    path.unlink(missing_ok=True)
    return LogFile(path, [])


def load_log_files(directory: Path, *, with_spilled: bool) -> tuple[list[LogFile], str | None]:
    """The files of an earlier process, in order and without a gap, and the damage after them, if
    any. Files after the damage are removed. `with_spilled`: whether there is a store to read
    spilled files from."""
    for path in sorted(directory.iterdir()):
        incomplete = path.suffix == ".spilled" and path.with_suffix(".log").exists()
        if incomplete or path.suffix == ".tmp":  # killed while it spilled; the log file is complete
            path.unlink()
    files: list[LogFile] = []
    damage: str | None = None
    for path in sorted(p for p in directory.iterdir() if p.suffix in (".log", ".spilled")):
        if damage is None:
            file, damage = _load(path, with_spilled)
            if file.index and files and file.first != files[-1].last + 1:
                damage = f"{path} does not follow the file before it"
            elif file.index:
                files.append(file)
                continue
        path.unlink()
    return files, damage


def _load(path: Path, with_spilled: bool) -> tuple[LogFile, str | None]:
    if path.suffix == ".spilled":
        if not with_spilled:
            return LogFile(path, []), f"{path} was spilled, and no store is configured"
        try:
            spilled = json.loads(path.read_text())
            index = [Record(**fields) for fields in spilled["index"]]
            return LogFile(path, index, spilled["name"]), None
        except (ValueError, KeyError, TypeError) as error:
            return LogFile(path, []), f"{path} is not a valid index: {error}"
    if not path.stat().st_size:
        return LogFile(path, []), None
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        index, damage = records.scan(view)
    if damage is None:
        return LogFile(path, index), None
    os.truncate(path, index[-1].end if index else 0)
    return LogFile(path, index), f"{damage} of {path}"
