"""From a container's spec to the config of its shim: argv, environment, mounts.

A shim is the parent process of one container.  Pure except for `mkdir` of sub-paths.  Raises
ImageNotFound or ConfigError with a message for the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import environment
from rekindle_testing.embedded.process_node.environment import ConfigError, Objects
from rekindle_testing.embedded.process_node.fields import DownwardValues, Json
from rekindle_testing.embedded.process_node.settings import ImageReplacement

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READ_ONLY_VOLUMES = ("configMap", "secret", "downwardAPI", "projected")


class ImageNotFound(Exception):
    """The node does not have the container's image."""


@dataclass(frozen=True, slots=True)
class PodContext:
    """What all containers of one pod share."""

    pod: Json
    downward_values: DownwardValues
    images: Mapping[str, ImageReplacement]
    volumes: Mapping[str, Path]
    # Variables of the Service of the API server, as in every container.
    service_variables: Mapping[str, str]
    hosts_file: Path
    # The process node's own directory on this machine.
    data_directory: Path
    log_limit_bytes: int
    # The pod's control group, or nothing.
    cgroup: str = ""


def host_name(pod: Json) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]


def hosts(pod: Json, pod_ip: str) -> str:
    """The content of /etc/hosts."""
    lines = ["127.0.0.1\tlocalhost", f"{pod_ip}\t{host_name(pod)}"]
    for alias in pod["spec"].get("hostAliases") or []:
        lines.append("\t".join([alias["ip"], *alias.get("hostnames", [])]))
    return "\n".join(lines) + "\n"


def find_image(container: Json, images: Mapping[str, ImageReplacement]) -> ImageReplacement:
    name = container["image"]
    if (image := images.get(name)) is None:
        known = ", ".join(sorted(images)) or "none"
        raise ImageNotFound(f'no image "{name}" on this process node; it has: {known}')
    return image


def shim_spec(
    context: PodContext, container: Json, objects: Objects, directory: Path
) -> dict[str, Any]:
    """What `shim.main` reads; `directory` is the attempt's. At `root` the container's file system
    is mounted, and `overlays` has the files that the container writes to it."""
    image = find_image(container, context.images)
    variables = environment.build(
        context.pod, container, objects, context.service_variables, context.downward_values
    )
    return {
        "argv": command_line(container, image, variables),
        "environment": {
            "PATH": ":".join([*image.path, _SYSTEM_PATH]),
            "HOME": "/root",
            "HOSTNAME": host_name(context.pod),
            **image.env,
            **variables,
        },
        "workdir": container.get("workingDir") or image.workdir,
        "hostname": host_name(context.pod),
        "root": str(directory / "root"),
        "overlays": str(directory / "overlays"),
        "data_directory": str(context.data_directory),
        "mounts": _mounts(context, container, variables, directory),
        "termination_message": str(directory / "termination-log"),
        "log_limit_bytes": context.log_limit_bytes,
        "cgroup": context.cgroup,
    }


def command_line(
    container: Json, image: ImageReplacement, variables: Mapping[str, str]
) -> list[str]:
    """`command` replaces the image's entry point, `args` follow it."""
    entry = container.get("command") or list(image.command)
    words = [*entry, *(container.get("args") or [])]
    if not words:
        raise ConfigError(f"no command specified, and image {container['image']!r} has none")
    return [environment.expand(word, variables) for word in words]


def _mounts(
    context: PodContext, container: Json, variables: Mapping[str, str], directory: Path
) -> list[Json]:
    message = container.get("terminationMessagePath") or "/dev/termination-log"
    mounts = [
        _mount(context.hosts_file, "/etc/hosts", read_only=False),
        _mount(directory / "termination-log", message, read_only=False),
    ]
    kinds = {v["name"]: next(k for k in v if k != "name") for v in _volumes(context.pod)}
    for mount in container.get("volumeMounts") or []:
        source = context.volumes[mount["name"]]
        read_only = bool(mount.get("readOnly")) or kinds[mount["name"]] in _READ_ONLY_VOLUMES
        sub_path = mount.get("subPath") or ""
        if pattern := mount.get("subPathExpr"):
            sub_path = environment.expand(pattern, variables)
        if sub_path:
            source = source / sub_path
            if not source.exists():
                source.mkdir(parents=True)
        mounts.append(_mount(source.resolve(), mount["mountPath"], read_only))
    # Deeper paths are mounted later: otherwise they would be hidden.
    return sorted(mounts, key=lambda m: len(Path(m["target"]).parts))


def _volumes(pod: Json) -> list[Json]:
    # Each has its name and its source.
    return [v for v in pod["spec"].get("volumes") or [] if len(v) > 1]


def _mount(source: Path, target: str, read_only: bool) -> Json:
    return {"source": str(source), "target": target, "read_only": read_only}
