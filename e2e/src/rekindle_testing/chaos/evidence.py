"""Collects the logs, API objects and outputs of a failed chaos run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.pod_log_archive import PodLogArchive

_OBJECTS = "nodes,pods,streamtopologies,configmaps,leases,deployments,replicasets"


def keep_evidence(
    directory: Path,
    cluster: EmbeddedCluster,
    log_archive: PodLogArchive,
    texts: Mapping[str, str],
) -> None:
    """Into `directory`: `texts` by file name, logs of all processes, objects of the cluster, and
    what the topologies wrote. A step that fails does not stop the others."""
    for name, text in texts.items():
        (directory / name).write_text(text + "\n")
    kubectl = cluster.control_plane.kubectl
    steps: list[Callable[[], object]] = [
        lambda: log_archive.copy_to(directory / "logs" / "pods"),
        lambda: cluster.keep_logs(directory / "logs"),
        lambda: shutil.copytree(cluster.shared, directory / "shared", dirs_exist_ok=True),
        lambda: (directory / "objects.yaml").write_text(
            kubectl("get", _OBJECTS, "-A", "-o", "yaml")
        ),
        lambda: (directory / "events.txt").write_text(
            kubectl("get", "events", "-A", "--sort-by=.metadata.creationTimestamp")
        ),
    ]
    for step in steps:
        with contextlib.suppress(OSError, EmbeddedError, shutil.Error):
            step()
