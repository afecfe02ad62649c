"""Preserves the logs of pods whose node dies, by hard links: nothing is copied.

The directory of a lost node and the logs of a deleted pod are deleted with them, but they may be
needed as evidence of a later failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rekindle_testing.harness.nodes import NodeKind


class PodLogArchive:
    """`nodes`: the directory of a cluster's nodes; `kept`: on the same file system."""

    def __init__(self, node_kind: NodeKind, nodes: Path, kept: Path) -> None:
        self._node_kind = node_kind
        self._nodes = nodes
        self._kept = kept
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
        target = self._kept / self._node_kind.pod_of(log) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(log, target)
        self._linked.add(inode)

    def copy_to(self, directory: Path) -> None:
        self.preserve_new()
        if self._kept.exists():
            shutil.copytree(self._kept, directory, dirs_exist_ok=True)
