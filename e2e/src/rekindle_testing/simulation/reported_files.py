"""Sink files that the status names, because tasks have computed other rows, and the person who
deletes the wrong ones.

Design: docs/simulation.md#wrong-results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rekindle.topology.model import Partition, partition_of
from rekindle_testing.simulation.kube.objects import TOPOLOGIES

if TYPE_CHECKING:
    from rekindle_testing.simulation.cluster import SimulatedCluster

_CONFLICT = re.compile(r"query (\S+): files of (\S+) at epochs \[([\d, ]+)\] differ")
_File = tuple[str, Partition, int]
"""Query, partition and epoch."""
LOOK_S = 0.1
"""How often `look` is called."""
_NAMED_S = 2.0
"""A person has seen what the status has said for so long."""


class ReportedFiles:
    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._log = log
        self._named_looks: dict[_File, int] = {}  # in how many looks the status has named a file

    def look(self) -> None:
        named = {*self._named_files()}
        if self._cluster.api_faults.none_for_s < _NAMED_S:
            named |= {*self._found_files()}  # the status may not have been written
        for name in named:
            self._named_looks[name] = self._named_looks.get(name, 0) + 1

    def was_named(self, query: str, partition: Partition, epoch: int) -> bool:
        """Whether a file was named for some time, or until the task ended that had named it, if it
        goes on from a later epoch now: what such a task knows ends with it, and files are compared
        from the restore point on."""
        name = query, partition, epoch
        looks = self._named_looks.get(name, 0)
        is_enough = looks * LOOK_S > _NAMED_S or self._goes_on_after(partition, epoch)
        return looks > 0 and is_enough and name not in self._named_files()

    def _goes_on_after(self, partition: Partition, epoch: int) -> bool:
        """Whether all its tasks have started from a later checkpoint."""
        boots = [
            pod.boot
            for slot, pod in self._cluster.pods.items()
            if partition_of(slot) == partition and pod.boot is not None
        ]
        starts = [boot.core.status.restored_from for boot in boots]
        return bool(starts) and all(start is not None and start >= epoch for start in starts)

    def delete_wrong_ones(self) -> None:
        """What a person does: the wrong ones of the files that `inconsistent` names, while the task
        runs that has named them, which writes its own."""
        sinks, expected = self._cluster.sinks, self._cluster.checks.expected
        for query, partition, epoch in self._named_files():
            files = sinks.files[query, partition]
            if not self._has_conflict(query, partition):
                continue
            if epoch in files and files[epoch] != expected.output(partition, epoch):
                self._log(f"the file of {query} {partition.key}, epoch {epoch}, is deleted")
                sinks.delete(query, partition, epoch)

    def _has_conflict(self, query: str, partition: Partition) -> bool:
        return any(found[:2] == (query, partition) for found in self._found_files())

    def _found_files(self) -> list[_File]:
        """Files of which tasks that run know that they differ from what they have computed."""
        parts = [p.boot.core.parts for p in self._cluster.pods.values() if p.boot is not None]
        cores = [item for p in parts if p is not None for item in p.sinks.cores.items()]
        texts = [f"query {query}: {core.conflict}" for query, core in cores if core.conflict]
        return _files_in("; ".join(texts))

    def _named_files(self) -> list[_File]:
        """Files that the status names now."""
        (topology,) = self._cluster.server.objects.all(TOPOLOGIES)
        report = (topology.get("status") or {}).get("dataPlane") or {}
        return _files_in("; ".join(report.get("inconsistent") or ()))


def _files_in(text: str) -> list[_File]:
    found = []
    for query, key, numbers in re.findall(_CONFLICT, text):
        segment, _, index = key.partition("/")
        partition = Partition(segment, int(index))
        found += [(query, partition, int(epoch)) for epoch in numbers.split(", ")]
    return found
