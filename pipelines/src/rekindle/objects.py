"""Objects that are created once and never replaced, on a local disk or an object store.

Sinks and the checkpoint store are built on one primitive, put-if-absent: the first writer wins, and
a reader sees all of an object or nothing, as FlameStream requires of a consumer. Does not know
epochs, manifests or tables.

The root contains a marker, a small object that is written when the root is first opened. On a local
disk it is read before every put: if the root was moved away, or its volume is no longer mounted,
writes fail instead of silently filling a second, empty root.

Design: docs/design/fencing.md#objects, docs/design/exactly-once.md#sinks.
Paper: FlameStream (Trofimov et al. 2019), section V-A2.
"""

from __future__ import annotations

import datetime as dt
import errno
import inspect
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import fsspec

from rekindle.errors import RekindleError

T = TypeVar("T")

TEMP_SUFFIX = ".tmp"
TEMP_DIRECTORY = ".tmp"
"""The directory of temporary files, in the root or in the first directory of an object's name."""
MAX_LOOK_UPS = 4096
"""Maximum number of names that are looked up one by one on a local disk; then the directory is
listed."""
_FIRST_BLOCK = 1000
"""How many numbers the first listing covers: S3 returns that many objects for one request."""
STALE_TEMP_S = 600.0
"""Age from which a temporary file is deleted: its writer has failed."""
CREATE_IF_ABSENT_PROTOCOLS = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols whose fsspec file systems support an atomic create-if-absent."""


class StoreRootMissing(OSError):
    """The root of an opened store or sink is gone or was replaced."""


class ConditionIgnored(RekindleError):
    """An object store replaced an existing object although the request forbade it."""


_PERMANENT = (
    FileExistsError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    StoreRootMissing,
)
"""Errors that are not retried."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`modified` is in seconds since 1970 by the store's own clock."""

    name: str
    bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Bounded exponential back-off for transient errors."""

    attempts: int = 4
    first_s: float = 0.05
    factor: float = 4.0
    sleep: Callable[[float], None] = time.sleep

    def run(self, action: Callable[[], T]) -> T:
        delay = self.first_s
        for attempt in range(self.attempts):
            try:
                return action()
            except _PERMANENT:
                raise
            except (OSError, TimeoutError):
                if attempt == self.attempts - 1:
                    raise
            self.sleep(delay)
            delay *= self.factor
        raise AssertionError("unreachable: the last attempt returns or raises")


class Objects(Protocol):
    """A flat space of named objects below a URL. Names use `/`; none starts with a dot."""

    url: str

    def open_root(self, marker: str, data: bytes | None) -> bytes:
        """The content of the root's marker, an object of this name. If there is none, the root is
        created with `data` as its marker; without `data` that raises StoreRootMissing. Raises
        ConditionIgnored if the store does not create conditionally."""
        ...

    def put(self, name: str, data: bytes) -> bool:
        """Create `name`; False if it exists. Raises StoreRootMissing, OSError."""
        ...

    def get(self, name: str) -> bytes: ...
    def exists(self, name: str) -> bool: ...
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Objects whose name starts with `prefix`, sorted by name."""
        ...

    def newest_number(self, stem: str, suffix: str, after: int, through: int) -> int | None:
        """The highest number above `after`, and not above `through`, for which there is an object
        with the name `numbered_name(stem, number, suffix)`. Searches downward: the cost depends on
        the distance between `through` and the result."""
        ...

    def delete(self, name: str) -> None:
        """Delete `name`; does nothing if it is absent."""
        ...


def numbered_name(stem: str, number: int, suffix: str) -> str:
    """A name with leading zeros, so that names sort by number."""
    return f"{stem}{number:012d}{suffix}"


def open_objects(url: str, **storage_options: Any) -> Objects:
    """The objects below an fsspec URL. Raises ValueError if it cannot create conditionally."""
    protocol, path = split_url(url)
    if protocol == "file":
        return LocalObjects(url, Path(path))
    return RemoteObjects(url, protocol, **storage_options)


def split_url(url: str) -> tuple[str, str]:
    """Protocol and path of a URL; a plain path is a local one."""
    if "://" not in url:
        return "file", str(Path(url).absolute())
    protocol, _, path = url.partition("://")
    return ("file" if protocol == "local" else protocol), path


def _read_marker(objects: Objects, marker: str) -> bytes:
    try:
        return objects.get(marker)
    except FileNotFoundError as e:
        raise StoreRootMissing(
            errno.ENOENT, f"{objects.url} does not exist (there is no {marker} in it)"
        ) from e


class LocalObjects:
    """Objects as files: written under a temporary name, flushed to disk, then linked (POSIX `link`
    does not replace). Temporary files have a random name in a hidden directory, and are removed
    when 10 minutes old; a slow writer whose temporary file was removed writes it again."""

    def __init__(self, url: str, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.url = url
        self.root = root
        self._clock = clock
        self._marker: tuple[str, bytes] | None = None

    def open_root(self, marker: str, data: bytes | None) -> bytes:
        if data is not None:
            self.root.mkdir(parents=True, exist_ok=True)
            if not self.exists(marker):
                self._create(marker, data)
        self._marker = (marker, _read_marker(self, marker))
        return self._marker[1]

    def put(self, name: str, data: bytes) -> bool:
        self._check_root()
        if (self.root / name).exists():
            return False
        return self._create(name, data)

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._check_root()
        found = (self._info(name) for name in self._names(prefix))
        return sorted((info for info in found if info is not None), key=lambda info: info.name)

    def newest_number(self, stem: str, suffix: str, after: int, through: int) -> int | None:
        self._check_root()
        lowest = max(after, through - MAX_LOOK_UPS)
        for number in range(through, lowest, -1):
            if self.exists(numbered_name(stem, number, suffix)):
                return number
        if lowest == after:
            return None
        found = (_number(name, stem, suffix) for name in self._names(stem))
        return max((n for n in found if n is not None and after < n <= lowest), default=None)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def remove_stale_temps(self, directory: str = "") -> int:
        """Delete the old temporary files that failed writers left in a directory of the root, or in
        the root itself. Returns how many."""
        limit = self._clock() - STALE_TEMP_S
        removed = 0
        for path in self._temps(self.root / directory):
            try:
                if path.stat().st_mtime < limit:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    def _temps(self, directory: Path) -> Iterator[Path]:
        """Earlier releases wrote temporary files beside the objects. Those are searched for once:
        as long as there is no directory for temporary files."""
        if (directory / TEMP_DIRECTORY).is_dir():
            return (directory / TEMP_DIRECTORY).glob(f".*{TEMP_SUFFIX}")
        found = list(directory.rglob(f".*{TEMP_SUFFIX}"))
        if directory.is_dir():
            (directory / TEMP_DIRECTORY).mkdir(exist_ok=True)
        return iter(found)

    def _check_root(self) -> None:
        if self._marker is None:
            return
        name, data = self._marker
        try:
            found = (self.root / name).read_bytes()
        except OSError as e:
            raise StoreRootMissing(
                errno.ENOENT, f"{self.url} is gone (its marker {name} cannot be read: {e.strerror})"
            ) from e
        if found != data:
            raise StoreRootMissing(
                errno.ESTALE, f"{self.url} was replaced: its marker {name} differs"
            )

    def _create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        temps = (self.root / name.partition("/")[0] if "/" in name else self.root) / TEMP_DIRECTORY
        while True:
            _make_below(self.root, path.parent)
            _make_below(self.root, temps)
            temp = temps / f".{path.name[:120]}.{uuid.uuid4().hex}{TEMP_SUFFIX}"
            try:
                _write_durably(temp, data)
                os.link(temp, path)
                _flush_directory(path.parent)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                if not self.root.is_dir():
                    raise
            except OSError as e:
                if e.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise OSError(
                        e.errno,
                        f"the file system of {self.url} has no hard links, without which a file "
                        "cannot be created atomically; use another volume or s3://",
                    ) from e
                raise
            finally:
                temp.unlink(missing_ok=True)

    def _names(self, prefix: str) -> Iterator[str]:
        """Names that start with `prefix`; directories that cannot have any are not read."""
        folder, slash, start = prefix.rpartition("/")
        try:
            entries = os.scandir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.startswith(start):
                    continue
                name = f"{folder}{slash}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield from self._names(f"{name}/")
                else:
                    yield name

    def _info(self, name: str) -> ObjectInfo | None:
        try:
            stat = (self.root / name).stat()
        except FileNotFoundError:
            return None
        return ObjectInfo(name, stat.st_size, stat.st_mtime)


def _number(name: str, stem: str, suffix: str) -> int | None:
    digits = name.removeprefix(stem).removesuffix(suffix)
    is_numbered = digits.isdecimal() and name == numbered_name(stem, int(digits), suffix)
    return int(digits) if is_numbered else None


def _make_below(root: Path, directory: Path) -> None:
    """mkdir -p that never creates the root itself."""
    missing = []
    while directory != root and not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)


def _write_durably(path: Path, data: bytes) -> None:
    """Write and fsync a file before it is linked, because after that it is never written again."""
    with path.open("xb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _flush_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RemoteObjects:
    """Objects of an object store, by fsspec's `pipe_file(mode="create")`: S3's `If-None-Match: *`,
    GCS's `ifGenerationMatch=0`, Azure's `overwrite=False`."""

    def __init__(self, url: str, protocol: str, **storage_options: Any) -> None:
        if protocol not in CREATE_IF_ABSENT_PROTOCOLS:
            others = ", ".join(sorted(p + "://" for p in CREATE_IF_ABSENT_PROTOCOLS))
            raise ValueError(
                f"{protocol}:// cannot create an object only if it is absent; "
                f"use file:// or one of {others}"
            )
        self.url = url.rstrip("/")
        self._fs, root = fsspec.core.url_to_fs(self.url, **storage_options)
        self._root = str(root).rstrip("/")
        pipe = getattr(self._fs, "_pipe_file", self._fs.pipe_file)
        if "mode" not in inspect.signature(pipe).parameters:
            raise ValueError(
                f"the installed fsspec file system for {protocol}:// is too old to create an "
                "object only if it is absent; upgrade it (s3fs: 2025.7 or newer)"
            )
        find = getattr(self._fs, "_find", self._fs.find)
        self._find_takes_prefix = "prefix" in inspect.signature(find).parameters

    def open_root(self, marker: str, data: bytes | None) -> bytes:
        """Tries to create the existing marker again, with the same content: if that succeeds, the
        store ignores the condition."""
        self._fs.invalidate_cache()
        try:
            found = self.get(marker)
        except FileNotFoundError:
            if data is not None:
                self._create(marker, data)
            found = _read_marker(self, marker)
        if self._create(marker, found):
            raise ConditionIgnored(
                f"{self.url} does not create objects only if they are absent: it replaced "
                f"{marker}, so that results could be lost or written twice; use a store, or a "
                "release of it, that honours If-None-Match: *"
            )
        return found

    def put(self, name: str, data: bytes) -> bool:
        return self._create(name, data)

    def get(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name)))

    def exists(self, name: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path(name)))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._fs.invalidate_cache()
        folder, _, start = prefix.rpartition("/")
        prefix_argument = {"prefix": start} if start and self._find_takes_prefix else {}
        try:
            found = self._fs.find(self._path(folder), detail=True, **prefix_argument)
        except FileNotFoundError:
            return []
        infos = (self._info(path, detail) for path, detail in found.items())
        return sorted(
            (info for info in infos if info.name.startswith(prefix)), key=lambda info: info.name
        )

    def newest_number(self, stem: str, suffix: str, after: int, through: int) -> int | None:
        """Lists blocks of numbers that have a prefix of digits in common. The block size grows with
        the distance searched without a result, so the number of listings is logarithmic in it."""
        size, end = _FIRST_BLOCK, through
        while end > after:
            first = max(end - end % size, after + 1)
            digits_in_block = len(str(size)) - 1
            listed = self.list(numbered_name(stem, end, "")[:-digits_in_block])
            found = (_number(info.name, stem, suffix) for info in listed)
            newest = max((n for n in found if n is not None and first <= n <= end), default=None)
            if newest is not None:
                return newest
            end = first - 1
            if (end + 1) % (10 * size) == 0 and through - end >= 10 * size:
                size *= 10
        return None

    def delete(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as e:
            if _precondition_failed(e):
                return False
            raise
        return True

    def _info(self, path: str, detail: dict[str, Any]) -> ObjectInfo:
        name = str(self._fs._strip_protocol(path))[len(self._root) + 1 :]
        stamp = next(
            (
                detail[k]
                for k in ("mtime", "LastModified", "updated", "last_modified", "created")
                if detail.get(k) is not None
            ),
            None,
        )
        return ObjectInfo(name, int(detail.get("size") or 0), _seconds(stamp))


def _precondition_failed(error: OSError) -> bool:
    response = getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    return code in ("PreconditionFailed", "412")


def _seconds(stamp: Any) -> float:
    """A modification time in seconds. An unknown one is taken as now, so that the object does not
    look old enough to be deleted."""
    match stamp:
        case dt.datetime():
            return stamp.timestamp()
        case int() | float():
            return float(stamp)
        case str():
            return dt.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
        case _:
            return time.time()


def to_json(value: Any) -> bytes:
    """Canonical JSON: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
