"""The files of configMap, secret, downwardAPI and projected volumes.

`payload` is pure.  `write` updates a directory atomically, as the kubelet does: a
reader sees all of the old files or all of the new ones.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rekindle_testing.embedded.process_node.environment import (
    ConfigError,
    ObjectReference,
    Objects,
    file_data,
)
from rekindle_testing.embedded.process_node.fields import (
    DownwardValues,
    Json,
    field_value,
    resource_value,
)

_DEFAULT_MODE = 0o644


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    mode: int = _DEFAULT_MODE


Payload = dict[str, File]


def volume_sources(volume: Json) -> list[tuple[str, Json]]:
    """(kind, source) of all that makes up a volume; empty for other volumes."""
    if projected := volume.get("projected"):
        return [item for source in projected.get("sources") or [] for item in source.items()]
    for kind in ("configMap", "secret", "downwardAPI"):
        if kind in volume:
            return [(kind, volume[kind])]
    return []


def references(volume: Json) -> Iterator[ObjectReference]:
    for kind, source in volume_sources(volume):
        if reference := _reference(kind, source):
            yield reference


def payload(
    pod: Json,
    volume: Json,
    objects: Objects,
    tokens: Mapping[str, str],
    downward_values: DownwardValues,
) -> Payload:
    """`tokens`: path of the projection -> token."""
    volume_source: Json = volume.get("projected") or volume_sources(volume)[0][1]
    default = volume_source.get("defaultMode") or _DEFAULT_MODE
    files: Payload = {}
    for kind, source in volume_sources(volume):
        if kind == "serviceAccountToken":
            files[source["path"]] = File(tokens[source["path"]].encode(), 0o600)
        elif kind == "downwardAPI":
            for item in source.get("items") or []:
                mode = item.get("mode") or default
                files[item["path"]] = File(_downward(pod, item, downward_values).encode(), mode)
        else:
            files |= _keys(kind, source, objects, default)
    return files


def write(directory: Path, files: Payload) -> None:
    """Replace the files of the directory, if any has changed."""
    current = directory / "..data"
    if current.exists() and _current_files(current) == files:
        return
    version = directory / f"..{time.time_ns()}"
    for name, file in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)
    version.mkdir(parents=True, exist_ok=True)
    before = current.resolve() if current.exists() else None
    new_link = directory / "..data_new"
    new_link.unlink(missing_ok=True)  # of a writer that was killed
    new_link.symlink_to(version.name)
    new_link.replace(current)
    tops = {Path(name).parts[0] for name in files}
    for top in tops:
        if not (directory / top).is_symlink():
            (directory / top).symlink_to(Path("..data") / top)
    for link in directory.iterdir():
        if not link.name.startswith("..") and link.name not in tops:
            link.unlink()
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def _current_files(current: Path) -> Payload:
    files: Payload = {}
    for folder, _, names in os.walk(current.resolve()):
        for name in names:
            path = Path(folder) / name
            relative = str(path.relative_to(current.resolve()))
            files[relative] = File(path.read_bytes(), path.stat().st_mode & 0o777)
    return files


def _reference(kind: str, source: Json) -> ObjectReference | None:
    match kind:
        case "configMap":
            return ObjectReference("ConfigMap", source["name"])
        case "secret":
            # A secret volume has secretName, a projected one has name.
            return ObjectReference("Secret", source.get("secretName") or source["name"])
    return None


def _downward(pod: Json, item: Json, downward_values: DownwardValues) -> str:
    if "fieldRef" in item:
        return field_value(pod, item["fieldRef"]["fieldPath"], downward_values)
    return resource_value(pod, item["resourceFieldRef"], "", downward_values)


def _keys(kind: str, source: Json, objects: Objects, default_mode: int) -> Payload:
    reference = _reference(kind, source)
    assert reference is not None
    content = objects.get(reference)
    if content is None:
        if source.get("optional"):
            return {}
        raise ConfigError(f"{reference.kind} {reference.name!r} not found")
    data = file_data(reference, content)
    items = source.get("items")
    if items is None:
        return {key: File(value, default_mode) for key, value in data.items()}
    files: Payload = {}
    for item in items:
        if item["key"] in data:
            mode = item.get("mode") or default_mode
            files[item["path"]] = File(data[item["key"]], mode)
        elif not source.get("optional"):
            raise ConfigError(f"{reference.kind} {reference.name!r} has no key {item['key']!r}")
    return files
