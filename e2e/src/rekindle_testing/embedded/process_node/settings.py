"""The settings of an agent, which `ProcessNode` writes into a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import syscalls
from rekindle_testing.embedded.process_node.restarts import RestartBackoff


@dataclass(frozen=True, slots=True)
class ImageReplacement:
    """Replaces a container image: this machine's files with an environment.

    `path` is prepended to PATH; `command` and `workdir` are defaults for containers.
    """

    path: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    workdir: str = "/"


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """Intervals and timeouts of a node; seconds."""

    lease_renew_s: float = 2.0
    lease_duration_s: int = 8
    # How often the Node's status is written though it has not changed: the heartbeat is the Lease.
    status_interval_s: float = 60.0
    memory_sample_interval_s: float = 0.7
    # Of mounted ConfigMaps, Secrets and tokens.
    volume_refresh_interval_s: float = 10.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    # For a pod whose object is already gone.
    deleted_object_grace_s: float = 1.0


# Shorter intervals for tests.
QUICK = NodeTiming(
    lease_renew_s=1.0,
    lease_duration_s=4,
    memory_sample_interval_s=0.3,
    volume_refresh_interval_s=0.5,
    backoff=RestartBackoff(base_s=0.5),
)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node."""

    name: str
    zone: str
    address: str
    # The first two bytes of all addresses of the node: 127.INDEX.
    address_prefix: str
    kubelet_port: int
    capacity: Mapping[str, str]
    labels: Mapping[str, str]
    images: Mapping[str, ImageReplacement]
    timing: NodeTiming
    directory: str
    kubeconfig: str
    ca_file: str
    serving_certificate: str
    serving_key: str
    # The common name in the certificate by which the API server calls a node.
    apiserver_client_name: str
    # In cgroup v2; empty where there is none.
    cgroup: str = ""
    log_limit_bytes: int = 10 * 1024 * 1024

    def write(self, path: Path) -> None:
        syscalls.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> NodeSettings:
        raw: dict[str, Any] = json.loads(path.read_text())
        timing: dict[str, Any] = raw["timing"]
        timing["backoff"] = RestartBackoff(**timing["backoff"])
        raw["timing"] = NodeTiming(**timing)
        raw["images"] = {
            name: ImageReplacement(
                tuple(image["path"]), image["env"], tuple(image["command"]), image["workdir"]
            )
            for name, image in raw["images"].items()
        }
        return cls(**raw)
