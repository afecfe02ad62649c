"""What is guaranteed while a replica computes wrong results, and for which partitions.

A wrong result is found by comparison with the other replica of its partition. So nothing is
guaranteed any more for a partition, and for what reads it, if that replica is lost, or the wrong
one ends, before the coordinator knows of the difference; or if that coordinator is lost together
with all tasks that it has told.

Design: docs/simulation.md#wrong-results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rekindle.coordinator.tasks.graph import build_graph, downstream
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Partition, Slot, partition_of
from rekindle_testing.simulation.pod import TaskPod
from rekindle_testing.simulation.wrong_results import Recurrence

if TYPE_CHECKING:
    from rekindle_testing.simulation.cluster import SimulatedCluster

_LIVE_S = 2.0
"""A replica that was Live for so long is so for the coordinator."""
_SILENT_S = 1.2
"""A replica that was silent for so long may be suspected soon."""
_BEHIND_EPOCHS = 12
"""A replica that is further behind may soon not be waited for."""


@dataclass(slots=True)
class WrongValues:
    """Wrong values of a partition, until none is left of it or of what reads it. `first`: their
    lowest epoch; `found_by`: the boot of the coordinator that has found them; it must not forget
    that."""

    first: int
    found_by: object = None
    found_at: float = inf


class WrongResultGuarantees:
    """`happened`: how many pods have computed a wrong result. `may_stay_wrong`: partitions of which
    nothing is guaranteed any more. `faulty`: pods that a fault has made compute a wrong result, by
    partition; while there is one, no other pod of the partition becomes one. `differences`: by
    partition. `ready`: a coordinator that has read a manifest gives a desired state; its boot, and
    since when."""

    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self.happened = 0
        self.may_stay_wrong: set[Partition] = set()
        self.faulty: dict[Partition, list[TaskPod]] = {}
        self.differences: dict[Partition, WrongValues] = {}
        self.ready: tuple[object, float] | None = None
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._wrong = cluster.wrong_results
        self._graph = build_graph(cluster.topology)
        self._log = log
        self._were_wrong: set[str] = set()  # uids of pods that have put out wrong values
        self._live_since: dict[str, float] = {}  # by uid and boot
        self._reached_at: dict[str, float] = {}  # by address
        self._silent_at: dict[str, float] = {}
        self._wrong_boots: dict[str, TaskPod] = {}  # by id
        self._contained_boots: set[str] = set()
        # The coordinator that has found the newest difference, which may have wrong files.
        self._remembered_by: dict[Partition, object] = {}

    # --- which results are wrong ------------------------------------------------------

    def may_begin(self, pod: TaskPod) -> bool:
        """Whether a pod may compute a wrong result now: its partition has two replicas, the other
        one is Live, and no other one was wrong."""
        partition = partition_of(pod.slot)
        if partition in self.may_stay_wrong or not self._is_replicated(pod.slot):
            return False
        if any(other is not pod for other in self.faulty.get(partition, ())):
            return False
        return self._has_right_partner(pod)

    def began(self, pod: TaskPod) -> None:
        faulty = self.faulty.setdefault(partition_of(pod.slot), [])
        if pod not in faulty:
            faulty.append(pod)
            self.happened += 1

    def appended(self, pod: TaskPod, epoch: int) -> None:
        """A wrong value is in a log."""
        partition = partition_of(pod.slot)
        self._were_wrong.add(pod.uid)
        found = self.differences.setdefault(partition, WrongValues(epoch))
        found.first = min(epoch, found.first)
        if pod.boot is not None and partition in self.faulty:
            self._wrong_boots[pod.boot.core.status.boot_id] = pod

    def must_be_right(self, partition: Partition) -> bool:
        """Whether nothing wrong may be committed of a partition."""
        return partition not in self.may_stay_wrong

    def may_be_replaced(self, pod: TaskPod) -> bool:
        """Whether replicas may decide that a pod is replaced: it was wrong, or a replica repeats a
        wrong result, so that a third node has to decide."""
        faulty = self.faulty.get(partition_of(pod.slot), ())
        repeats = any(
            p.wrong_result is not None and p.wrong_result.recurrence is Recurrence.REPEATED
            for p in faulty
        )
        return pod.uid in self._were_wrong or repeats

    def is_wrong(self, pod: TaskPod) -> bool:
        """Whether its state, or its log, is."""
        boot, disk = pod.boot, pod.disk
        if boot is None or boot.core.parts is None:
            return False
        operators = boot.core.parts.loop.state.operators
        return self._wrong.any_wrong([getattr(operators, "fold", ""), *disk.values.values()])

    # --- what is guaranteed ---------------------------------------------------------------

    def look(self) -> None:
        """To be called often."""
        now = self._scheduler.now
        for pod in self._cluster.running_pods:
            if not isinstance(pod, TaskPod) or pod.boot is None:
                continue
            boot = pod.boot.core.status.boot_id
            if pod.boot.core.status.phase is TaskPhase.LIVE:
                self._live_since.setdefault(boot, now)
            else:
                self._live_since.pop(boot, None)
            if self._is_reached(pod):
                self._reached_at[pod.address] = now
            else:
                self._silent_at[pod.address] = now
        self._note_ready()
        for partition in self.faulty:
            if partition not in self.may_stay_wrong:
                self._check_protection(partition)
            self._check_memory(partition)
        for partition in [p for p in self.differences if self._is_over(p)]:
            del self.differences[partition]
            if not any(map(self._has_wrong_files, self._with_readers(partition))):
                self._remembered_by.pop(partition, None)

    def _note_ready(self) -> None:
        coordinator = self._cluster.coordinator
        boot = coordinator.boot if coordinator is not None else None
        if boot is None or not boot.core.ready:
            self.ready = None
        elif self.ready is None or self.ready[0] is not boot:
            self.ready = boot, self._scheduler.now

    def _check_protection(self, partition: Partition) -> None:
        pods = [p for p in self._pods_of(partition) if self.is_wrong(p)]
        boots = {p.boot.core.status.boot_id for p in pods if p.boot is not None}
        for boot, pod in [*self._wrong_boots.items()]:
            if partition_of(pod.slot) == partition and boot not in boots:
                del self._wrong_boots[boot]
                self._boot_ended(pod, boot)
        # The results of a single replica are accepted; one that was wrong may be so again.
        suspects = [p for p in self._pods_of(partition) if p in (*pods, *self.faulty[partition])]
        if any(not self._is_replicated(pod.slot) for pod in suspects):
            self._lose(partition, "by an edit, the second replica")
            return
        for pod in pods:
            if not (self._is_contained(pod) or self._has_right_partner(pod)):
                self._lose(partition, f"the partner of {pod.slot.key}")
                return

    def _check_memory(self, partition: Partition) -> None:
        """Once the coordinator that has found the difference is gone, only tasks that it has told
        know of it. A new one has read the responses of those that respond before it gives a desired
        state."""
        coordinator = self._cluster.coordinator
        boot = coordinator.boot if coordinator is not None else None
        if boot is not None and partition in boot.core.containment.comparison.disputes:
            self._remembered_by[partition] = boot
        if self._remembered_by.get(partition) in (None, boot):
            return
        is_ready = self.ready is not None
        for of in self._with_readers(partition) - self.may_stay_wrong:
            is_known = any(
                self._knows(pod, of) and (self._responds(pod) or not is_ready)
                for pod in self._cluster.pods.values()
            )
            if not is_known and self._has_wrong_files(of):
                self._log(f"all that knew that files of {of.key} may be wrong are lost")
                self.may_stay_wrong.add(of)

    def _with_readers(self, partition: Partition) -> set[Partition]:
        """A partition and all that depends on it."""
        return {partition, *downstream(self._graph, partition)}

    def _has_wrong_files(self, partition: Partition) -> bool:
        return any(
            self._wrong.any_wrong(files.values())
            for (_, of), files in self._cluster.sinks.files.items()
            if of == partition
        )

    def _knows(self, pod: TaskPod, partition: Partition) -> bool:
        """Whether a task has been told that its results, on which those of the partition depend,
        are held back; or one of the partition that it has to compare its files."""
        own = partition_of(pod.slot)
        depends = partition in (own, *downstream(self._graph, own))
        return (depends and self.is_held_back(pod)) or (own == partition and pod.disk.compare)

    def is_held_back(self, pod: TaskPod) -> bool:
        """Whether it was told so, by any coordinator."""
        desired = pod.boot.core.polls.desired if pod.boot is not None else None
        return desired is not None and desired.sinks_through is not None

    def _responds(self, pod: TaskPod) -> bool:
        return self._scheduler.now - self._reached_at.get(pod.address, -inf) <= _SILENT_S

    def _boot_ended(self, pod: TaskPod, boot: str) -> None:
        """A boot that was wrong has ended before the coordinator knew. If its pod is still there,
        its partition stays protected: the next boot finds the difference in the log. What
        downstream partitions have computed from it may be committed before that."""
        if boot not in self._contained_boots:
            is_gone = self._cluster.pods.get(pod.slot) is not pod
            self._lose(partition_of(pod.slot), f"{boot}, which was wrong", itself=is_gone)

    def _is_over(self, partition: Partition) -> bool:
        """Whether all that depends on a partition is right, and its replicas do not disagree."""
        coordinator = self._cluster.coordinator
        if coordinator is None or coordinator.boot is None:
            return False
        depends = self._with_readers(partition)
        return partition not in coordinator.boot.core.containment.comparison.disputes and not any(
            partition_of(slot) in depends
            and (self.is_wrong(pod) or self._wrong.any_wrong(pod.disk.values.values()))
            for slot, pod in self._cluster.pods.items()
        )

    def _lose(self, partition: Partition, what: str, itself: bool = True) -> None:
        lost = {*downstream(self._graph, partition), *([partition] if itself else [])}
        self._log(f"{what} is lost: results of {partition.key} may stay wrong")
        self.may_stay_wrong |= lost

    def _is_contained(self, pod: TaskPod) -> bool:
        """Whether the coordinator knows that its results are not trusted, or has known so; or a
        coordinator before it has told a task of the partition, which tells that to the new one."""
        assert pod.boot is not None
        partition, coordinator = partition_of(pod.slot), self._cluster.coordinator
        boot = coordinator.boot if coordinator is not None else None
        difference = self.differences.get(partition)
        if difference is None:  # nothing is in the log yet
            return False
        if boot is not None and boot.core.containment.comparison.is_untrusted(pod.slot):
            if difference.found_by is not boot:
                difference.found_by, difference.found_at = boot, self._scheduler.now
            self._remembered_by[partition] = boot
        is_known = difference.found_by is not None and (
            difference.found_by is boot
            or any(self.is_held_back(p) and self._responds(p) for p in self._pods_of(partition))
        )
        if is_known:
            self._contained_boots.add(pod.boot.core.status.boot_id)
        return is_known

    def _has_right_partner(self, pod: TaskPod) -> bool:
        if not self._responds(pod):
            return False
        for other in self._pods_of(partition_of(pod.slot)):
            if other is pod or other.boot is None or self.is_wrong(other):
                continue
            live_since = self._live_since.get(other.boot.core.status.boot_id, inf)
            keeps_up = other.disk.last >= pod.disk.last - _BEHIND_EPOCHS
            is_live = self._scheduler.now - live_since > _LIVE_S
            if is_live and keeps_up and self._responds(other):
                return True
        return False

    def _is_replicated(self, slot: Slot) -> bool:
        since = self._cluster.in_spec_since
        others = (Slot(slot.segment, slot.partition, replica) for replica in (0, 1))
        return all(since(other) is not None for other in others)

    def _is_reached(self, pod: TaskPod) -> bool:
        coordinator = self._cluster.coordinator
        if not pod.runs:
            return False
        if coordinator is None or not coordinator.runs:
            return True  # nobody misses it
        return self._cluster.network.is_connected(coordinator.address, pod.address)

    def was_reached_for(self, pod: TaskPod, seconds: float) -> bool:
        coordinator = self._cluster.coordinator
        runs = coordinator is not None and coordinator.runs
        return runs and self._scheduler.now - self._silent_at.get(pod.address, -inf) > seconds

    def _pods_of(self, partition: Partition) -> list[TaskPod]:
        return [p for s, p in self._cluster.pods.items() if partition_of(s) == partition]
