"""What is promised while a replica computes wrong results, and for which partitions.

A wrong result is found by comparison with the other replica of its partition. So nothing is
promised any more for a partition, and for what reads it, if that replica is lost, or the wrong one
ends, before the coordinator knows of the difference; or if that coordinator is lost together with
all tasks that it has told.

Design: docs/simulation.md#wrong-results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.model import Partition, partition_of
from rekindle.coordinator.tasks.graph import build_graph, downstream
from rekindle.protocol import PollRequest, TaskPhase
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Slot
from rekindle_testing.simulation.kube.objects import TOPOLOGIES
from rekindle_testing.simulation.pod import TaskPod
from rekindle_testing.simulation.wrong_results import Recurrence

if TYPE_CHECKING:
    from rekindle_testing.simulation.cluster import SimulatedCluster

_CONFLICT = re.compile(r"query (\S+): files of (\S+) at epochs \[([\d, ]+)\] differ")
_File = tuple[str, Partition, int]
"""Query, partition and epoch."""
_LOOK_S = 0.1
_LIVE_S = 2.0
"""A replica that was Live for so long is so for the coordinator."""
_SILENT_S = 1.2
"""A replica that was silent for so long may be suspected soon."""
_NAMED_S = 2.0
"""A person has seen what the status has said for so long."""
_TOLD_S = 3.0
"""After so long all tasks that respond have been told of a difference."""
_BEHIND_EPOCHS = 12
"""A replica that is further behind may soon not be waited for."""


@dataclass(slots=True)
class _Difference:
    """Wrong values of a partition, until none is left of it or of what reads it. `first`: their
    lowest epoch; `found_by`: the boot of the coordinator that has found them; it must not forget
    that."""

    first: int
    found_by: object = None
    found_at: float = inf


class WrongResultChecks:
    def __init__(self, cluster: SimulatedCluster, log: Callable[[str], None]) -> None:
        self.happened = 0  # pods that have computed a wrong result
        self.may_stay_wrong: set[Partition] = set()
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._wrong = cluster.wrong_results
        self._graph = build_graph(cluster.topology)
        self._log = log
        self._looks = False
        # Pods that a fault has made compute a wrong result, by partition. While there is
        # one, no other pod of the partition becomes one.
        self._faulty: dict[Partition, list[TaskPod]] = {}
        self._were_wrong: set[str] = set()  # uids of pods that have put out wrong values
        self._differences: dict[Partition, _Difference] = {}
        self._live_since: dict[str, float] = {}  # by uid and boot
        self._reached_at: dict[str, float] = {}  # by address
        # In how many calls of `_look` the status has named a file.
        self._named_looks: dict[_File, int] = {}
        self._silent_at: dict[str, float] = {}
        self._wrong_boots: dict[str, TaskPod] = {}  # by id
        self._contained_boots: set[str] = set()
        # The coordinator that has found the newest difference, which may have wrong files.
        self._remembered_by: dict[Partition, object] = {}
        # A coordinator that has not read a manifest yet gives no desired state.
        self._ready: tuple[object, float] | None = None  # its boot, and since when it is ready

    # --- which results are wrong ------------------------------------------------------

    def may_begin(self, pod: TaskPod) -> bool:
        """Whether a pod may compute a wrong result now: its partition has two replicas, the other
        one is Live, and no other one was wrong."""
        partition = partition_of(pod.slot)
        if partition in self.may_stay_wrong or not self._is_replicated(pod.slot):
            return False
        if any(other is not pod for other in self._faulty.get(partition, ())):
            return False
        return self._has_right_partner(pod)

    def began(self, pod: TaskPod) -> None:
        faulty = self._faulty.setdefault(partition_of(pod.slot), [])
        if pod not in faulty:
            faulty.append(pod)
            self.happened += 1

    def appended(self, pod: TaskPod, epoch: int) -> None:
        """A wrong value is in a log."""
        partition = partition_of(pod.slot)
        self._were_wrong.add(pod.uid)
        found = self._differences.setdefault(partition, _Difference(epoch))
        found.first = min(epoch, found.first)
        if pod.boot is not None and partition in self._faulty:
            self._wrong_boots[pod.boot.core.status.boot_id] = pod

    def must_be_right(self, partition: Partition) -> bool:
        """Whether nothing wrong may be committed of a partition."""
        return partition not in self.may_stay_wrong

    def may_be_replaced(self, pod: TaskPod) -> bool:
        """Whether replicas may decide that a pod is replaced: it was wrong, or a replica repeats a
        wrong result, so that a third node has to decide."""
        faulty = self._faulty.get(partition_of(pod.slot), ())
        repeats = any(
            p.wrong_result is not None and p.wrong_result.recurrence is Recurrence.REPEATED
            for p in faulty
        )
        return pod.uid in self._were_wrong or repeats

    # --- what is promised ---------------------------------------------------------------

    def watch(self) -> None:
        """From the first fault on."""
        if not self._looks:
            self._looks = True
            self._look()

    def _look(self) -> None:
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
        named = {*self._named_files()}
        if self._cluster.api_faults.none_for_s < _NAMED_S:
            named |= {*self._found_files()}  # the status may not have been written
        for name in named:
            self._named_looks[name] = self._named_looks.get(name, 0) + 1
        for partition in self._faulty:
            if partition not in self.may_stay_wrong:
                self._check_protection(partition)
            self._check_memory(partition)
        for partition in [p for p in self._differences if self._is_over(p)]:
            del self._differences[partition]
            if not any(map(self._has_wrong_files, self._with_readers(partition))):
                self._remembered_by.pop(partition, None)
        self._scheduler.after(_LOOK_S, self._look)

    def _note_ready(self) -> None:
        coordinator = self._cluster.coordinator
        boot = coordinator.boot if coordinator is not None else None
        if boot is None or not boot.core.ready:
            self._ready = None
        elif self._ready is None or self._ready[0] is not boot:
            self._ready = boot, self._scheduler.now

    def _check_protection(self, partition: Partition) -> None:
        pods = [p for p in self._pods_of(partition) if self._is_wrong(p)]
        boots = {p.boot.core.status.boot_id for p in pods if p.boot is not None}
        for boot, pod in [*self._wrong_boots.items()]:
            if partition_of(pod.slot) == partition and boot not in boots:
                del self._wrong_boots[boot]
                self._boot_ended(pod, boot)
        for pod in pods:
            is_alone = not self._is_replicated(pod.slot)
            if is_alone or not (self._is_contained(pod) or self._has_right_partner(pod)):
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
        is_ready = self._ready is not None
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
        return (depends and self._is_held_back(pod)) or (own == partition and pod.disk.compare)

    def _is_held_back(self, pod: TaskPod) -> bool:
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
            and (self._is_wrong(pod) or self._wrong.any_wrong(pod.disk.values.values()))
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
        difference = self._differences.get(partition)
        if difference is None:  # nothing is in the log yet
            return False
        if boot is not None and boot.core.containment.comparison.is_untrusted(pod.slot):
            if difference.found_by is not boot:
                difference.found_by, difference.found_at = boot, self._scheduler.now
            self._remembered_by[partition] = boot
        is_known = difference.found_by is not None and (
            difference.found_by is boot
            or any(self._is_held_back(p) and self._responds(p) for p in self._pods_of(partition))
        )
        if is_known:
            self._contained_boots.add(pod.boot.core.status.boot_id)
        return is_known

    def _has_right_partner(self, pod: TaskPod) -> bool:
        if not self._responds(pod):
            return False
        for other in self._pods_of(partition_of(pod.slot)):
            if other is pod or other.boot is None or self._is_wrong(other):
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

    def _is_wrong(self, pod: TaskPod) -> bool:
        """Whether its state, or its log, is."""
        boot, disk = pod.boot, pod.disk
        if boot is None or boot.core.parts is None:
            return False
        operators = boot.core.parts.loop.state.operators
        return self._wrong.any_wrong([getattr(operators, "fold", ""), *disk.values.values()])

    def _is_reached(self, pod: TaskPod) -> bool:
        coordinator = self._cluster.coordinator
        if not pod.runs:
            return False
        if coordinator is None or not coordinator.runs:
            return True  # nobody misses it
        return self._cluster.network.is_connected(coordinator.address, pod.address)

    def _was_reached_for(self, pod: TaskPod, seconds: float) -> bool:
        coordinator = self._cluster.coordinator
        runs = coordinator is not None and coordinator.runs
        return runs and self._scheduler.now - self._silent_at.get(pod.address, -inf) > seconds

    def _pods_of(self, partition: Partition) -> list[TaskPod]:
        return [p for s, p in self._cluster.pods.items() if partition_of(s) == partition]

    # --- what a coordinator knows and says ---------------------------------------------

    def compared(self, coordinator: Coordinator, slot: Slot) -> None:
        """A response was compared: a replica that has another, wrong result is not trusted. Results
        of a boot that has to compute again do not count: it may have read a wrong epoch."""
        partition = partition_of(slot)
        if not self.happened or partition in self.may_stay_wrong:
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
        if not self.happened or poll.ask_only:
            return
        self._check_release(slot, poll)
        for partition in coordinator.containment.comparison.disputes:
            depends = (partition, *downstream(self._graph, partition))
            if partition not in self._faulty or partition_of(slot) not in depends:
                continue
            difference, through = self._differences.get(partition), poll.sinks_through
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
        if pod is None or pod.boot is None or partition_of(slot) in self.may_stay_wrong:
            return
        if poll.fence < pod.boot.core.polls.fence:
            return
        if self._is_held_back(pod) and poll.sinks_through is None and self._is_wrong(pod):
            self._failed(f"I2: {slot.key} has wrong results, and is no longer held back")

    def _committed(self, partition: Partition) -> int:
        newest = self._cluster.store.newest
        refs = newest.entries.get(partition.key) if newest is not None else None
        return refs[0].epoch if refs else NO_EPOCH

    def writes(self, pod: TaskPod, epoch: int, value: str) -> None:
        """A sink begins to write an epoch. Nothing wrong is written once the coordinator has found
        the difference, and has said so."""
        partition, now = partition_of(pod.slot), self._scheduler.now
        if partition in self.may_stay_wrong or not self._wrong.is_wrong(value):
            return
        coordinator = self._cluster.coordinator
        boot = coordinator.boot if coordinator is not None else None
        causes = [p for p in self._faulty if partition in (p, *downstream(self._graph, p))]
        differences = [self._differences[p] for p in causes if p in self._differences]
        known_since = [
            difference.found_at
            for difference in differences
            if boot is not None and difference.found_by is boot and difference.first <= epoch
        ]
        if self._ready is None or self._ready[0] is not boot:
            return
        known_since.append(self._ready[1])
        is_told = all(now - at > _TOLD_S for at in known_since) and len(known_since) > len(causes)
        if is_told and self._was_reached_for(pod, _TOLD_S):
            self._failed(
                f"I2: {pod.slot.key} writes a wrong result of epoch {epoch}, "
                f"{now - max(known_since):.1f} s after the difference was found"
            )

    # --- the end ------------------------------------------------------------------------

    def not_done(self) -> list[str]:
        """What is not as in a run without faults."""
        if not self.happened:
            return []
        found = []
        for slot, pod in self._cluster.pods.items():
            if self.must_be_right(partition_of(slot)) and self._is_wrong(pod):
                found.append(f"results of {slot.key} are wrong")
        sinks, expected = self._cluster.sinks, self._cluster.checks.expected
        for (query, partition), files in sinks.files.items():
            if self.must_be_right(partition):
                wrong = [
                    e
                    for e, value in files.items()
                    if value != expected.output(partition, e)
                    and not self._was_named(query, partition, e)
                ]
                wrong += sinks.deleted.get((query, partition), ())
                if wrong:
                    found.append(f"files of {query} {partition.key} are wrong: {sorted(wrong)}")
        coordinator = self._cluster.coordinator
        if coordinator is not None and coordinator.boot is not None:
            core = coordinator.boot.core
            found += core.containment.problems(core.generation)
        return found

    def delete_files_reported_wrong(self) -> None:
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

    def _was_named(self, query: str, partition: Partition, epoch: int) -> bool:
        """Whether a file was named for some time, or until the task ended that had named it, if it
        goes on from a later epoch now: what such a task knows ends with it, and files are compared
        from the restore point on."""
        name = query, partition, epoch
        looks = self._named_looks.get(name, 0)
        is_enough = looks * _LOOK_S > _NAMED_S or self._goes_on_after(partition, epoch)
        return looks > 0 and is_enough and name not in self._named_files()

    def _goes_on_after(self, partition: Partition, epoch: int) -> bool:
        """Whether all its tasks have started from a later checkpoint."""
        boots = [p.boot for p in self._pods_of(partition) if p.boot is not None]
        starts = [boot.core.status.restored_from for boot in boots]
        return bool(starts) and all(start is not None and start >= epoch for start in starts)

    def _failed(self, message: str) -> None:
        self._cluster.checks.failed(message)


def _files_in(text: str) -> list[_File]:
    found = []
    for query, key, numbers in re.findall(_CONFLICT, text):
        segment, _, index = key.partition("/")
        partition = Partition(segment, int(index))
        found += [(query, partition, int(epoch)) for epoch in numbers.split(", ")]
    return found
