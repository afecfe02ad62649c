"""Tests of the test platform run once for each version of what they test.

A module marked `platform` names the parts of `rekindle_testing` that it tests. A test of it that
has passed on this machine with the same files, the same dependencies and the same Python is
skipped; `--platform` runs it all the same, as `make nightly` does. What has passed is in the user's
cache, so it is known in every clone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from rekindle.directories import cache_root
from rekindle_testing.paths import ROOT

_SOURCES = ROOT / "e2e/src/rekindle_testing"
_EVERYWHERE = ("paths.py", "progress.py", "waiting.py")
_KEPT_S = 30 * 86_400.0  # a version that was not tested for so long is forgotten


def is_known(item: pytest.Item) -> bool:
    """Whether the test is of the platform, and has passed with these files."""
    at = _record(item)
    return at is not None and at.exists()


def remember(item: pytest.Item) -> None:
    """The test has passed; does nothing if it is not of the platform."""
    at = _record(item)
    if at is not None:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.touch()


def forget_old_versions(now: float) -> None:
    for at in _directory().glob("*/*"):
        if at.stat().st_mtime < now - _KEPT_S:
            at.unlink(missing_ok=True)


def _record(item: pytest.Item) -> Path | None:
    mark = item.get_closest_marker("platform")
    if mark is None:
        return None
    helpers = sorted(path for path in item.path.parent.glob("*.py") if not _is_test(path))
    files = [item.path, *helpers, *(ROOT / name for name in ("conftest.py", "requirements.lock"))]
    name = hashlib.sha256(item.nodeid.encode()).hexdigest()
    return _directory() / version((*mark.args, *_EVERYWHERE), tuple(files)) / name


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def _directory() -> Path:
    return cache_root(os.environ) / "passed"


@functools.cache
def version(parts: tuple[str, ...], files: tuple[Path, ...]) -> str:
    """A digest of the files, and of all that is in the parts."""
    found = hashlib.sha256(sys.version.encode())
    for path in sorted({*files, *_files_of(parts)}):
        found.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def _files_of(parts: Iterable[str]) -> list[Path]:
    found = list[Path]()
    for part in parts:
        at = _SOURCES / part
        if not at.exists():
            raise pytest.UsageError(f"platform({part!r}): {at.relative_to(ROOT)} does not exist")
        found += [at] if at.is_file() else [p for p in at.rglob("*") if _is_source(p)]
    return found


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts
