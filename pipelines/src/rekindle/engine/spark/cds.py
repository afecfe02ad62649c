"""AppCDS: the JVM's classes, parsed and verified once at image build (recipes: 8.0 s -> 3.8 s).

An archive, which `rekindle.engine.spark.training` makes, serves the same JVM, flags and class path
only; beside it stands a key of these, because the JVM itself would ignore an archive that does not
fit without a word.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from rekindle.engine.spark.jvm import JvmSpec

log = logging.getLogger(__name__)


def key_of(spec: JvmSpec) -> str:
    """Hash of what the JVM compares: itself, its flags, and its jars by name, size and time."""
    parts = [_stamp(spec.java), _stamp(_libjvm(spec.java)), *spec.flags, *map(_stamp, spec.jars)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path} {stat.st_size} {int(stat.st_mtime)}"


def _libjvm(java: Path) -> Path:
    library = java.parent.parent / "lib" / "server" / "libjvm.so"
    return library if library.exists() else java


def key_file(archive: Path) -> Path:
    return archive.with_name(archive.name + ".key")


def flags_for(spec: JvmSpec, archive: Path | None) -> tuple[str, ...]:
    """JVM flags that use `archive`, or none, with a warning that says why."""
    if archive is None:
        return ()
    try:
        key = json.loads(key_file(archive).read_text())["key"]
        fits = archive.exists() and key == key_of(spec)
    except (OSError, ValueError, KeyError):
        fits = False
    if fits:
        return (f"-XX:SharedArchiveFile={archive}", "-Xshare:auto")
    log.warning(
        "AppCDS archive %s is missing or was made for another JVM, flags or class path; "
        "Spark starts slower. Make it with: python -m rekindle.engine.spark.training %s",
        archive,
        archive,
    )
    return ()


def write_key(spec: JvmSpec, archive: Path) -> None:
    key_file(archive).write_text(json.dumps({"key": key_of(spec)}))
