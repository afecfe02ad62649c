"""The images that are made here: the sandbox of every pod, and busybox for tests."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.directories import cache_root
from rekindle_testing.embedded.cache import content_key, make_once
from rekindle_testing.embedded.kubelet_node import packages
from rekindle_testing.embedded.kubelet_node.files import PAUSE_IMAGE
from rekindle_testing.embedded.kubelet_node.image_archive import archive
from rekindle_testing.progress import OnProgress, no_progress

BUSYBOX_IMAGE = "docker.io/rekindle/busybox:dev"

_BUSYBOX = "busybox-static"
_APPLETS = (
    *("cat", "date", "echo", "env", "grep", "hostname", "httpd", "ip", "ls", "mkdir", "nc", "ps"),
    *("rm", "seq", "sh", "sleep", "timeout", "touch", "true"),
)
"""Not wget: it looks up the name of a port, for which a static program lacks libraries."""


def pause_archive(program: Path) -> bytes:
    return archive(PAUSE_IMAGE, {"pause": program.read_bytes()}, ["/pause"])


def ensure_busybox(on_progress: OnProgress = no_progress) -> Path:
    """A docker-archive of BUSYBOX_IMAGE: a shell, a server, a client."""
    key = content_key([("applets", " ".join(_APPLETS).encode())])
    entry = cache_root(os.environ) / "images" / f"{_BUSYBOX}-{key}"
    directory = make_once(
        entry, lambda directory: _make_busybox(directory, on_progress), on_progress
    )
    return directory / "image.tar"


def _make_busybox(directory: Path, on_progress: OnProgress) -> None:
    on_progress(f"taking {_BUSYBOX} from Debian")
    files = directory / "files"
    files.mkdir()
    packages.download(_BUSYBOX, files)
    image = archive(
        BUSYBOX_IMAGE,
        {"bin/busybox": (files / "bin" / "busybox").read_bytes()},
        ["/bin/sh"],
        links={f"bin/{name}": "busybox" for name in _APPLETS},
        directories=["tmp"],
    )
    (directory / "image.tar").write_bytes(image)
