"""Identity of the input of a `files` source: its files in order, with sizes and content hashes.

A replay must read the same input. So the first task that opens a source records the identity of its
input in the checkpoint store; a task that opens it later (a replica, or after a restart) compares.
Modification times are left out: a file that is restored from a copy is the same file.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.errors import SourceFailed
from rekindle.objects import to_json

_FORMAT = 1
_READ_BYTES = 4 << 20
_ETAG_KEYS = ("ETag", "etag")


@dataclass(frozen=True, slots=True)
class InputFile:
    """`digest`: hash of the bytes, or the ETag of an object store."""

    path: str
    bytes: int
    digest: str


def identify(fs: Any, paths: Iterable[str], source: str) -> tuple[InputFile, ...]:
    """The files at these paths, in this order. Raises SourceFailed."""
    try:
        return tuple(_identify(fs, path) for path in paths)
    except Exception as e:  # errors of botocore and aiohttp are not OSErrors
        raise SourceFailed(f"source {source}: its files cannot be read: {e}") from e


def _identify(fs: Any, path: str) -> InputFile:
    info = fs.info(path)
    tag = next((info[key] for key in _ETAG_KEYS if info.get(key)), None)
    if tag is not None:
        return InputFile(path, int(info["size"]), f"etag:{tag}")
    digest, size = hashlib.blake2b(digest_size=16), 0
    with fs.open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return InputFile(path, size, f"blake2b:{digest.hexdigest()}")


def encode_input_files(files: Sequence[InputFile]) -> bytes:
    return to_json({"format": _FORMAT, "files": [asdict(file) for file in files]})


def decode_input_files(data: bytes) -> tuple[InputFile, ...]:
    """The inverse of `encode_input_files`. Raises ValueError if `data` is not a record of input
    files, or has a newer format."""
    try:
        record = json.loads(data)
        if record["format"] > _FORMAT:
            raise ValueError(f"format {record['format']}; this release reads {_FORMAT}")
        return tuple(InputFile(f["path"], int(f["bytes"]), f["digest"]) for f in record["files"])
    except (KeyError, TypeError) as e:
        raise ValueError(f"{data[:80]!r} is not a record of input files") from e


def difference(recorded: Sequence[InputFile], found: Sequence[InputFile]) -> str | None:
    """How the input differs, described for the first file that differs; None if it is the same."""
    before, now = {f.path: f for f in recorded}, {f.path: f for f in found}
    for path in sorted(before.keys() | now.keys()):
        old, new = before.get(path), now.get(path)
        if old == new:
            continue
        if old is None:
            return f"{path} was added"
        if new is None:
            return f"{path} is missing"
        if old.bytes != new.bytes:
            return f"{path} has {new.bytes} bytes instead of {old.bytes}"
        return f"{path} has different content of the same size"
    if [f.path for f in recorded] != [f.path for f in found]:
        return "its files are read in a different order"
    return None
