"""What is held back while replicas disagree: reads, sinks and checkpoints. Pure.

Nobody reads a disputed partition. Its sinks, and those of all that read it, write nothing after the
last epoch on which its replicas agreed, and no checkpoint passes that. What may have read a wrong
epoch computes again from the committed checkpoint, as one of the replicas does.

Design: docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rekindle.coordinator.agreement.comparison import (
    Computation,
    DigestComparison,
    Dispute,
    claims_of,
)
from rekindle.coordinator.checkpoints.committer import Committer
from rekindle.coordinator.model import Generation, Partition, partition_of
from rekindle.coordinator.tasks.graph import Graph, downstream
from rekindle.coordinator.tasks.membership import Membership, Task
from rekindle.coordinator.tasks.routes import TaskPredicate
from rekindle.protocol import CheckpointDone, PollResponse
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Segment, Slot

_WAIT_EPOCHS = 16
"""How far a replica may stand behind another one whose checkpoint waits for its agreement."""


class Containment:
    def __init__(self) -> None:
        self.comparison = DigestComparison()
        self._sound_through: dict[Partition, int] = {}

    # --- what tasks are told ---

    def sound_through(self, slot: Slot) -> int | None:
        """The newest epoch that a task's sinks may write; None: all. One that was wrong writes
        none."""
        if slot in self.comparison.found:
            return NO_EPOCH
        return self._sound_through.get(partition_of(slot))

    def disputed_epochs(self, partition: Partition) -> tuple[int, ...]:
        dispute = self.comparison.disputes.get(partition)
        return () if dispute is None else (dispute.epoch,)

    def must_restart(self, slot: Slot) -> str | None:
        return self.comparison.must_restart(slot)

    # --- events ---

    def configured(self, generation: Generation) -> None:
        """A generation that is new: partitions and their replicas may be others."""
        segments = generation.topology.segments
        found = {Partition(s.id, i): s.replicas for s in segments for i in range(s.partitions)}
        self.comparison.configured(found)

    def observed(
        self,
        slot: Slot,
        response: PollResponse,
        tasks: Membership,
        graph: Graph | None,
        committer: Committer,
    ) -> bool:
        """Compare what a task says; True if this changed what is known of anybody."""
        by = Computation(slot, response.task.incarnation, response.boot_id)
        changed = self.comparison.observed(by, claims_of(response), response.restored_from)
        if response.contradiction is not None:
            changed |= self.comparison.took_back(by, response.contradiction.epoch)
        for done in response.checkpoints:
            if committer.contradicts(slot, done) and slot not in self.comparison.found:
                self.comparison.contradicted(slot, by.incarnation, done.epoch)
                changed = True
        if not changed:
            return False
        for wrong in self.comparison.found:
            committer.distrust(wrong)
        self._spread(tasks, graph, committer)
        return True

    def ask_again(self, tasks: Membership, is_suspected: TaskPredicate, now: float) -> None:
        """Have disputed partitions computed once more."""
        for partition in self.comparison.disputes:
            alive = [
                by
                for task in tasks
                if task.partition == partition and not is_suspected(task)
                for by in _computation(task)
            ]
            self.comparison.ask_again(partition, alive, now)

    def sound(
        self,
        slot: Slot,
        done: Sequence[CheckpointDone],
        replicas: Mapping[Partition, list[Task]],
        is_suspected: TaskPredicate,
    ) -> list[CheckpointDone]:
        """Which of a task's checkpoints may be committed: none of a doubted replica, none that
        another Live replica has not agreed with, unless that one is far behind."""
        if self.comparison.is_doubted(slot):
            return []
        partition = partition_of(slot)
        through = self._sound_through.get(partition)
        kept = [d for d in done if through is None or d.epoch <= through]
        agreed = self.comparison.agreed(partition)
        others = [
            t.response.stable_epoch
            for t in replicas.get(partition, ())
            if t.slot != slot and t.response and t.phase == "Live" and not is_suspected(t)
            if t.response.chained
        ]
        return [
            d
            for d in kept
            if d.epoch <= agreed or all(other < d.epoch - _WAIT_EPOCHS for other in others)
        ]

    # --- what is said ---

    def problems(self, generation: Generation | None) -> list[str]:
        found = [f"{d.slot.key}: {d.message}" for d in self.comparison.found.values()]
        return found + [_said(d, generation) for d in self.comparison.disputes.values()]

    def inconsistent(self, generation: Generation | None, tasks: Iterable[Task]) -> tuple[str, ...]:
        """Disputes, logs that were wrong, and files that were written with other rows."""
        tasks = tuple(tasks)
        disputes = [_said(d, generation) for d in self.comparison.disputes.values()]
        disputes += [
            f"{_where(task.partition, generation)}: {task.response.contradiction.message}"
            for task in tasks
            if task.response is not None and task.response.contradiction is not None
        ]
        conflicts = {
            f"query {sink.assigned.query}: {sink.conflict}"
            for task in tasks
            if task.response is not None
            for sink in task.response.sinks
            if sink.conflict is not None
        }
        return (*disputes, *sorted(conflicts))

    # --- inside ---

    def _spread(self, tasks: Membership, graph: Graph | None, committer: Committer) -> None:
        """Hold back all that comes after what is in doubt."""
        if graph is None:
            return
        for doubt in self.comparison.take_doubts():
            readers = downstream(graph, doubt.partition)
            for partition in (doubt.partition, *readers):
                committer.withhold(partition, doubt.after)
            self.comparison.discard(
                by
                for task in tasks
                if task.partition in readers  # all: they read ahead, and have logs of earlier lives
                for by in _computation(task)
            )
        self.derive(graph)

    def derive(self, graph: Graph | None) -> None:
        """From the disputes as they are now."""
        self._sound_through = {}
        if graph is None:
            return
        for dispute in self.comparison.disputes.values():
            for partition in (dispute.partition, *downstream(graph, dispute.partition)):
                known = self._sound_through.get(partition, dispute.after)
                self._sound_through[partition] = min(known, dispute.after)


def _computation(task: Task) -> list[Computation]:
    if task.response is None or not task.pod.runs:
        return []
    return [Computation(task.slot, task.pod.incarnation, task.response.boot_id)]


def _said(dispute: Dispute, generation: Generation | None) -> str:
    where = _where(dispute.partition, generation)
    if dispute.unresolved:
        segment = _segment(dispute.partition, generation)
        operators = ", ".join(segment.nodes) if segment is not None else where
        return (
            f"{where}: epoch {dispute.epoch} was computed {len(dispute.claims)} times with other "
            f"results each time; operator {operators} is not deterministic: change its definition. "
            f"Its queries write nothing after epoch {dispute.after}"
        )
    return (
        f"{where}: replicas disagree on epoch {dispute.epoch}; it is computed again from the "
        f"committed checkpoint, and nothing is written after epoch {dispute.after} meanwhile"
    )


def _where(partition: Partition, generation: Generation | None) -> str:
    segment = _segment(partition, generation)
    return f"{segment.name if segment is not None else partition.segment}/{partition.index}"


def _segment(partition: Partition, generation: Generation | None) -> Segment | None:
    segments = generation.topology.segments if generation is not None else ()
    return next((s for s in segments if s.id == partition.segment), None)
