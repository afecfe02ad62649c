"""Memory of containers, from a snapshot of /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessTree:
    """A snapshot of parents and children; processes may start and end meanwhile."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._children: dict[int, list[int]] = {}
        for entry in proc.iterdir():
            if entry.name.isdigit() and (parent := _parent(entry)) is not None:
                self._children.setdefault(parent, []).append(int(entry.name))

    def descendants(self, pid: int) -> list[int]:
        found: list[int] = []
        frontier = [pid]
        while frontier:
            frontier = [child for parent in frontier for child in self._children.get(parent, ())]
            found += frontier
        return found

    def exceeds(self, pids: Iterable[int], limit_bytes: int) -> bool:
        """Whether the processes together use more than the limit.

        Resident sizes count shared pages once for each process, too much for the forked
        workers of PySpark.  The exact value (PSS) is expensive, and read only if the
        cheap one is above the limit.
        """
        pids = list(pids)
        if sum(self._resident_bytes(pid) for pid in pids) <= limit_bytes:
            return False
        return sum(self._proportional_bytes(pid) for pid in pids) > limit_bytes

    def _resident_bytes(self, pid: int) -> int:
        try:
            return int((self._proc / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def _proportional_bytes(self, pid: int) -> int:
        try:
            text = (self._proc / str(pid) / "smaps_rollup").read_text()
        except OSError:
            return 0
        for line in text.splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return 0


def _parent(process: Path) -> int | None:
    try:
        # The process name before may contain spaces and parentheses.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
