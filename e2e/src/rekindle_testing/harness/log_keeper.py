"""Keeps the logs of pods and agents whose node dies: hard links, so that nothing is copied.

The directory of a lost node and the logs of a deleted pod are deleted with them, but they may be
needed as evidence of a later failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path


class LogKeeper:
    """`nodes`: the directory of a cluster's nodes; `kept`: on the same file system."""

    def __init__(self, nodes: Path, kept: Path) -> None:
        self._nodes = nodes
        self._kept = kept
        self._linked: set[int] = set()
        self._pods: dict[Path, str] = {}

    def sweep(self) -> None:
        """Link every log that is new; to be called about every second."""
        for log in self._nodes.glob("*/data/pods/*/containers/*/*/log*"):
            # The log was deleted meanwhile, with its pod.
            with contextlib.suppress(OSError, ValueError):
                self._keep(log)

    def _keep(self, log: Path) -> None:
        inode = log.stat().st_ino
        if inode in self._linked:
            return
        container, attempt = log.parts[-3:-1]
        target = self._kept / self._pod(log.parents[3]) / f"{container}-{attempt}-{inode}.log"
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(log, target)
        self._linked.add(inode)

    def _pod(self, directory: Path) -> str:
        if directory not in self._pods:
            saved = json.loads((directory / "pod.json").read_text())
            self._pods[directory] = saved["metadata"]["name"]
        return self._pods[directory]

    def copy_to(self, directory: Path) -> None:
        self.sweep()
        if self._kept.exists():
            shutil.copytree(self._kept, directory, dirs_exist_ok=True)
