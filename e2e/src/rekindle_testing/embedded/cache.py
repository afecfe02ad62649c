"""A cache directory for build results; entries are created atomically.

Knows nothing about their content.  Entries are named by the hash of what they are
built from, so they are never outdated; deleting the cache is always safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

Report = Callable[[str], None]


def no_report(line: str) -> None:
    """A `Report` that prints nothing."""


def cache_root(environment: Mapping[str, str]) -> Path:
    """REKINDLE_CACHE, or rekindle/ in the user's cache directory."""
    if own := environment.get("REKINDLE_CACHE"):
        return Path(own).absolute()
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")) / ".cache"
    return Path(base).expanduser().absolute() / "rekindle"


def content_key(parts: Iterable[tuple[str, bytes]]) -> str:
    """A short hash of named contents. Lengths are part of it, so that different splits into
    name and content have different keys; the order of the parts does not matter."""
    digest = hashlib.sha256()
    for name, content in sorted(parts):
        for piece in (name.encode(), content):
            digest.update(len(piece).to_bytes(8, "big"))
            digest.update(piece)
    return digest.hexdigest()[:16]


def make_once(entry: Path, make: Callable[[Path], None], report: Report) -> Path:
    """Return the entry, calling `make` on a fresh directory if it is missing.

    Safe against other processes doing the same, and against being killed:
    the entry appears by a rename, when it is complete.
    """
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry.with_name(entry.name + ".lock"), report):
        if entry.is_dir():
            return entry
        scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        try:
            make(scratch)
            scratch.chmod(0o755)
            scratch.rename(entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return entry


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that builds {path.stem}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
