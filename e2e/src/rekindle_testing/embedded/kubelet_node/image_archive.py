"""Image archives: makes one with a static program, as a docker-archive, without a container engine
or a registry, and computes a fingerprint of the images in any archive. Pure."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from typing import BinaryIO

_INDEXES = ("manifest.json", "index.json")
"""Of a docker-archive and of an OCI layout."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(
    tag: str,
    files: Mapping[str, bytes],
    entry_point: Sequence[str],
    *,
    links: Mapping[str, str] | None = None,
    directories: Sequence[str] = (),
    machine: str | None = None,
) -> bytes:
    """A docker-archive. Paths have no leading slash. `files` are executable, `links` maps paths of
    symbolic links to their targets, `directories` are writable for everyone."""
    layer = _tar(files, links or {}, directories)
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(machine or platform.machine(), "amd64"),
            "os": "linux",
            "config": {"Entrypoint": list(entry_point), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
        }
    ).encode()
    name = f"{_digest(config)}.json"
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]
    contents = {"manifest.json": json.dumps(manifest).encode(), name: config, "layer.tar": layer}
    return _tar(contents, {}, ())


def fingerprint(file: BinaryIO) -> bytes:
    """What determines the images of an archive: their names, and their configurations or manifests,
    which have the digests of the layers. The layers themselves are not read. Raises ValueError if
    the file is no archive of images."""
    try:
        with tarfile.open(fileobj=file) as tar:
            members = {member.name: member for member in tar if member.isfile()}

            def read(name: str) -> bytes:
                content = tar.extractfile(members[name])
                assert content is not None
                return content.read()

            found = {name: read(name) for name in _INDEXES if name in members}
            for image in json.loads(found.get("manifest.json", b"[]")):
                found[image["Config"]] = read(image["Config"])
    except (tarfile.TarError, EOFError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"no archive of images ({type(error).__name__}: {error})") from error
    if not found:
        raise ValueError(f"no archive of images: it has none of {', '.join(_INDEXES)}")
    return json.dumps([[name, _digest(found[name])] for name in sorted(found)]).encode()


def _tar(files: Mapping[str, bytes], links: Mapping[str, str], directories: Sequence[str]) -> bytes:
    """The same bytes for the same contents."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in directories:
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        for path, target in links.items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return output.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
