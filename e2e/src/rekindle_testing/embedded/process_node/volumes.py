"""The volumes of one pod: created before its containers, refreshed while they run.

Knows the directories of volumes on the machine; the shim mounts them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rekindle_testing.embedded.process_node import payloads, quantities, syscalls
from rekindle_testing.embedded.process_node.environment import ConfigError
from rekindle_testing.embedded.process_node.fields import DownwardValues, FieldError, Json
from rekindle_testing.embedded.process_node.objects import ObjectReader, TokenReader


class VolumeError(Exception):
    """A volume cannot be created (yet); the message says which and why."""


class Volumes:
    """`paths`: the directory of each volume, once `prepare` returned."""

    def __init__(self, directory: Path, objects: ObjectReader, tokens: TokenReader) -> None:
        self._directory = directory
        self._objects = objects
        self._tokens = tokens
        self.paths: dict[str, Path] = {}

    async def prepare(self, pod: Json, downward_values: DownwardValues) -> None:
        for volume in pod["spec"].get("volumes") or []:
            try:
                self.paths[volume["name"]] = await self._prepare(pod, volume, downward_values)
            except (ConfigError, FieldError, ValueError, OSError) as error:
                raise VolumeError(f"volume {volume['name']!r}: {error}") from error

    async def refresh(self, pod: Json, volume: Json, downward_values: DownwardValues) -> None:
        """Write one volume's files from objects, labels and tokens again. They stay as they are if
        any of these fails, as with a kubelet."""
        if payloads.volume_sources(volume) and volume["name"] in self.paths:
            try:
                await self._write(pod, volume, self.paths[volume["name"]], downward_values)
            except (ConfigError, FieldError, ValueError, OSError) as error:
                raise VolumeError(f"volume {volume['name']!r}: {error}") from error

    def exceeded_limit(self, pod: Json) -> str | None:
        """The message about an emptyDir on disk that is above its sizeLimit, or None."""
        for volume in pod["spec"].get("volumes") or []:
            empty = volume.get("emptyDir") or {}
            limit = empty.get("sizeLimit")
            if limit and empty.get("medium") != "Memory" and volume["name"] in self.paths:
                used = _disk_usage(self.paths[volume["name"]])
                if used > quantities.parse_rounded_up(limit):
                    return (
                        f'Usage of EmptyDir volume "{volume["name"]}" exceeds the limit "{limit}".'
                    )
        return None

    async def _prepare(self, pod: Json, volume: Json, downward_values: DownwardValues) -> Path:
        path: Path = self._directory / volume["name"]
        if source := volume.get("hostPath"):
            return _host_path(source)
        if claim := volume.get("persistentVolumeClaim"):
            namespace = pod["metadata"]["namespace"]
            return await self._objects.claim_directory(namespace, str(claim["claimName"]))
        fresh = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        if payloads.volume_sources(volume):
            await self._write(pod, volume, path, downward_values)
        elif fresh:
            path.chmod(0o777)
            empty = volume.get("emptyDir") or {}
            if empty.get("medium") == "Memory":
                limit = empty.get("sizeLimit")
                size = f",size={quantities.parse_rounded_up(limit)}" if limit else ""
                syscalls.mount("tmpfs", str(path), "tmpfs", data=f"mode=777{size}")
        return path

    async def _write(
        self, pod: Json, volume: Json, path: Path, downward_values: DownwardValues
    ) -> None:
        namespace = pod["metadata"]["namespace"]
        objects = await self._objects.read(namespace, payloads.references(volume))
        tokens = {
            source["path"]: await self._tokens.token(pod, source)
            for kind, source in payloads.volume_sources(volume)
            if kind == "serviceAccountToken"
        }
        payloads.write(path, payloads.payload(pod, volume, objects, tokens, downward_values))

    def remove(self) -> None:
        for path in self._directory.glob("*"):
            if os.path.ismount(path):
                syscalls.unmount(str(path))
        shutil.rmtree(self._directory, ignore_errors=True)


def _host_path(source: Json) -> Path:
    path, kind = Path(source["path"]), source.get("type") or ""
    match kind:
        case "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        case "FileOrCreate":
            path.touch()
    matches = {"Directory": path.is_dir, "File": path.is_file}.get(kind, path.exists)
    if not matches():
        raise ValueError(
            f"hostPath {path} is not a {kind}" if path.exists() else f"hostPath {path} not found"
        )
    return path


def _disk_usage(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += Path(folder, name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total
