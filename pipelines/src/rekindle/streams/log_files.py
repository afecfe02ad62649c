"""The files of an output log: consecutive epochs each, on local disk or spilled to a store.

A directory holds `<first epoch>.log`, records one after another (`streams.records`), and
`<first epoch>.spilled` for a file that was moved to the store: a line of JSON (format, the object's
name, its size, a CRC-32 of these and the rest) and the file's records without their rows, or of a
file that another task has shipped, whose records are not known before it is fetched, its last
epoch; and the floor, for the next process. Does not know the budget; `streams.log` holds the locks.

Design: docs/design/streams.md#output-log.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rekindle.streams import records
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.records import DamagedRecord, Record, RecordKind
from rekindle.streams.sparse_index import SparseIndex
from rekindle.streams.tail import Appended, Tail

SPILLED_FORMAT = 2
FLOOR_FILE = "floor"


class LogFile:
    """One file: `<first epoch>.log`; or, spilled, its outline `<first epoch>.spilled`. `tail`: its
    end, to which the next epoch is appended. A last record without rows grows in place by further
    such epochs (`streams.tail`)."""

    __slots__ = ("_index", "_mapped", "adopted", "first", "path", "spilled", "tail")

    def __init__(
        self, path: Path, first: int, spilled: str | None = None, *, adopted: bool = False
    ) -> None:
        """`spilled`: name of the object in the store that has its bytes. `adopted`: another task
        has written that, so it is not this log's to delete, and its records are not known."""
        self.path = path
        self.first = first
        self.spilled = spilled
        self.adopted = adopted
        self.tail = Tail(first)
        self._index = SparseIndex()  # without entries if it is spilled
        self._mapped: pa.Buffer | None = None

    @property
    def last(self) -> int:
        return self.tail.next_epoch - 1

    @property
    def size(self) -> int:
        return self.tail.size

    def offset_before(self, epoch: int) -> int:
        """Where to begin to look for an epoch."""
        return self._index.offset_before(epoch)

    def map(self, end: int) -> pa.Buffer:
        """The local file, mapped at least to an offset."""
        if self._mapped is None or self._mapped.size < end:
            with pa.memory_map(str(self.path)) as file:
                self._mapped = file.read_buffer()
        return self._mapped

    def unmap(self) -> None:
        """Release the mapping; the next read maps the file again."""
        self._mapped = None

    def write(self, appended: Appended) -> None:
        """Write an epoch as `streams.tail.append_epoch` returned it; the caller calls `set_tail`.
        After OSError the file is unchanged."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self.path, flags, 0o666)
        try:
            for offset, data in appended.writes:
                _write(file, data, offset)
        except OSError:
            if appended.undo is not None:
                with contextlib.suppress(OSError):  # a read finds what this leaves
                    _write(file, appended.undo[1], appended.undo[0])
            os.ftruncate(file, self.size)
            raise
        finally:
            os.close(file)

    def set_tail(self, tail: Tail, record: Record | None) -> None:
        """Note what was written. `record`: the new record; None if the last one has grown."""
        self.tail = tail
        if record is not None and self.spilled is None:
            self._index.add(record.epoch, record.start)

    def seal(self) -> None:
        """Make the file immutable: nothing is appended any more, and its last record does not grow,
        even if it is empty."""
        self.unmap()
        tail = self.tail
        self.tail = Tail(tail.next_epoch, tail.size, tail.records, tail.newest_bytes)

    def write_outline(self, name: str, size: int, outline: bytes) -> Path:
        """Write what is to replace the file, which still exists, under a temporary name."""
        return _write_outline(self.path, name, size, outline)

    def replace_by_outline(self, outline: Path, name: str) -> Path:
        """Its bytes are object `name` of the store, its outline is a file. Returns the path of what
        is to be removed."""
        self.seal()
        self.spilled = name
        self._index = SparseIndex()
        replaced, self.path = self.path, outline
        return replaced


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """Epochs `first` to `last` of a log, which are object `name` of the store, of `size` bytes."""

    name: str
    first: int
    last: int
    size: int


def adopt_file(directory: Path, shipped: ShippedFile) -> LogFile:
    """A file of another task's log, which is read as a spilled one. Raises OSError."""
    path = directory / f"{shipped.first:012d}.spilled"
    last = str(shipped.last).encode()
    _write_outline(path, shipped.name, shipped.size, last, adopted=True).replace(path)
    return _adopted(path, shipped)


def refuse_shipped(directory: Path) -> None:
    """Adopt no files for the log in this directory any more, in this pod. Raises OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    _refusal_of(directory).touch()


def refuses_shipped(directory: Path) -> bool:
    return _refusal_of(directory).exists()


def _refusal_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.own")


def _adopted(path: Path, shipped: ShippedFile) -> LogFile:
    file = LogFile(path, shipped.first, shipped.name, adopted=True)
    file.tail = Tail(shipped.last + 1, shipped.size)
    return file


def _write_outline(
    path: Path, name: str, size: int, content: bytes, *, adopted: bool = False
) -> Path:
    """Write an outline beside `path`. Returns its temporary name."""
    header: dict[str, Any] = {
        "format": SPILLED_FORMAT,
        "name": name,
        "size": size,
        "sum": _outline_checksum(name, size, content),
    }
    if adopted:
        header["adopted"] = True
    temp = path.with_suffix(".tmp")
    try:
        temp.write_bytes(json.dumps(header).encode() + b"\n" + content)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
    return temp


def _write(file: int, data: bytes | pa.Buffer, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def new_log_file(directory: Path, epoch: int) -> LogFile:
    """An empty file that will begin with `epoch`."""
    path = directory / f"{epoch:012d}.log"
    path.unlink(missing_ok=True)
    return LogFile(path, epoch)


@dataclass(frozen=True, slots=True)
class LoadedFiles:
    """`files`: in order and without a gap. `cut`: the damage after them, if any. `dropped`: damage
    before them, which cost only what no consumer needs."""

    files: Sequence[LogFile]
    cut: str | None
    dropped: Sequence[str]


def write_floor(directory: Path, floor: int) -> None:
    """No consumer needs epochs at or below it. Raises OSError."""
    text = f"{floor:020d}"
    line = f"{text} {zlib.crc32(text.encode()):08x}\n"
    file = os.open(directory / FLOOR_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _write(file, line.encode(), 0)  # in place: also on a full disk
    finally:
        os.close(file)


def read_floor(directory: Path) -> int:
    """The floor of the process before; NO_EPOCH if it is unknown."""
    try:
        text, _, checksum = (directory / FLOOR_FILE).read_text(errors="replace").partition(" ")
    except FileNotFoundError:
        return NO_EPOCH
    is_sound = checksum == f"{zlib.crc32(text.encode()):08x}\n"
    return int(text) if is_sound else NO_EPOCH


def forget_floor(directory: Path) -> None:
    (directory / FLOOR_FILE).unlink(missing_ok=True)


def load_log_files(directory: Path, *, with_spilled: bool, floor: int = NO_EPOCH) -> LoadedFiles:
    """The files of an earlier process. Damage above `floor` cuts the log there: files after it are
    removed. Where all that is lost is at or below it, what is before it is removed instead.
    `with_spilled`: whether there is a store to read spilled files from."""
    for path in sorted(directory.iterdir()):
        incomplete = path.suffix == ".spilled" and path.with_suffix(".log").exists()
        if incomplete or path.suffix == ".tmp":  # killed while it spilled; the log file is complete
            path.unlink()
    files: list[LogFile] = []
    cut: str | None = None
    dropped: list[str] = []
    paths = sorted(p for p in directory.iterdir() if p.suffix in (".log", ".spilled"))
    for path in paths:
        file, damage = _load(path, with_spilled)
        if file is None and damage is None and path is not paths[-1]:
            damage = f"{path} is empty"  # only the newest may be: killed before it wrote to it
        rest = None if damage is None else _write_rest(path, floor)
        if file is not None and files and cut is None and file.first != files[-1].last + 1:
            cut = f"{path} does not follow the file before it"
        if file is not None and cut is not None and file.first <= floor + 1:
            _remove(files, but=path)
            dropped.append(cut)
            files, cut = [], None
        if file is None or cut is not None:
            path.unlink()
        else:
            files.append(file)
            if damage is not None:
                os.truncate(path, file.size)
        cut = cut or damage
        if rest is not None and cut is not None:
            _remove(files, but=rest.path)
            dropped.append(cut)
            files, cut = [rest], None
    return LoadedFiles(files, cut, dropped)


def held_epochs(directory: Path) -> tuple[int, int] | None:
    """First and last epoch of the files of an earlier process, by their names and the newest one.
    Whether the others are sound shows when they are loaded. Changes nothing."""
    paths = sorted(directory.glob("*.log")) + sorted(directory.glob("*.spilled"))
    paths.sort(key=lambda path: path.stem)
    while paths:
        newest, _ = _load(paths[-1], with_spilled=True)
        if newest is not None:
            return int(paths[0].stem), newest.last
        paths.pop()
    return None


def _remove(files: Iterable[LogFile], but: Path) -> None:
    for file in files:
        if file.path != but:
            file.path.unlink()


def _write_rest(path: Path, floor: int) -> LogFile | None:
    """A file with the epochs behind the last damage of this one; None if it has none, or if epochs
    above the floor are lost, or there is no room for it."""
    if path.suffix != ".log" or floor == NO_EPOCH:
        return None
    data = path.read_bytes()
    rest = _sound_end(memoryview(data))
    if rest is None or rest.epoch > floor + 1:
        return None
    temp = path.with_suffix(".tmp")
    try:
        temp.write_bytes(data[rest.start :])
    except OSError:
        temp.unlink(missing_ok=True)
        return None
    return _load(temp.replace(path.with_name(f"{rest.epoch:012d}.log")), with_spilled=False)[0]


def _sound_end(data: memoryview) -> Record | None:
    """The first of the sound records at the end of a file."""
    first: Record | None = None
    with contextlib.suppress(DamagedRecord):
        for record in records.backward(data):
            _require_stable(record)
            if first is not None and record.next_epoch != first.epoch:
                break
            first = record
    return first


def _load(path: Path, with_spilled: bool) -> tuple[LogFile | None, str | None]:
    """The file up to its damage, unless it has no epochs, and the damage."""
    if path.suffix == ".spilled":
        if not with_spilled:
            return None, f"{path} was spilled, and no store is configured"
        try:
            return _load_spilled(path), None
        except DamagedRecord as damage:
            return None, f"{damage} of {path}"
    if not path.stat().st_size:
        return None, None
    file: LogFile | None = None
    with (
        path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        try:
            for record in records.forward(view):
                _require_stable(record)
                file = file or LogFile(path, record.epoch)
                file.set_tail(file.tail.with_record(record), record)
        except DamagedRecord as damage:
            reason = f"{damage} of {path}"
        else:
            return file, None
    return file, reason


def _load_spilled(path: Path) -> LogFile:
    name, size, content, adopted = _read_spilled_file(path)
    if adopted:
        return _adopted(path, ShippedFile(name, int(path.stem), int(content), size))
    file: LogFile | None = None
    for record, _ in records.read_outline(memoryview(content)):
        _require_stable(record)
        file = file or LogFile(path, record.epoch, name)
        file.tail = Tail(record.next_epoch, size)
    if file is None:
        raise DamagedRecord("no record", 0)
    return file


def read_outline(path: Path) -> Iterator[tuple[Record, memoryview]]:
    """The records of a spilled file, and where the watermark changes within each empty one. Raises
    DamagedRecord, FileNotFoundError."""
    return records.read_outline(memoryview(_read_spilled_file(path)[2]))


def _read_spilled_file(path: Path) -> tuple[str, int, bytes, bool]:
    """Name and size of the object, the outline, and whether it is adopted. Raises
    DamagedRecord."""
    line, _, content = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(line)
        name, size, found = str(header["name"]), header.get("size"), header.get("format", 1)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedRecord(f"no outline of a spilled file ({error!r})", 0) from None
    if found != SPILLED_FORMAT:
        reason = f"an outline of format {found}; this release reads {SPILLED_FORMAT}"
        raise DamagedRecord(reason, 0)
    if not isinstance(size, int) or header.get("sum") != _outline_checksum(name, size, content):
        raise DamagedRecord("an outline with a wrong checksum", 0)
    return name, size, content, bool(header.get("adopted"))


def _outline_checksum(name: str, size: int, outline: bytes) -> int:
    return zlib.crc32(outline, zlib.crc32(f"{name}/{size}".encode()))


def _require_stable(record: Record) -> None:
    if record.kind is not RecordKind.STABLE or record.branch or not record.epochs:
        raise DamagedRecord(
            f"a record of kind {record.kind.name} and branch {record.branch}, which this release "
            f"does not keep",
            record.start,
        )
