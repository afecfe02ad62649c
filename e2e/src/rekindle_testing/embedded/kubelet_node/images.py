"""The images that are made here: the sandbox of every pod, and busybox for tests."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle_testing.embedded.cache import Report, cache_root, content_key, make_once, no_report
from rekindle_testing.embedded.kubelet_node import packages
from rekindle_testing.embedded.kubelet_node.files import PAUSE_IMAGE
from rekindle_testing.embedded.kubelet_node.image_archive import archive

BUSYBOX_IMAGE = "docker.io/rekindle/busybox:dev"

_BUSYBOX = "busybox-static"
_APPLETS = (
    *("cat", "date", "echo", "env", "grep", "hostname", "httpd", "ip", "ls", "mkdir", "nc", "ps"),
    *("rm", "seq", "sh", "sleep", "timeout", "touch", "true"),
)
"""Not wget: it looks up the name of a port, for which a static program lacks libraries."""


def pause_archive(program: Path) -> bytes:
    return archive(PAUSE_IMAGE, {"pause": program.read_bytes()}, ["/pause"])


def ensure_busybox(report: Report = no_report) -> Path:
    """A docker-archive of BUSYBOX_IMAGE: a shell, a server, a client."""
    key = content_key([("applets", " ".join(_APPLETS).encode())])
    entry = cache_root(os.environ) / "images" / f"{_BUSYBOX}-{key}"
    made = make_once(entry, lambda directory: _make_busybox(directory, report), report)
    return made / "image.tar"


def _make_busybox(directory: Path, report: Report) -> None:
    report(f"taking {_BUSYBOX} from Debian")
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
