"""Docker, podman and buildah: which one is used, and their command lines. Pure.

Buildah keeps its images in the user's cache, and each of its commands runs in namespaces of its
own: what it mounts and starts ends with it, also when it is killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rekindle_testing.images.errors import ImageError

UNSHARE_COMMAND = (  # a command that follows runs in namespaces of its own
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation=private",
    "--",
)
"""A prefix: mounts and processes of the command end with it. Needs root."""


class EngineKind(StrEnum):
    DOCKER = "docker"
    PODMAN = "podman"
    BUILDAH = "buildah"

    @property
    def health_check(self) -> list[str]:
        """Succeeds where the engine can build, not merely where its client is installed."""
        match self:
            case EngineKind.DOCKER:
                return ["docker", "version", "--format", "{{.Server.Version}}"]
            case EngineKind.PODMAN:
                return ["podman", "info", "--format", "{{.Store.GraphRoot}}"]
            case EngineKind.BUILDAH:
                return ["buildah", "--version"]


def choose(
    environment: Mapping[str, str], works: Callable[[EngineKind], bool]
) -> EngineKind | None:
    """ENGINE, or else the first that works."""
    if name := environment.get("ENGINE"):
        try:
            kind = EngineKind(name)
        except ValueError:
            known = ", ".join(EngineKind)
            raise ImageError(f"ENGINE is {name!r}; it can be one of {known}") from None
        if not works(kind):
            command = " ".join(kind.health_check)
            raise ImageError(f"ENGINE is {name}, which does not work: see `{command}`")
        return kind
    return next((kind for kind in EngineKind if works(kind)), None)


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How an image configures the process that it starts."""

    user: str
    environment: Mapping[str, str]
    entry_point: tuple[str, ...]
    command: tuple[str, ...]
    directory: str


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """`work` is the directory of buildah's storage."""

    kind: EngineKind
    work: Path

    @property
    def storage(self) -> Path:
        """Of buildah's images and layers."""
        return self.work / "storage"

    @property
    def run_directory(self) -> Path:
        """Buildah's record of mounts. To be deleted before each of its commands: each runs in
        namespaces of its own, in which nothing is mounted."""
        return self.work / "run"

    def tag(self, name: str, version: str) -> str:
        # Without a registry's name, buildah takes it for the short name of a public image.
        prefix = "localhost/" if self.kind is EngineKind.BUILDAH else ""
        return f"{prefix}rekindle/{name}:{version}"

    def build(
        self,
        tag: str,
        dockerfile: Path,
        context: Path,
        *,
        base: str | None = None,
        certificates: Path | None = None,
    ) -> list[str]:
        arguments = ["--file", str(dockerfile), "--tag", tag]
        if base is not None:
            arguments += ["--build-arg", f"BASE={base}"]
        if certificates is not None:
            arguments += ["--secret", f"id=certificates,src={certificates}"]
        match self.kind:
            case EngineKind.DOCKER:
                command = ["docker", "build"]
            case EngineKind.PODMAN:
                command = ["podman", "build", "--layers"]
            case EngineKind.BUILDAH:
                command = self.buildah("build", "--layers", "--isolation=chroot")
        return [*command, *arguments, str(context)]

    def inspect(self, tag: str) -> list[str]:
        """Prints what `parse_config` reads; fails if there is no such image."""
        if self.kind is EngineKind.BUILDAH:
            return self.buildah("inspect", "--type=image", tag)
        return [str(self.kind), "image", "inspect", tag]

    def parse_config(self, inspected: str) -> ImageConfig:
        document: Any = json.loads(inspected)
        if self.kind is EngineKind.BUILDAH:
            config = document["OCIv1"]["config"]
        else:
            config = document[0]["Config"]
        pairs = (item.partition("=") for item in config.get("Env") or ())
        return ImageConfig(
            user=config.get("User") or "",
            environment={name: value for name, _, value in pairs},
            entry_point=tuple(config.get("Entrypoint") or ()),
            command=tuple(config.get("Cmd") or ()),
            directory=config.get("WorkingDir") or "/",
        )

    def run(
        self, tag: str, name: str, writable: Sequence[str], command: Sequence[str]
    ) -> list[str]:
        """A container as a pod has it, without a network: Docker and podman alone."""
        arguments = ["--rm", "--interactive", "--name", name, "--network=none", "--read-only"]
        arguments += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
        for directory in writable:
            arguments += ["--tmpfs", f"{directory}:rw,exec,mode=1777"]
        return [str(self.kind), "run", *arguments, tag, *command]

    def save(self, tag: str, archive: Path) -> list[str]:
        """Write the image as `docker load`, `podman load` and `ctr images import` take it."""
        match self.kind:
            case EngineKind.DOCKER:
                return ["docker", "save", "--output", str(archive), tag]
            case EngineKind.PODMAN:
                options = ["--format", "docker-archive", "--output", str(archive)]
                return ["podman", "save", *options, tag]
            case EngineKind.BUILDAH:
                name = tag.removeprefix("localhost/")
                return self.buildah("push", tag, f"docker-archive:{archive}:{name}")

    def buildah(self, *arguments: str) -> list[str]:
        storage = [f"--root={self.storage}", f"--runroot={self.run_directory}"]
        return [*UNSHARE_COMMAND, "buildah", *storage, *arguments]
