"""Builds the images with whichever container engine works here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import yaml

from rekindle.directories import cache_root
from rekindle_testing.images import base, programs
from rekindle_testing.images.engines import ContainerEngine, EngineKind, choose
from rekindle_testing.images.errors import ImageError, NoContainerEngine
from rekindle_testing.images.image_runs import IMAGES, Image
from rekindle_testing.paths import ROOT
from rekindle_testing.progress import OnProgress

BUILD_DIRECTORY = ROOT / "build" / "images"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_BUILD_TIMEOUT_S = 3600.0
_COMMAND_TIMEOUT_S = 600.0
_MAX_STORAGE_BYTES = 12_000_000_000
"""Of buildah's storage, which keeps the layers of old builds as a cache; above it, all are
deleted."""


class Builder:
    """A container engine with what it needs to build this checkout's images."""

    def __init__(self, engine: ContainerEngine, on_progress: OnProgress) -> None:
        self.engine = engine
        self._on_progress = on_progress
        self._version = version()
        self._clear()
        self._base = base.choose(
            os.environ,
            (ROOT / "images" / IMAGES[0].name / "Dockerfile").read_text(),
            base.is_registry_reached,
            self._ensure_base_image,
        )

    @classmethod
    def for_this_machine(cls, on_progress: OnProgress) -> Self:
        """With the container engine of this machine."""
        engine = find_container_engine(on_progress)
        on_progress(f"building with {engine.kind}")
        return cls(engine, on_progress)

    def build(self, image: Image) -> str:
        """Build an image; returns its tag."""
        tag = self.engine.tag(image.name, self._version)
        log = BUILD_DIRECTORY / f"{image.name}.log"
        shown = log.relative_to(ROOT)
        self._on_progress(f"{tag}: building (the first time takes minutes), log in {shown}")
        command = self.engine.build(
            tag,
            ROOT / "images" / image.name / "Dockerfile",
            ROOT,
            base=self._base,
            certificates=_CERTIFICATES if _CERTIFICATES.exists() else None,
        )
        is_buildah = self.engine.kind is EngineKind.BUILDAH
        self.forget_mounts()
        done = programs.run_or_fail(
            f"building {tag}",
            command,
            log,
            timeout_s=_BUILD_TIMEOUT_S,
            environment={"TMPDIR": str(BUILD_DIRECTORY / "tmp")} if is_buildah else None,
        )
        self._on_progress(f"{tag}: built in {done.seconds:.0f} s")
        return tag

    def save(self, image: Image, tag: str) -> Path:
        """Write the image to an archive; returns its path."""
        archive = BUILD_DIRECTORY / f"{image.name}.tar"
        archive.unlink(missing_ok=True)
        self.run(self.engine.save(tag, archive))
        self._on_progress(f"{tag}: written to {archive.relative_to(ROOT)}")
        return archive

    def run(self, command: Sequence[str]) -> str:
        """Run a command of the container engine; returns what it prints."""
        self.forget_mounts()
        done = programs.run(command, timeout_s=_COMMAND_TIMEOUT_S)
        if done.exit_code:
            raise ImageError(f"{' '.join(command)} failed:\n{done.output}")
        return done.output

    def forget_mounts(self) -> None:
        """Delete buildah's record of mounts, before a command: each command runs in new namespaces,
        in which nothing is mounted."""
        if self.engine.kind is EngineKind.BUILDAH:
            shutil.rmtree(self.engine.run_directory, ignore_errors=True)

    def _clear(self) -> None:
        """Remove what an interrupted run has left, and layers that have become too many."""
        if self.engine.kind is not EngineKind.BUILDAH:
            return
        shutil.rmtree(BUILD_DIRECTORY / "tmp", ignore_errors=True)
        (BUILD_DIRECTORY / "tmp").mkdir(parents=True)
        if _size(self.engine.storage) > _MAX_STORAGE_BYTES:
            self._on_progress(f"emptying {self.engine.storage}: more than 12 GB of old layers")
            shutil.rmtree(self.engine.storage)
        self.run(self.engine.buildah("rm", "--all"))

    def _ensure_base_image(self) -> str:
        """The base for machines without a registry, in the container engine's storage."""
        tag = self.engine.tag("base", base.base_key())
        self.forget_mounts()
        inspected = programs.run(self.engine.inspect(tag), timeout_s=_COMMAND_TIMEOUT_S)
        if inspected.exit_code == 0:
            return tag
        log = BUILD_DIRECTORY / "base.log"
        context = base.ensure_root_file_system(cache_root(os.environ), self._on_progress, log)
        command = self.engine.build(tag, base.DIRECTORY / "Dockerfile", context)
        log = BUILD_DIRECTORY / "base-image.log"
        self.forget_mounts()
        programs.run_or_fail("the base image", command, log, timeout_s=_BUILD_TIMEOUT_S)
        return tag


def find_container_engine(on_progress: OnProgress) -> ContainerEngine:
    """ENGINE, or else the first that works; it installs buildah where none does, as root on Debian.
    Raises NoContainerEngine."""

    def works(kind: EngineKind) -> bool:
        usable = kind is not EngineKind.BUILDAH or os.geteuid() == 0
        return usable and programs.works(kind.health_check)

    kind = choose(os.environ, works)
    if kind is None and programs.can_install():
        programs.install(["buildah"], on_progress, BUILD_DIRECTORY / "install.log")
        kind = choose(os.environ, works)
    if kind is None:
        raise NoContainerEngine(
            "neither Docker nor podman works here, nor buildah as root. Start or install one "
            "of them; as root on Debian or Ubuntu, `make images` installs buildah itself"
        )
    return ContainerEngine(kind, _shared_directory())


def version() -> str:
    """The tag of images: the chart's appVersion."""
    chart = yaml.safe_load((ROOT / "charts/rekindle/Chart.yaml").read_text())
    return str(chart["appVersion"])


@contextlib.contextmanager
def exclusive_lock() -> Iterator[None]:
    """For builds of this user, in whichever checkout."""
    directory = _shared_directory()
    for made in (directory, BUILD_DIRECTORY):
        made.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ImageError("another `make images` runs on this machine") from None
        yield


def _shared_directory() -> Path:
    """Buildah's layers, with which images of any checkout begin."""
    return cache_root(os.environ) / "buildah"


def _size(directory: Path) -> int:
    done = programs.run(
        ["du", "--summarize", "--bytes", str(directory)], timeout_s=_COMMAND_TIMEOUT_S
    )
    return int(done.output.split()[0]) if done.exit_code == 0 else 0
