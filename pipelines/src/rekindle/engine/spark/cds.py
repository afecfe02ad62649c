"""AppCDS: the JVM's classes, parsed and verified once at image build.

An archive, created by `rekindle.engine.spark.training`, can only be used by the same JVM, flags and
class path. Beside it are a key file with a hash of these, because the JVM would silently ignore an
archive that does not match, and unsigned copies of signed jars.

Design: docs/design/engine.md#jvm.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rekindle.engine.spark.jvm import JvmSpec
from rekindle.engine.spark.signed_jars import copy_unsigned, is_signed

log = logging.getLogger(__name__)

_COMPRESSED_BELOW_BYTES = 31 << 30
"""Heaps above about 32 GB have no compressed object pointers and need another archive."""


def key_of(spec: JvmSpec) -> str:
    """Hash of what a JVM compares with an archive: the JVM itself, its flags, and its jars by name,
    size and time.

    The sizes of heap and buffers, which depend on a pod's memory, are not in it: one archive is
    used for all heaps whose object pointers have the same width.
    """
    flags = [flag for flag in spec.flags if flag not in spec.size_flags]
    width = (
        "wide pointers"
        if _heap_bytes(spec.heap) >= _COMPRESSED_BELOW_BYTES
        else "compressed pointers"
    )
    parts = [_stamp(spec.java), _stamp(_libjvm(spec.java)), *flags, width, *map(_stamp, spec.jars)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _heap_bytes(text: str) -> int:
    """Parse -Xmx as the JVM does: a number, and k, m, g or t."""
    shift = {"k": 10, "m": 20, "g": 30, "t": 40}.get(text[-1:].lower())
    return int(text) if shift is None else int(text[:-1]) << shift


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path} {stat.st_size} {int(stat.st_mtime)}"


def _libjvm(java: Path) -> Path:
    library = java.parent.parent / "lib" / "server" / "libjvm.so"
    return library if library.exists() else java


def key_file(archive: Path) -> Path:
    return archive.with_name(archive.name + ".key")


def with_archive(spec: JvmSpec, archive: Path | None) -> JvmSpec:
    """`spec` with flags to use `archive`; unchanged, with a warning, if that is impossible."""
    if archive is None:
        return spec
    try:
        key = json.loads(key_file(archive).read_text())
        found = _with_copies(spec, archive, key["unsigned"])
        matches = key["key"] == key_of(spec) and all(p.exists() for p in (archive, *found.jars))
    except (OSError, ValueError, KeyError, TypeError):
        matches = False
    if matches:
        sharing = (f"-XX:SharedArchiveFile={archive}", "-Xshare:auto")
        return replace(found, archive_flags=sharing)
    log.warning(
        "AppCDS archive %s is missing or was made for another JVM, flags or class path; "
        "Spark starts slower. Create it with: python -m rekindle.engine.spark.training %s",
        archive,
        archive,
    )
    return spec


def with_unsigned_jars(spec: JvmSpec, archive: Path) -> JvmSpec:
    """`spec` with a class path that can be archived completely: signed jars are copied unsigned,
    beside `archive`."""
    signed = [jar for jar in spec.jars if is_signed(jar)]
    directory = unsigned_jars_directory(archive)
    directory.mkdir(parents=True, exist_ok=True)
    for jar in signed:
        (directory / jar.name).unlink(missing_ok=True)  # a running JVM keeps the old file
        copy_unsigned(jar, directory / jar.name)
    return _with_copies(spec, archive, [jar.name for jar in signed])


def write_key(spec: JvmSpec, prepared: JvmSpec, archive: Path) -> None:
    """The last step: `archive`, created by a JVM of `prepared`, can now be used by `spec`."""
    unsigned = [jar.name for jar in prepared.jars if jar not in spec.jars]
    key_file(archive).write_text(json.dumps({"key": key_of(spec), "unsigned": unsigned}))


def unsigned_jars_directory(archive: Path) -> Path:
    """The directory of the unsigned copies of signed jars."""
    return archive.with_name(archive.name + ".jars")


def training_directory(archive: Path) -> Path:
    """The directory in which a training run writes the archive, and its temporary files."""
    return archive.with_name(archive.name + ".training")


def _with_copies(spec: JvmSpec, archive: Path, names: Iterable[str]) -> JvmSpec:
    copied = set(names)
    directory = unsigned_jars_directory(archive)
    jars = (directory / jar.name if jar.name in copied else jar for jar in spec.jars)
    return replace(spec, jars=tuple(jars))
