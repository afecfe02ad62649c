"""A cache directory for build results; entries are created atomically.

Knows nothing about their content.  Entries are named by the hash of what they are
built from, so they are never outdated; deleting the cache is always safe while nothing uses it.
Entries that are large are acquired by their users, and `prune` deletes the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rekindle_testing.progress import OnProgress


def content_key(parts: Iterable[tuple[str, bytes]]) -> str:
    """A short hash of named contents. Lengths are part of it, so that different splits into
    name and content have different keys; the order of the parts does not matter."""
    digest = hashlib.sha256()
    for name, content in sorted(parts):
        for piece in (name.encode(), content):
            digest.update(len(piece).to_bytes(8, "big"))
            digest.update(piece)
    return digest.hexdigest()[:16]


def make_once(entry: Path, make: Callable[[Path], None], on_progress: OnProgress) -> Path:
    """Return the entry, calling `make` on a fresh directory if it is missing.

    Safe against other processes doing the same, and against being killed:
    the entry appears by a rename, when it is complete.
    """
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(_build_lock(entry), on_progress):
        if entry.is_dir():
            return entry
        for left in entry.parent.glob(f".{entry.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        try:
            make(scratch)
            scratch.chmod(0o755)
            scratch.rename(entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return entry


class AcquiredEntry:
    """An entry that `prune` does not delete until `release`, or until this process ends."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._file = file

    def release(self) -> None:
        self._file.close()


def acquire(entry: Path, make: Callable[[Path], None], on_progress: OnProgress) -> AcquiredEntry:
    """`make_once`, under a shared lock until it is released."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    # Locked before the entry is looked for: another process may be about to delete it.
    file = _use_lock(entry).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(file.fileno())
        return AcquiredEntry(make_once(entry, make, on_progress), file)
    except BaseException:
        file.close()
        raise


def prune(directory: Path, keep: int) -> None:
    """Delete the entries of a directory that `acquire` has made, except those that are acquired
    and the `keep` that were used last. Also delete incomplete entries, which processes have left
    that were killed while they made one."""
    uses = sorted(directory.glob("*.use"), key=lambda use: use.stat().st_mtime, reverse=True)
    entries = [entry for use in uses if (entry := use.with_suffix("")).is_dir()]
    for entry in entries[keep:]:
        with _try_lock(_use_lock(entry)) as locked:
            if locked:
                # Renamed first, which is atomic: a half deleted entry would look complete.
                entry.rename(entry.with_name(f".{entry.name}-deleted"))
    for left in directory.glob(".*-*"):
        name = left.name[1:].rpartition("-")[0]
        with _try_lock(_build_lock(directory / name)) as locked:
            if locked:
                shutil.rmtree(left, ignore_errors=True)


def _build_lock(entry: Path) -> Path:
    """The lock file of the process that makes an entry."""
    return entry.with_name(entry.name + ".lock")


def _use_lock(entry: Path) -> Path:
    """The lock file that the users of an entry share; its time is that of the last use."""
    return entry.with_name(entry.name + ".use")


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Whether the lock was free; then it is held in the block."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def _locked(path: Path, on_progress: OnProgress) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(f"waiting for another process that builds {path.stem}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
