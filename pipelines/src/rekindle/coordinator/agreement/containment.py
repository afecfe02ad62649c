"""Contains wrong results: holds back reads, sinks and checkpoints while replicas disagree. Pure.

A disputed partition is not read. Its sinks, and those of all partitions downstream, write nothing
after the last epoch on which its replicas agreed, and checkpoints after that epoch are not
committed. One of its replicas, and tasks that may have read a wrong epoch, compute again from the
committed checkpoint.

Design: docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rekindle.coordinator.agreement.comparison import DigestComparison, UnverifiedCheckpoint
from rekindle.coordinator.agreement.disputes import Dispute
from rekindle.coordinator.agreement.results import (
    DIGEST_NAMES,
    Computation,
    EpochDigests,
    epoch_digests,
    have_same_digests,
)
from rekindle.coordinator.checkpoints.committer import Committer
from rekindle.coordinator.model import Generation
from rekindle.coordinator.tasks.graph import Graph, downstream
from rekindle.coordinator.tasks.membership import Membership, Task, TaskPredicate
from rekindle.protocol import EntryRef, PollResponse, TaskPhase
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Segment, Slot, partition_of

_AGREEMENT_WAIT_EPOCHS = 16
"""A checkpoint does not wait for the agreement of a replica that is this many epochs behind."""


class Containment:
    def __init__(self) -> None:
        self.comparison = DigestComparison()
        self._sinks_through: dict[Partition, int] = {}
        # Partitions with output that was untrusted, or with operators that older ones had.
        self._untrusted: set[Partition] = set()
        self._generation: Generation | None = None
        self._reported: dict[Slot, tuple[PollResponse, Mapping[int, EpochDigests]]] = {}

    # --- desired state of tasks ---

    def sinks_through(self, slot: Slot) -> int | None:
        """The newest epoch that a task's sinks may write; None: all. A diverged replica writes
        none, and neither does a task that has to compute again."""
        if slot in self.comparison.diverged:
            return NO_EPOCH
        is_to_restart = self.comparison.boot_to_restart(slot) is not None
        return self._sinks_through.get(partition_of(slot), NO_EPOCH if is_to_restart else None)

    def disputed_epochs(self, partition: Partition) -> tuple[int, ...]:
        dispute = self.comparison.disputes.get(partition)
        return () if dispute is None else (dispute.epoch,)

    def disputed_digest(self, partition: Partition) -> str | None:
        """The digest in which the results of the disputed epochs differ."""
        dispute = self.comparison.disputes.get(partition)
        return None if dispute is None else dispute.digest_name

    def boot_to_restart(self, slot: Slot) -> str | None:
        """The id of the boot that has to compute again."""
        return self.comparison.boot_to_restart(slot)

    def discards_log(self, slot: Slot) -> bool:
        """Whether a boot that has not started is to start without the log of those before."""
        return self.comparison.discards_log(slot)

    def may_have_wrong_files(self, partition: Partition, graph: Graph) -> bool:
        """Whether sinks of a partition may have written untrusted output. The tasks that have to
        compare the files may be replaced before they do so."""
        readers = (downstream(graph, untrusted) for untrusted in self._untrusted)
        return partition in self._untrusted or any(partition in found for found in readers)

    # --- events ---

    def configured(self, generation: Generation, before: Graph | None) -> None:
        """A new generation, with other partitions and replicas. `before`: the graph of the one
        before."""
        segments = generation.topology.segments
        found = {Partition(s.id, i): s.replicas for s in segments for i in range(s.partitions)}
        self.comparison.configured(found)
        self._generation = generation
        if before is not None:
            written = {p for u in self._untrusted for p in (u, *downstream(before, u))}
            self._untrusted = {c for p in written for c in self._with_operators_of(p)}

    def forget(self, slot: Slot) -> None:
        """The slot's task ended or was replaced."""
        self._reported.pop(slot, None)
        self.comparison.forget(slot)

    def first_response(self, task: Task, graph: Graph | None) -> None:
        """The first response of a task to this coordinator. If an older coordinator started it, it
        may have read output that is known to be untrusted."""
        started = task.response is not None and task.response.restored_from is not None
        if graph is None or not started:
            return
        if any(task.partition in downstream(graph, p) for p in self._untrusted):
            self.comparison.discard(_computations(task))

    def observed(
        self,
        slot: Slot,
        response: PollResponse,
        tasks: Membership,
        graph: Graph | None,
        committer: Committer,
    ) -> bool:
        """Compare the digests of a response; True if the state of a replica or dispute changed."""
        computation = _computation(slot, response, tasks)
        copied = response.lent_from
        restored_from = response.restored_from if copied is None else None
        digests = self._digests_in(slot, response)
        changed = self.comparison.observed(computation, digests, restored_from, copied)
        for done in response.checkpoints:
            if committer.has_committed(slot, done):
                self.comparison.committed(computation, done.epoch)
        for done in response.checkpoints:
            if committer.contradicts(slot, done) and slot not in self.comparison.diverged:
                self.comparison.checkpoint_differed(slot, computation.incarnation, done.epoch)
                changed = True
        if not changed:
            return False
        for diverged in self.comparison.diverged:
            committer.distrust(diverged)
        self._contain(tasks, graph, committer)
        return True

    def boot_observed(self, slot: Slot, response: PollResponse, tasks: Membership) -> bool:
        """Of a task that cannot be compared now: True if it is to be trusted again, since it
        computes again as it had to."""
        has_started = response.restored_from is not None
        return self.comparison.boot_observed(_computation(slot, response, tasks), has_started)

    def keep_contained(
        self,
        slot: Slot,
        response: PollResponse,
        tasks: Membership,
        graph: Graph | None,
        committer: Committer,
    ) -> bool:
        """Contain the results of a task that an older coordinator has contained; True if this
        changed the state of a replica or dispute. Nothing is done while a task of a partition that
        is not disputed has computed none of these epochs."""
        contained = response.contained
        if contained is None:
            return False
        if not contained.disputed and max(response.digests, default=NO_EPOCH) <= contained.after:
            return False
        computation = _computation(slot, response, tasks)
        digests = epoch_digests(response)
        disputed = {epoch: digests.get(epoch) for epoch in contained.disputed}
        listed = [task.slot for task in tasks]
        name = contained.disputed_digest
        digest_name = name if name in DIGEST_NAMES else "chained"
        if not self.comparison.containment_inherited(
            computation, contained.after, disputed, listed, digest_name
        ):
            return False
        self._contain(tasks, graph, committer)
        return True

    def contradicted(
        self,
        slot: Slot,
        response: PollResponse,
        tasks: Membership,
        graph: Graph | None,
        committer: Committer,
    ) -> bool:
        """Contain what a task has contradicted; True if it is new."""
        if response.contradiction is None:
            return False
        computation, epoch = _computation(slot, response, tasks), response.contradiction.epoch
        if not self.comparison.result_contradicted(computation, epoch):
            return False
        self._contain(tasks, graph, committer)
        return True

    def restart(self, tasks: Iterable[Task]) -> None:
        """These tasks compute again, for another reason than wrong results."""
        self.comparison.discard(c for task in tasks for c in _computations(task))

    def update(self, graph: Graph | None) -> None:
        """Derive from the disputes the epochs through which sinks may write."""
        self._sinks_through = {}
        if graph is None:
            return
        for dispute in self.comparison.disputes.values():
            for partition in (dispute.partition, *downstream(graph, dispute.partition)):
                known = self._sinks_through.get(partition, dispute.agreed_through)
                self._sinks_through[partition] = min(known, dispute.agreed_through)

    def request_recomputation(
        self, tasks: Membership, is_suspected: TaskPredicate, now: float
    ) -> None:
        """Let disputed partitions be computed again."""
        listed = [task.slot for task in tasks]
        for partition in list(self.comparison.disputes):
            found = [t for t in tasks if t.partition == partition and not is_suspected(t)]
            alive = [c for task in found for c in _computations(task)]
            waiting = [task.slot for task in found if task.phase is TaskPhase.WAITING]
            self.comparison.request_recomputation(partition, alive, now, listed, waiting)

    def agreed_entries(
        self,
        slot: Slot,
        saved: Iterable[EntryRef],
        replicas: Mapping[Partition, list[Task]],
        is_suspected: TaskPredicate,
    ) -> list[EntryRef]:
        """The entries of a task that its partition agrees with: none if the replica is untrusted;
        otherwise those at epochs whose result two computations have had, this boot among them, or
        on which all other replicas agree with it, including copies and those that catch up, except
        replicas that are far behind. (It is not enough that a lender and its copy agree: a
        third replica, a few epochs behind, may show that both are wrong.)"""
        if self.comparison.is_untrusted(slot):
            return []
        partition = partition_of(slot)
        through = self._sinks_through.get(partition)
        kept = [d for d in saved if through is None or d.epoch <= through]
        if not self.comparison.is_compared(slot):  # one more than the partition has by now
            return kept
        witnessed = self.comparison.witnessed_by(slot)
        others = self._agreement_with_others(slot, replicas, is_suspected)
        return [
            d
            for d in kept
            if d.epoch <= witnessed
            or all(
                reached < d.epoch - _AGREEMENT_WAIT_EPOCHS or d.epoch <= agreed
                for reached, agreed in others
            )
        ]

    def agreed_epoch(
        self,
        slot: Slot,
        response: PollResponse,
        replicas: Mapping[Partition, list[Task]],
        is_suspected: TaskPredicate,
    ) -> int:
        """The newest epoch that a task's boot has computed, saved or not, and that its partition
        agrees with; NO_EPOCH if the replica is untrusted. Here replicas that are far behind are
        waited for: how far is a matter of entries."""
        if self.comparison.is_untrusted(slot) or not self.comparison.is_compared(slot):
            return NO_EPOCH
        computed = max(response.digests, default=NO_EPOCH)
        computed = min(computed, self._sinks_through.get(partition_of(slot), computed))
        others = self._agreement_with_others(slot, replicas, is_suspected)
        by_all = min((agreed for _, agreed in others), default=computed)
        return min(computed, max(by_all, self.comparison.witnessed_by(slot)))

    def _agreement_with_others(
        self,
        slot: Slot,
        replicas: Mapping[Partition, list[Task]],
        is_suspected: TaskPredicate,
    ) -> list[tuple[int, int]]:
        """Of each other replica that serves: the epoch that it has reached, and through which it
        agrees."""
        return [
            (t.response.stable_epoch, self.comparison.agree_through(slot, t.slot))
            for t in replicas.get(partition_of(slot), ())
            if t.slot != slot and self.comparison.is_compared(t.slot)
            if t.response and t.phase.serves and not is_suspected(t)
        ]

    # --- report ---

    def problems(self, generation: Generation | None) -> list[str]:
        found = [f"{d.slot.key}: {d.message}" for d in self.comparison.diverged.values()]
        return found + [_describe(d, generation) for d in self.comparison.disputes.values()]

    def inconsistent(self, generation: Generation | None, tasks: Iterable[Task]) -> tuple[str, ...]:
        """Disputes and what they left undecided, logs that were wrong, and files that were written
        with other rows."""
        tasks = tuple(tasks)
        disputes = [_describe(d, generation) for d in self.comparison.disputes.values()]
        disputes += [_describe_unverified(u, generation) for u in self.comparison.unverified]
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

    # --- private ---

    def _digests_in(self, slot: Slot, response: PollResponse) -> Mapping[int, EpochDigests]:
        """The same object as long as a replica reports the same: there are several polls an
        epoch."""
        known = self._reported.get(slot)
        if known is None or not have_same_digests(known[0], response):
            known = self._reported[slot] = (response, epoch_digests(response))
        return known[1]

    def _contain(self, tasks: Membership, graph: Graph | None, committer: Committer) -> None:
        """Hold back all output and checkpoints that depend on untrusted epochs."""
        if graph is None:
            return
        for untrusted in self.comparison.take_untrusted_output():
            self._untrusted.update(self._with_operators_of(untrusted.partition))
            readers = downstream(graph, untrusted.partition)
            for partition in (untrusted.partition, *readers):
                committer.withhold(partition, untrusted.after)
                self.comparison.distrust(partition, untrusted.after)
            # All replicas of readers: they read ahead, and have logs of earlier boots.
            for reader in readers:
                found = [c for t in tasks if t.partition == reader for c in _computations(t)]
                self.comparison.input_was_wrong(reader, found)
        self.update(graph)

    def _with_operators_of(self, partition: Partition) -> list[Partition]:
        """Partitions of the generation that have some of its operators: itself, or those into
        which an edit has fused them. Their sinks go on with its files."""
        if self._generation is None:
            return [partition]
        operator_ids = self._generation.operator_ids
        mine = set(operator_ids.get(partition.segment, ()))
        return [
            Partition(segment.id, partition.index)
            for segment in self._generation.topology.segments
            if partition.index < segment.partitions and mine & set(operator_ids[segment.id])
        ]


def _computations(task: Task) -> list[Computation]:
    """The computation of a task, if it has one."""
    if task.response is None or not task.pod.may_be_running:
        return []
    return [Computation(task.slot, task.pod.incarnation, task.response.boot_id, task.pod.node)]


def _computation(slot: Slot, response: PollResponse, tasks: Membership) -> Computation:
    """The computation that a response is from."""
    task = tasks.find(slot, response.task.incarnation)
    node = task.pod.node if task is not None else None
    return Computation(slot, response.task.incarnation, response.boot_id, node)


def _describe(dispute: Dispute, generation: Generation | None) -> str:
    where = _where(dispute.partition, generation)
    if dispute.unresolved:
        segment = _segment(dispute.partition, generation)
        operators = ", ".join(segment.nodes) if segment is not None else where
        return (
            f"{where}: epoch {dispute.epoch} was computed {len(dispute.results)} times with "
            f"different results; operator {operators} is not deterministic: change its definition. "
            f"Its queries write nothing after epoch {dispute.agreed_through}"
        )
    return (
        f"{where}: replicas disagree on epoch {dispute.epoch}; it is computed again from the "
        "committed checkpoint, and nothing is written after epoch "
        f"{dispute.agreed_through} meanwhile"
    )


def _describe_unverified(unverified: UnverifiedCheckpoint, generation: Generation | None) -> str:
    return (
        f"{_where(unverified.partition, generation)}: replicas disagreed, and go on from the "
        f"checkpoint of epoch {unverified.checkpoint}, which only one of them may have computed: "
        f"results after epoch {unverified.agreed_through} may be wrong"
    )


def _where(partition: Partition, generation: Generation | None) -> str:
    segment = _segment(partition, generation)
    return f"{segment.name if segment is not None else partition.segment}/{partition.index}"


def _segment(partition: Partition, generation: Generation | None) -> Segment | None:
    segments = generation.topology.segments if generation is not None else ()
    return next((s for s in segments if s.id == partition.segment), None)
