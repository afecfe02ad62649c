"""What must hold while replicas compute wrong results, as far as `wrong_result_guarantees` says.

Design: docs/simulation.md#wrong-results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.tasks.graph import build_graph, downstream
from rekindle.protocol import PollRequest
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Slot, partition_of
from rekindle_testing.simulation.pod import TaskPod
from rekindle_testing.simulation.reported_files import LOOK_S, ReportedFiles
from rekindle_testing.simulation.wrong_result_guarantees import WrongResultGuarantees

if TYPE_CHECKING:
    from rekindle_testing.simulation.cluster import SimulatedCluster

_TOLD_S = 3.0
"""After so long all tasks that respond have been told of a difference."""


class WrongResultChecks:
    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self.guarantees = WrongResultGuarantees(cluster, log)
        self.files = ReportedFiles(cluster, log)
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._wrong = cluster.wrong_results
        self._graph = build_graph(cluster.topology)
        self._looks = False

    def watch(self) -> None:
        """From the first fault on."""
        if not self._looks:
            self._looks = True
            self._look()

    def _look(self) -> None:
        self.guarantees.look()
        self.files.look()
        self._scheduler.after(LOOK_S, self._look)

    def compared(self, coordinator: Coordinator, slot: Slot) -> None:
        """A response was compared: a replica that has another, wrong result is not trusted. Results
        of a boot that has to compute again do not count: it may have read a wrong epoch."""
        partition = partition_of(slot)
        if not self.guarantees.happened or partition in self.guarantees.may_stay_wrong:
            return
        found = [
            (t.slot, t.response)
            for t in coordinator.membership
            if t.partition == partition and t.response is not None
        ]
        comparison = coordinator.containment.comparison
        for one, response in found:
            if comparison.is_untrusted(one):
                continue
            for other, other_response in found:
                if comparison.boot_to_restart(other) is not None:
                    continue
                common = response.chained.keys() & other_response.chained.keys()
                for epoch in sorted(common):
                    wrong, right = response.digests[epoch], other_response.digests[epoch]
                    if self._wrong.is_wrong(wrong) and not self._wrong.is_wrong(right):
                        self._failed(
                            f"I1: {one.key} and {other.key} have different results of epoch "
                            f"{epoch}, and {one.key}, which is wrong, is trusted"
                        )

    def polls(self, coordinator: Coordinator, slot: Slot, poll: PollRequest) -> None:
        """While replicas disagree, nothing that depends on wrong results is written. (Sinks have
        what is committed: a replica that computes that again only compares it.)"""
        if not self.guarantees.happened or poll.ask_only:
            return
        self._check_release(slot, poll)
        for partition in coordinator.containment.comparison.disputes:
            depends = (partition, *downstream(self._graph, partition))
            if partition not in self.guarantees.faulty or partition_of(slot) not in depends:
                continue
            difference, through = self.guarantees.differences.get(partition), poll.sinks_through
            first = difference.first if difference is not None else None
            if first is not None and first <= (committed := self._committed(partition_of(slot))):
                first = committed + 1
            if first is not None and (through is None or through >= first):
                self._failed(
                    f"I2: replicas of {partition.key} disagree on epoch {first}, and sinks of "
                    f"{slot.key} may write through {through}"
                )

    def _check_release(self, slot: Slot, poll: PollRequest) -> None:
        """A task with wrong results that were held back, by this coordinator or by one before it,
        is not released. (It refuses a coordinator that was replaced, and may not know it.)"""
        pod = self._cluster.pods.get(slot)
        if pod is None or pod.boot is None or partition_of(slot) in self.guarantees.may_stay_wrong:
            return
        if poll.fence < pod.boot.core.polls.fence:
            return
        if (
            self.guarantees.is_held_back(pod)
            and poll.sinks_through is None
            and self.guarantees.is_wrong(pod)
        ):
            self._failed(f"I2: {slot.key} has wrong results, and is no longer held back")

    def _committed(self, partition: Partition) -> int:
        newest = self._cluster.store.newest
        refs = newest.entries.get(partition.key) if newest is not None else None
        return refs[0].epoch if refs else NO_EPOCH

    def writes(self, pod: TaskPod, epoch: int, value: str) -> None:
        """A sink begins to write an epoch. Nothing wrong is written once the coordinator has found
        the difference, and has said so."""
        partition, now = partition_of(pod.slot), self._scheduler.now
        if partition in self.guarantees.may_stay_wrong or not self._wrong.is_wrong(value):
            return
        coordinator = self._cluster.coordinator
        boot = coordinator.boot if coordinator is not None else None
        causes = [
            p for p in self.guarantees.faulty if partition in (p, *downstream(self._graph, p))
        ]
        differences = [
            self.guarantees.differences[p] for p in causes if p in self.guarantees.differences
        ]
        known_since = [
            difference.found_at
            for difference in differences
            if boot is not None and difference.found_by is boot and difference.first <= epoch
        ]
        if self.guarantees.ready is None or self.guarantees.ready[0] is not boot:
            return
        known_since.append(self.guarantees.ready[1])
        is_told = all(now - at > _TOLD_S for at in known_since) and len(known_since) > len(causes)
        if is_told and self.guarantees.was_reached_for(pod, _TOLD_S):
            self._failed(
                f"I2: {pod.slot.key} writes a wrong result of epoch {epoch}, "
                f"{now - max(known_since):.1f} s after the difference was found"
            )

    def not_done(self) -> list[str]:
        """What is not as in a run without faults."""
        if not self.guarantees.happened:
            return []
        found = []
        for slot, pod in self._cluster.pods.items():
            if self.guarantees.must_be_right(partition_of(slot)) and self.guarantees.is_wrong(pod):
                found.append(f"results of {slot.key} are wrong")
        sinks, expected = self._cluster.sinks, self._cluster.checks.expected
        for (query, partition), files in sinks.files.items():
            if self.guarantees.must_be_right(partition):
                wrong = [
                    e
                    for e, value in files.items()
                    if value != expected.output(partition, e)
                    and not self.files.was_named(query, partition, e)
                ]
                wrong += sinks.deleted.get((query, partition), ())
                if wrong:
                    found.append(f"files of {query} {partition.key} are wrong: {sorted(wrong)}")
        coordinator = self._cluster.coordinator
        if coordinator is not None and coordinator.boot is not None:
            core = coordinator.boot.core
            found += core.containment.problems(core.generation)
        return found

    def _failed(self, message: str) -> None:
        self._cluster.checks.failed(message)
