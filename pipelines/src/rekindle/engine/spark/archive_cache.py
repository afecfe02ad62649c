"""AppCDS archives in a directory: one for each JVM, its flags and its jars, made when wanted.

`python -m rekindle.engine.spark.archive_cache DIR` prints the path of the archive that fits, and
makes it first if there is none (about 30 s). Images have one archive, made when they are built.

Design: docs/design/engine.md#jvm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rekindle.engine.failure import EngineLost
from rekindle.engine.spark import session
from rekindle.engine.spark.cds import copies_of, key_file, key_of
from rekindle.engine.spark.jvm import JvmSpec

DIRECTORY = "appcds"
"""Of the archives, in a cache."""
_UNUSED_S = 30 * 86400
"""After which an archive (150 MB) of another JVM, other flags or other jars is removed."""


def cached_archive(directory: Path, spec: JvmSpec) -> Path | None:
    """The archive for `spec`; None if it has not been made, or none can be made."""
    try:
        archive = _path(directory, spec)
    except (OSError, ValueError):  # a class path with wildcards, say, or a size that is none
        return None
    if not _is_complete(archive):
        return None
    with suppress(OSError):  # another user's
        os.utime(key_file(archive))  # says that it is used
    return archive


def ensure_archive(directory: Path) -> Path:
    """The archive for this environment's JVM; makes it in a process of its own if there is none.
    Raises EngineLost with the end of that process's output."""
    spec = session.jvm_spec()
    archive = _path(directory, spec)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(archive.with_suffix(".lock")):
        if found := cached_archive(directory, spec):
            return found
        key_file(archive).unlink(missing_ok=True)
        command = [sys.executable, "-m", "rekindle.engine.spark.training", str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineLost(f"no AppCDS archive could be made:\n{done.stderr[-2000:]}")
    remove_unused(directory, time.time())
    return archive


def remove_unused(directory: Path, now: float) -> None:
    """Archives that nobody has used for a month."""
    for key in directory.glob("spark-*.jsa.key"):
        if now - key.stat().st_mtime < _UNUSED_S:
            continue
        archive = key.with_suffix("")
        key.unlink(missing_ok=True)  # first: without it the archive counts as not there
        archive.unlink(missing_ok=True)
        archive.with_suffix(".lock").unlink(missing_ok=True)
        shutil.rmtree(copies_of(archive), ignore_errors=True)


def _path(directory: Path, spec: JvmSpec) -> Path:
    return directory / f"spark-{key_of(spec)[:16]}.jsa"


def _is_complete(archive: Path) -> bool:
    """The key is written last: an archive without one is what an interrupted training left."""
    return archive.exists() and key_file(archive).exists()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    print(ensure_archive(Path(sys.argv[1]).absolute()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
