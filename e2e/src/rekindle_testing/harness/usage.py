"""Memory and disk of a running cluster, which must not grow while a topology runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rekindle_testing.harness.cluster import EmbeddedCluster

MIB = 2**20
# Part of a command line -> kind of process.
_KINDS = {
    "org.apache.spark": "jvm",
    "rekindle.task": "task",
    "rekindle.coordinator": "coordinator",
    "rekindle_operator": "operator",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """`memory`: kind of process -> anonymous resident MiB of the largest; without pages of mapped
    files (such as a source's input), which the kernel can reclaim. Disk: `local_disk_mib`
    of all pods' volumes on all nodes, `store_mib` of the topology's checkpoints."""

    memory: dict[str, float]
    local_disk_mib: float
    store_mib: float
    store_files: int


def usage(cluster: EmbeddedCluster, topology: str) -> Usage:
    memory: dict[str, float] = {}
    for node in cluster.nodes.values():
        for kind, resident in _processes(node.pids):
            memory[kind] = max(memory.get(kind, 0.0), resident)
    volumes = [f for n in cluster.nodes.values() for f in _file_sizes(n.volumes)]
    store = list(_file_sizes(cluster.shared / topology / "checkpoints"))
    return Usage(memory, sum(volumes) / MIB, sum(store) / MIB, len(store))


def _processes(pids: list[int]) -> Iterator[tuple[str, float]]:
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            memory = process.memory_info()
            resident = (memory.rss - memory.shared) / MIB
        except psutil.Error:  # it ended meanwhile
            continue
        kind = next((kind for part, kind in _KINDS.items() if part in command), None)
        if kind is not None:
            yield kind, resident


def _file_sizes(directory: Path) -> Iterator[int]:
    """Bytes on disk of every file below that is not deleted meanwhile."""
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                yield os.lstat(Path(folder) / name).st_blocks * 512
            except OSError:
                continue
