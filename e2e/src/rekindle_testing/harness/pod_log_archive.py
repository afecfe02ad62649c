"""Preserves the logs of pods whose node dies, by hard links: nothing is copied.

The logs of a lost node and of a deleted pod are deleted with them, but they may be needed to find
the cause of a later failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rekindle_testing.harness.nodes import NodeKind


class PodLogArchive:
    """`nodes`: the directory of a cluster's nodes; `archive`: where logs are preserved, on the same
    file system."""

    def __init__(self, node_kind: NodeKind, nodes: Path, archive: Path) -> None:
        self._node_kind = node_kind
        self._nodes = nodes
        self._archive = archive
        self._linked: set[int] = set()

    def preserve_new(self) -> None:
        """Link every log that is new; to be called about every second."""
        for log in self._node_kind.pod_logs(self._nodes):
            # The log was deleted meanwhile, with its pod.
            with contextlib.suppress(OSError, ValueError):
                self._preserve(log)

    def _preserve(self, log: Path) -> None:
        inode = log.stat().st_ino
        if inode in self._linked:
            return
        name = f"{self._node_kind.name_of(log)}-{inode}"
        target = self._archive / self._node_kind.pod_of(log) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(log, target)
        self._linked.add(inode)

    def copy_to(self, directory: Path) -> None:
        self.preserve_new()
        if self._archive.exists():
            shutil.copytree(self._archive, directory, dirs_exist_ok=True)
