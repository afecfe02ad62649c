"""The base image: BASE, the Dockerfiles' own, or one made here if no registry can be reached."""

from __future__ import annotations

import os
import platform
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from rekindle_testing.embedded.cache import content_key, make_once
from rekindle_testing.images import programs
from rekindle_testing.images.engines import UNSHARE_COMMAND
from rekindle_testing.images.errors import ImageError
from rekindle_testing.paths import ROOT
from rekindle_testing.progress import OnProgress

DIRECTORY = ROOT / "images" / "base"
_NEEDED = {"debootstrap": "debootstrap", "unshare": "util-linux", "tar": "tar"}
"""Programs, and the Debian package of each."""
_DEBOOTSTRAP_TIMEOUT_S = 1800.0
_REGISTRY_TIMEOUT_S = 4.0


def choose(
    environment: Mapping[str, str],
    dockerfile: str,
    reached: Callable[[str], bool],
    make: Callable[[], str],
) -> str | None:
    """The argument BASE of a build: the one that is given, or made here; None if the
    Dockerfile's own can be pulled."""
    if base := environment.get("BASE"):
        return base
    return None if reached(registry(default_of(dockerfile))) else make()


def default_of(dockerfile: str) -> str:
    """The base that a Dockerfile names."""
    found = re.search(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    if found is None:
        raise ImageError("the Dockerfile has no line ARG BASE=...")
    return found[1]


def registry(image: str) -> str:
    """The host that serves an image."""
    host = image.partition("/")[0]
    return "registry-1.docker.io" if host == "docker.io" else host


def is_registry_reached(host: str) -> bool:
    """Whether the host responds as a registry does, and not, for example, as a proxy does."""
    try:
        with urllib.request.urlopen(f"https://{host}/v2/", timeout=_REGISTRY_TIMEOUT_S):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


def base_key() -> str:
    """A hash that names the base image made here; it depends on its scripts and the machine."""
    files = [(path.name, path.read_bytes()) for path in sorted(DIRECTORY.iterdir())]
    return content_key([*files, ("machine", platform.machine().encode())])


def ensure_root_file_system(cache: Path, on_progress: OnProgress, log: Path) -> Path:
    """The directory with root.tar, which is made if there is none."""
    entry = cache / "images" / f"base-{base_key()}"
    if entry.is_dir():
        return entry
    if os.geteuid() != 0:
        raise ImageError(
            "no registry is reached, and only root can make a base image instead: name one "
            "that the engine has, BASE=debian:bookworm-slim make images, or run it as root"
        )
    missing = [package for name, package in _NEEDED.items() if shutil.which(name) is None]
    if missing and not programs.can_install():
        raise ImageError(
            f"no registry is reached, and a base image is made with {', '.join(missing)}, which "
            "this machine lacks: install them, or name a base that the engine has with BASE=..."
        )
    if missing:
        programs.install([*missing, "debian-archive-keyring", "gpgv"], on_progress, log)
    on_progress("no registry is reached: making the base image with debootstrap (once)")

    def make(directory: Path) -> None:
        command = [*UNSHARE_COMMAND, str(DIRECTORY / "make-root.sh"), str(directory)]
        programs.run_or_fail("debootstrap", command, log, timeout_s=_DEBOOTSTRAP_TIMEOUT_S)

    return make_once(entry, make, on_progress)
