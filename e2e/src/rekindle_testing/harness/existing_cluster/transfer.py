"""Files to and from a volume that this machine does not mount, by short-lived pods.

Data to write is passed to a pod in ConfigMaps, and data that it reads is in its log: that needs
nothing but pods, ConfigMaps and logs, which every cluster has. Archives are compressed, and split:
a ConfigMap holds 1 MiB at most, and kubelets rotate logs, by default at 10 MiB.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kubernetes import client

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.harness.existing_cluster import in_pod
from rekindle_testing.waiting import wait_for

_CONFIG_MAP_PART_BYTES = 700_000  # of an archive in a ConfigMap
_LOG_PART_BYTES = 4_000_000  # of an archive in a log, which has it in base64
_ENDED = ("Succeeded", "Failed")

ReadLog = Callable[[str], str]


class TransferError(Exception):
    """A pod that works on the volume failed; with the end of its log."""


class Volume:
    """The volume of a claim. `read_log`: returns the log of a pod, by its name."""

    def __init__(
        self,
        core: client.CoreV1Api,
        namespace: str,
        claim: str,
        image: str,
        read_log: ReadLog,
        *,
        fs_group: int | None = None,
        timeout_s: float = 180,
    ) -> None:
        self._core = core
        self._namespace = namespace
        self._claim = claim
        self._image = image
        self._read_log = read_log
        self._fs_group = fs_group
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)

    def write(self, base: Path, path: str) -> None:
        """Copy a file or folder below `base` to the same place below the root of the volume."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            tar.add(base / path, arcname=path)
        parts = list(_split(content.getvalue(), _CONFIG_MAP_PART_BYTES))
        number = next(self._numbers)
        config_maps = [f"transfer-{number}-{i:04}" for i in range(len(parts))]
        try:
            for name, part in zip(config_maps, parts, strict=True):
                data = {name: base64.b64encode(part).decode()}
                body: Any = {"metadata": {"name": name}, "binaryData": data}
                self._core.create_namespaced_config_map(self._namespace, body)
            self._run(number, "write", config_maps=config_maps)
        finally:
            for name in config_maps:
                self._delete(self._core.delete_namespaced_config_map, name)

    def read(self, path: str, base: Path) -> None:
        """Replace a folder below `base` by that of the volume."""
        size, archive = 1, b""  # the first answer has the size of the archive
        while len(archive) < size:
            number, offset = next(self._numbers), str(len(archive))
            answer = self._run(number, "read", path, offset, str(_LOG_PART_BYTES))
            part = base64.b64decode(answer["data"])
            if not part or hashlib.sha256(part).hexdigest() != answer["sha256"]:
                raise TransferError(f"the log of the pod that read {path} is damaged")
            size, archive = answer["size"], archive + part
        shutil.rmtree(base / path, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            _extract(tar, base)

    def move(self, path: str, to: str) -> None:
        self._run(next(self._numbers), "move", path, to)

    def entries(self) -> list[str]:
        """Names in the root."""
        return [str(name) for name in self._run(next(self._numbers), "list")["names"]]

    def clear(self) -> None:
        """Delete all files."""
        self._run(next(self._numbers), "clear")

    def _run(self, number: int, *arguments: str, config_maps: Sequence[str] = ()) -> dict[str, Any]:
        name = f"volume-{number}"
        pod: Any = pod_manifest(
            name, self._claim, self._image, arguments, config_maps, self._fs_group
        )
        self._core.create_namespaced_pod(self._namespace, pod)
        try:
            phase = wait_for(
                f"pod {name} in {self._namespace} to end",
                lambda: found if (found := self._phase(name)) in _ENDED else None,
                self._timeout_s,
                every_s=0.25,
            )
            log = self._read_log(name)
        finally:
            self._delete(self._core.delete_namespaced_pod, name)
        if phase == "Failed":
            what = f"{' '.join(arguments)} on claim {self._claim}"
            raise TransferError(f"{what} failed:\n{log[-2000:]}")
        answer: dict[str, Any] = json.loads(log.strip().splitlines()[-1])
        return answer

    def _phase(self, name: str) -> str:
        pod = self._core.read_namespaced_pod(name, self._namespace)
        return str(pod.status.phase) if pod.status else ""

    def _delete(self, delete: Callable[..., object], name: str) -> None:
        try:
            delete(name, self._namespace, grace_period_seconds=0)
        except client.ApiException as error:
            if error.status != 404:
                raise


def pod_manifest(
    name: str,
    claim: str,
    image: str,
    arguments: Sequence[str],
    config_maps: Sequence[str],
    fs_group: int | None,
) -> dict[str, Any]:
    """A pod that runs `in_pod` with these arguments. It is admitted where the Pod Security Standard
    `restricted` is enforced."""
    volumes: list[dict[str, Any]] = [
        {"name": "volume", "persistentVolumeClaim": {"claimName": claim}}
    ]
    mounts = [{"name": "volume", "mountPath": SHARED_MOUNT_PATH}]
    if config_maps:
        sources = [{"configMap": {"name": each}} for each in config_maps]
        volumes.append({"name": "parts", "projected": {"sources": sources}})
        mounts.append({"name": "parts", "mountPath": "/var/lib/parts"})
    program = Path(in_pod.__file__).read_text()
    container = {
        "name": "volume",
        "image": image,
        "args": ["python", "-c", program, SHARED_MOUNT_PATH, "/var/lib/parts", *arguments],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    security: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if fs_group is not None:
        security["fsGroup"] = fs_group
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": security,
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _split(content: bytes, size: int) -> list[bytes]:
    return [content[i : i + size] for i in range(0, len(content), size)]


def _extract(tar: tarfile.TarFile, base: Path) -> None:
    """Files and folders alone, none outside `base`, with their times of modification."""
    for member in tar:
        target = (base / member.name).resolve()
        if not target.is_relative_to(base.resolve()):
            raise TransferError(f"a path outside the volume: {member.name}")
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        elif (source := tar.extractfile(member)) is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read())
            os.utime(target, (member.mtime, member.mtime))
