"""Copies of signed jars without their signatures.

A JVM archives no class of a signed jar, and digests each such class whenever it loads it. Spark
brings Janino signed, the compiler of its generated code: 400 classes in a task's first epoch.
Nothing here trusts the signature: the packages were checked when they were installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

_MANIFEST = "META-INF/MANIFEST.MF"
_SIGNATURE = re.compile(r"META-INF/[^/]+\.(SF|RSA|DSA|EC)", re.IGNORECASE)


def is_signed(jar: Path) -> bool:
    with ZipFile(jar) as archive:
        return any(_SIGNATURE.fullmatch(name) for name in archive.namelist())


def copy_unsigned(jar: Path, copy: Path) -> None:
    """Write `copy` with all entries of `jar` but its signature and the digests in its manifest."""
    with ZipFile(jar) as source, ZipFile(copy, "w", ZIP_DEFLATED) as target:
        for entry in source.infolist():
            if _SIGNATURE.fullmatch(entry.filename):
                continue
            content = source.read(entry)
            if entry.filename == _MANIFEST:
                content = _main_section(content)
            target.writestr(entry, content)


def _main_section(manifest: bytes) -> bytes:
    """A manifest's attributes of the jar as a whole: those of single entries, which follow the
    first empty line, are their digests."""
    return re.split(rb"\r?\n\r?\n", manifest, maxsplit=1)[0] + b"\r\n\r\n"
