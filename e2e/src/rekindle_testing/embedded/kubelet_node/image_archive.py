"""An image of a static program, as a docker-archive, made without engine and registry. Pure."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence

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
    """A docker-archive; `files` are executable, their paths without a leading slash, as those of
    `links` (to what they point to) and of `directories` (writable for everyone)."""
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
