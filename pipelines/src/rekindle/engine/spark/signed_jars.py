"""Copies of signed jars without their signatures.

A JVM does not archive classes of signed jars, and computes the digest of each one that it loads.
Spark's jar of Janino, the compiler of its generated code, is signed: 400 classes in a task's first
epoch. The signature is not needed: packages are verified when they are installed.
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
    """Write `copy` with all entries of `jar` except its signature and the digests in its
    manifest."""
    with ZipFile(jar) as source, ZipFile(copy, "w", ZIP_DEFLATED) as target:
        for entry in source.infolist():
            if _SIGNATURE.fullmatch(entry.filename):
                continue
            content = source.read(entry)
            if entry.filename == _MANIFEST:
                content = _main_section(content)
            target.writestr(entry, content)


def _main_section(manifest: bytes) -> bytes:
    """The main attributes of a jar manifest. Sections of single entries, which follow the first
    empty line, contain their digests."""
    return re.split(rb"\r?\n\r?\n", manifest, maxsplit=1)[0] + b"\r\n\r\n"
