"""A cache of AppCDS archives: one for each JVM, its flags and its jars, created on demand.

`python -m rekindle.engine.spark.archive_cache DIR` prints the path of the matching archive, and
creates it first if there is none (about 30 s). Images have one archive, created at build time.

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

from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.spark import session
from rekindle.engine.spark.cds import (
    key_file,
    key_of,
    training_directory,
    unsigned_jars_directory,
)
from rekindle.engine.spark.jvm import JvmSpec, ending_with_parent

ARCHIVE_DIRECTORY = "appcds"
"""Name of the archives' directory in a cache."""
_UNUSED_S = 30 * 86400
"""An archive (150 MB) that was not used for this time is removed."""


def cached_archive(directory: Path, spec: JvmSpec) -> Path | None:
    """The archive for `spec`; None if there is none."""
    try:
        archive = _path(directory, spec)
    except (OSError, ValueError):  # the class path has wildcards, or a size is invalid
        return None
    if not _is_complete(archive):
        return None
    with suppress(OSError):  # the file may belong to another user
        os.utime(key_file(archive))  # time of the last use
    return archive


def ensure_archive(directory: Path) -> Path:
    """The archive for this environment's JVM; creates it in a separate process if there is none.
    Raises EngineUnavailable with the end of that process's output."""
    spec = session.jvm_spec()
    archive = _path(directory, spec)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(archive.with_suffix(".lock")) as lock:
        if found := cached_archive(directory, spec):
            return found
        key_file(archive).unlink(missing_ok=True)
        command = [sys.executable, "-m", "rekindle.engine.spark.training", str(archive)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=(lock,),  # so the lock is held until this process and that one have ended
            preexec_fn=ending_with_parent(),
        )
        if done.returncode:
            *log, what = done.stderr.strip()[-2000:].splitlines() or ["no output"]
            message = f"the AppCDS archive could not be created: {what}"
            raise EngineUnavailable("\n".join([message, *log]))
    remove_unused(directory, time.time())
    return archive


def remove_unused(directory: Path, now: float) -> None:
    """Delete archives that were not used for a month."""
    for key in directory.glob("spark-*.jsa.key"):
        if now - key.stat().st_mtime < _UNUSED_S:
            continue
        archive = key.with_suffix("")
        with suppress(BlockingIOError), _locked(archive.with_suffix(".lock"), fcntl.LOCK_NB):
            key.unlink(missing_ok=True)  # first: without it the archive counts as absent
            archive.unlink(missing_ok=True)
            shutil.rmtree(unsigned_jars_directory(archive), ignore_errors=True)
            shutil.rmtree(training_directory(archive), ignore_errors=True)
            archive.with_suffix(".lock").unlink(missing_ok=True)


def _path(directory: Path, spec: JvmSpec) -> Path:
    return directory / f"spark-{key_of(spec)[:16]}.jsa"


def _is_complete(archive: Path) -> bool:
    """Whether the archive may be used. Its key is written last, so an archive without a key is from
    an interrupted training run."""
    return archive.exists() and key_file(archive).exists()


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[int]:
    """Hold the lock of this file, whose descriptor is returned. With LOCK_NB raises
    BlockingIOError if another process has it."""
    while True:
        with path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | flags)
            if not _is_open(path, lock.fileno()):
                continue  # the process that held the lock before has removed the file
            yield lock.fileno()
            return


def _is_open(path: Path, descriptor: int) -> bool:
    """Whether the path still names the file that is open as `descriptor`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def main() -> int:
    try:
        print(ensure_archive(Path(sys.argv[1]).absolute()))
    except EngineUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
