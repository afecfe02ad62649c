"""Collects the logs, API objects and outputs of an embedded cluster on which something failed."""

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
    texts: Mapping[str, str],
    log_archive: PodLogArchive | None = None,
) -> None:
    """Into `directory`: `texts` by file name, logs of all processes, objects of the cluster, and
    what the topologies wrote. A step that fails does not stop the others. `log_archive`: has the
    logs of pods that are gone."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text + "\n")
    kubectl = cluster.control_plane.kubectl
    steps: list[Callable[[], object]] = [
        lambda: cluster.keep_logs(directory / "logs"),
        lambda: shutil.copytree(cluster.shared, directory / "shared", dirs_exist_ok=True),
        lambda: (directory / "objects.yaml").write_text(
            kubectl("get", _OBJECTS, "-A", "-o", "yaml")
        ),
        lambda: (directory / "events.txt").write_text(
            kubectl("get", "events", "-A", "--sort-by=.metadata.creationTimestamp")
        ),
    ]
    if log_archive is not None:
        steps.insert(0, lambda: log_archive.copy_to(directory / "logs" / "pods"))
    for step in steps:
        with contextlib.suppress(OSError, EmbeddedError, shutil.Error):
            step()
