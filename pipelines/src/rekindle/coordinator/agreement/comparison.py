"""Compares the results that replicas report for the same epochs. Pure.

The engine is deterministic, so results should be equal. If two differ, neither is trusted: the
partition is disputed (`disputes`), and one of its replicas has to compute again from the committed
checkpoint. Two equal results of three decide; the third replica has diverged, and is not compared
until its slot has a new incarnation.

A replica that repeats its own result decides nothing, since its node may be faulty; nor does any
later incarnation on the same node. Then the other replica computes again. If that one repeats its
result too, one of them is replaced, so that a third node decides. A replica that contradicts its
own result is replaced in the same way, if another one has repeated its result. If all contradict
themselves, or a new node agrees with none, the operator is not deterministic: the dispute is
*unresolved*, and nobody computes again.

A computation that has started from a partner's state is a copy: up to that epoch it has the
partner's results. It does not count as a second result for them, and is no party to a dispute; when
any result of its partition is found to be untrusted, it computes again. If two copies differ, the
dispute has no party before one of them has done so. It is no copy any more when a committed
checkpoint has its results.

Design: docs/design/coordinator.md#when-replicas-disagree, docs/design/lent-state.md#agreement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rekindle.coordinator.agreement.disputes import Dispute, DisputeEvent, Result
from rekindle.coordinator.agreement.results import Computation, EpochDigests
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Slot, partition_of

_MAX_EPOCHS = 64  # the newest ones, whose digests are kept for each computation
_STATE_WAIT_EPOCHS = 16  # a checkpoint is saved within so many epochs
RECOMPUTATION_TIMEOUT_S = 60.0
"""Time for a third computation to reach the epoch, after which another replica starts one."""


@dataclass(frozen=True, slots=True)
class Divergence:
    slot: Slot
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class UntrustedOutput:
    """Epochs of a partition after `after`, which may be wrong and may have been read."""

    partition: Partition
    after: int


@dataclass(frozen=True, slots=True)
class UnverifiedCheckpoint:
    """Replicas disagree after `agreed_through`, and go on from the state of a later epoch,
    `checkpoint`, which two of them are not known to have computed."""

    partition: Partition
    agreed_through: int
    checkpoint: int


@dataclass(slots=True)
class _Record:
    """The results of one computation; `reported`: those of its last response. `copied_through`: it
    has started from a partner's state after this epoch; `may_copy`: no partner was found to be
    untrusted since its first response. The newest epochs at which its result was equal: to that of
    each other computation (`agreed`); to another one, and two of the equal ones are no copies
    (`witnessed`); to that of a committed checkpoint (`committed`)."""

    computation: Computation
    digests: dict[int, EpochDigests]
    reported: Mapping[int, EpochDigests] | None = None
    copied_through: int | None = None
    may_copy: bool = True
    agreed: dict[Computation, int] = field(default_factory=dict)
    witnessed: int = NO_EPOCH
    committed: int = NO_EPOCH


class DigestComparison:
    """The newest digests of each replica's current boot, the disputes, and the diverged
    replicas."""

    def __init__(self) -> None:
        self._records: dict[Partition, dict[Slot, _Record]] = {}
        self._witnessed: dict[Partition, int] = {}
        self._committed: dict[Partition, tuple[int, EpochDigests]] = {}
        self._diverged: dict[Slot, Divergence] = {}
        self._disputes: dict[Partition, Dispute] = {}
        self._restarts: dict[Slot, Computation] = {}  # boots that have to compute again
        # Their boots before had to compute again, and may have ended before they knew.
        self._with_wrong_logs: set[Slot] = set()
        self._requested_at: dict[Partition, float] = {}  # when it was last to be computed again
        self._untrusted: list[UntrustedOutput] = []
        # The newest checkpoint whose results two have computed, and the one whose state two have.
        self._verified: dict[Partition, int] = {}
        self._verified_state: dict[Partition, int] = {}
        self._unverified: dict[Partition, UnverifiedCheckpoint] = {}  # the first of each
        # Boots whose contradiction, or inherited containment, has been processed.
        self._contradicted: dict[Slot, Computation] = {}
        self._inherited: dict[Slot, Computation] = {}
        self._replicas: Mapping[Partition, int] | None = None  # as configured; None: unknown

    # --- queries ---

    @property
    def diverged(self) -> Mapping[Slot, Divergence]:
        """Replicas that computed wrong results."""
        return self._diverged

    @property
    def disputes(self) -> Mapping[Partition, Dispute]:
        return self._disputes

    @property
    def unverified(self) -> tuple[UnverifiedCheckpoint, ...]:
        """Checkpoints from which replicas go on, although they do not agree on them."""
        return tuple(found for _, found in sorted(self._unverified.items()))

    def is_untrusted(self, slot: Slot) -> bool:
        """Whether readers must not read it: diverged, disputed, or about to compute again."""
        disputed = partition_of(slot) in self._disputes
        return disputed or slot in self._diverged or slot in self._restarts

    def is_compared(self, slot: Slot) -> bool:
        """Whether this slot, under whichever of its two numbers, is one of the configured replicas
        of its partition."""
        return self._replicas is None or slot.replica_index < self._replicas.get(
            partition_of(slot), 0
        )

    def boot_to_restart(self, slot: Slot) -> str | None:
        """The id of the boot of a slot's task that has to compute again; None if it need not."""
        found = self._restarts.get(slot)
        return found.boot if found is not None else None

    def discards_log(self, slot: Slot) -> bool:
        """Whether the slot's task is to start without its log."""
        return slot in self._with_wrong_logs

    def witnessed(self, partition: Partition) -> int:
        """The newest epoch on which two computations of a partition agreed that are no copies."""
        return self._witnessed.get(partition, NO_EPOCH)

    def witnessed_by(self, slot: Slot) -> int:
        """The newest epoch at which two computations had the result of a replica's current boot."""
        record = self._records.get(partition_of(slot), {}).get(slot)
        return record.witnessed if record is not None else NO_EPOCH

    def agree_through(self, one: Slot, other: Slot) -> int:
        """The newest epoch at which the current boots of two replicas had the same result."""
        records = self._records.get(partition_of(one), {})
        if one not in records or other not in records:
            return NO_EPOCH
        return records[one].agreed.get(records[other].computation, NO_EPOCH)

    def take_untrusted_output(self) -> list[UntrustedOutput]:
        """Untrusted output that was found since the last call."""
        found, self._untrusted = self._untrusted, []
        return found

    # --- events ---

    def configured(self, replicas: Mapping[Partition, int]) -> None:
        """The configured number of replicas of each partition. A single replica is not compared,
        unless it moves, and its dispute cannot be decided: its results are accepted."""
        self._replicas = replicas
        by_partition = (self._witnessed, self._committed, self._verified, self._verified_state)
        for known in (*by_partition, self._unverified, self._requested_at):
            for partition in known.keys() - replicas.keys():
                del known[partition]
        for records in self._records.values():
            for slot in [slot for slot in records if not self.is_compared(slot)]:
                del records[slot]
        for partition in [p for p in self._disputes if replicas.get(p, 0) < 2]:
            started = {*self._records.get(partition, {}), *self._restarts}
            if self._is_alone(partition, started):
                self._end(partition, DisputeEvent.SINGLE_REPLICA)

    def committed(self, computation: Computation, epoch: int) -> None:
        """The newest committed checkpoint has the state that this computation saved after an epoch:
        its results up to there will not be computed again."""
        record = self._records.get(partition_of(computation.slot), {}).get(computation.slot)
        if record is not None and record.computation == computation and epoch in record.digests:
            self._committed[partition_of(computation.slot)] = (epoch, record.digests[epoch])
            self._match_committed(partition_of(computation.slot))

    def observed(
        self,
        computation: Computation,
        digests: Mapping[int, EpochDigests],
        restored_from: int | None = None,
        copied_through: int | None = None,
    ) -> bool:
        """Process the digests of a computation. Returns whether a replica has diverged, a dispute
        changed, or a computation has to end. `restored_from`: the epoch of the checkpoint with
        which it started; `copied_through`: of the partner's state."""
        before = (dict(self._diverged), dict(self._disputes), dict(self._restarts))
        if self._restarts.get(computation.slot) == computation:
            return False  # this boot is about to end
        if not self.is_compared(computation.slot):
            return False
        has_started = restored_from is not None or copied_through is not None
        self.boot_observed(computation, has_started)
        partition = partition_of(computation.slot)
        changed_epochs = self._record(computation, digests)
        self._match_committed(partition)
        if copied_through is not None and not self._start_copy(computation, copied_through):
            return True
        self._decide(partition, computation, restored_from)
        for epoch in changed_epochs:
            if partition not in self._disputes:
                self._compare(partition, epoch)
        return before != (self._diverged, self._disputes, self._restarts)

    def boot_observed(self, computation: Computation, has_started: bool) -> bool:
        """A boot has responded; `has_started`: it has state. True if its replica had to compute
        again, and does so now."""
        slot = computation.slot
        if self._restarts.get(slot) == computation:
            return False
        restarted = self._restarts.pop(slot, None) is not None
        if restarted:
            self._with_wrong_logs.add(slot)
        if has_started:
            self._with_wrong_logs.discard(slot)
        return restarted

    def _record(self, computation: Computation, digests: Mapping[int, EpochDigests]) -> list[int]:
        """Keep the newest digests of each boot. Returns the epochs that are new or changed."""
        replicas = self._records.setdefault(partition_of(computation.slot), {})
        record = replicas.get(computation.slot)
        if record is None or record.computation != computation:
            diverged = self._diverged.get(computation.slot)
            if diverged is not None and diverged.incarnation != computation.incarnation:
                del self._diverged[computation.slot]
            record = replicas[computation.slot] = _Record(computation, {})
        if record.reported is digests:
            return []
        record.reported, known = digests, record.digests
        merged = {e: found.with_missing(known.get(e)) for e, found in digests.items()}
        changed = [epoch for epoch, found in merged.items() if known.get(epoch) != found]
        known.update(merged)
        for epoch in sorted(record.digests)[:-_MAX_EPOCHS]:
            if epoch not in digests:
                del record.digests[epoch]
        return sorted(changed)

    def _start_copy(self, computation: Computation, through: int) -> bool:
        """A task has begun with a lent state. Returns False if the lender may be untrusted: then
        the task computes again. (Its record exists since its first response, without state.)"""
        partition = partition_of(computation.slot)
        record = self._records[partition][computation.slot]
        if record.copied_through is not None:
            return True
        record.copied_through = through
        trusted = record.may_copy and partition not in self._disputes
        if not trusted and self._is_copy(partition, computation):
            self.discard([computation])
            return False
        return True

    def result_contradicted(self, computation: Computation, epoch: int) -> bool:
        """A replica computed another result than an earlier boot of it had in its log, which
        readers may have used. True if this is new."""
        if self._contradicted.get(computation.slot) == computation:
            return False
        self._contradicted[computation.slot] = computation
        self._untrusted.append(UntrustedOutput(partition_of(computation.slot), epoch - 1))
        return True

    def containment_inherited(
        self,
        computation: Computation,
        after: int,
        disputed: Mapping[int, EpochDigests | None],
        existing: Iterable[Slot] = (),
        digest_name: str = "chained",
    ) -> bool:
        """An older coordinator has contained the results of a boot after an epoch; `disputed`:
        epochs about which replicas disagree, each with the boot's result, if it has one;
        `digest_name`: in which digest; `existing`: slots of the tasks that exist. True if this is
        new."""
        if self._inherited.get(computation.slot) == computation:
            return False
        self._inherited[computation.slot] = computation
        partition = partition_of(computation.slot)
        self._discard_copies(partition)
        if not disputed:
            self.discard([computation])
        elif partition in self._disputes:
            return False
        elif self._has_partners(computation.slot, existing):
            epoch = min(disputed)
            result = disputed[epoch]
            # One that computes again does not count, nor one whose state is not saved yet.
            counts = result is not None and getattr(result, digest_name) is not None
            if self._restarts.get(computation.slot) == computation:
                counts = False
            results = ((computation, result),) if result is not None and counts else ()
            self._disputes[partition] = Dispute(partition, after, epoch, digest_name, results)
        elif self._is_configured(partition):
            return False
        self._untrusted.append(UntrustedOutput(partition, after))
        return True

    def checkpoint_differed(self, slot: Slot, incarnation: int, epoch: int) -> None:
        """A replica saved another state at `epoch` than the committed checkpoint has."""
        message = f"its state after epoch {epoch} differs from the checkpoint's"
        self._mark_diverged(slot, incarnation, message)
        partition = partition_of(slot)
        record = self._records.get(partition, {}).get(slot)
        if record is not None:  # otherwise its results count no more
            after = min(self.witnessed(partition), epoch - 1)
            self._go_on_from(partition, epoch, after, self._verified_state)
        agreed = record.witnessed if record is not None else NO_EPOCH
        has_copies = bool(self._discard_copies(partition))  # some may be of this replica's state
        if record is None or agreed < max(record.digests, default=epoch) or has_copies:
            self._untrusted.append(UntrustedOutput(partition, min(agreed, epoch)))

    def discard(self, computations: Iterable[Computation]) -> None:
        """These computations may have read a wrong epoch: their replicas compute again, and their
        results are discarded. An open dispute goes on without them: what they computed again may
        be as wrong."""
        for computation in computations:
            partition = partition_of(computation.slot)
            self._restarts[computation.slot] = computation
            self._records.get(partition, {}).pop(computation.slot, None)
            dispute = self._disputes.get(partition)
            if dispute is not None and dispute.is_party(computation):
                self._disputes[partition] = dispute.without(computation)
                self._requested_at.pop(partition, None)

    def input_was_wrong(self, partition: Partition, running: Sequence[Computation]) -> None:
        """All results of a partition may come from a wrong input, also those of boots that have
        ended: none counts any more, nor what they have decided."""
        self.discard(running)
        for computation in running:
            self._diverged.pop(computation.slot, None)
        if partition in self._disputes:
            self._disputes[partition] = self._disputes[partition].without_results()
            self._requested_at.pop(partition, None)

    def distrust(self, partition: Partition, after: int) -> None:
        """What two computations agreed on after this epoch may be wrong, or have a wrong input:
        what its replicas compute again has to agree again."""
        if partition in self._witnessed:
            self._witnessed[partition] = min(self._witnessed[partition], after)
        for record in self._records.get(partition, {}).values():
            record.witnessed = min(record.witnessed, after)

    def forget(self, slot: Slot) -> None:
        """The slot's task ended or was replaced. Its results in a dispute still count, unless
        that is unresolved."""
        partition = partition_of(slot)
        self._records.get(partition, {}).pop(slot, None)
        self._diverged.pop(slot, None)
        self._contradicted.pop(slot, None)
        self._inherited.pop(slot, None)
        self._restarts.pop(slot, None)
        self._with_wrong_logs.discard(slot)
        self._requested_at.pop(partition, None)  # it may have been the one that computes again
        dispute = self._disputes.get(partition)
        if dispute is not None and dispute.unresolved:
            others = tuple((c, digests) for c, digests in dispute.results if c.slot != slot)
            self._disputes[partition] = replace(dispute, results=others)
            if not others:
                self._end(partition, DisputeEvent.PARTIES_GONE)

    def request_recomputation(
        self,
        partition: Partition,
        alive: Sequence[Computation],
        now: float,
        existing: Iterable[Slot] | None = None,
        waiting: Collection[Slot] = (),
    ) -> None:
        """Restart one of `alive` (computations that respond), so that it computes a disputed
        partition again, unless one does so already. The highest number of a replica first, since
        the lowest one saves checkpoints. `existing`: slots of the tasks that exist, whether they
        have started or not; None: not known. If there is only one, nobody else will compute the
        partition again. `waiting`: those that have no restore point yet; another one would have to
        wait, too."""
        dispute = self._disputes.get(partition)
        if dispute is None or dispute.unresolved:
            return
        if any(c.slot in waiting and c.slot not in self._diverged for c in alive):
            self._requested_at[partition] = now
        if any(not dispute.is_party(c) and c.slot not in self._diverged for c in alive):
            self._requested_at.setdefault(partition, now)  # it has not reached the epoch yet
        requested_at = self._requested_at.get(partition)
        if requested_at is not None and now - requested_at < RECOMPUTATION_TIMEOUT_S:
            return
        alive = [c for c in alive if dispute.is_party(c)]
        if any(c.slot in self._diverged or c.slot in self._restarts for c in alive):
            return
        untried = [c for c in alive if c.slot not in dispute.repeated | dispute.contradicted]
        if untried:
            self._requested_at[partition] = now
            self._restarts[max(untried).slot] = max(untried)
        elif len(alive) > 1:
            last = max(alive)
            self._disputes[partition] = dispute.with_replaced(last)
            what = "replicas repeat different results; it is replaced, so that a third decides"
            self._mark_diverged(last.slot, last.incarnation, f"epoch {dispute.epoch}: {what}")
        elif alive and existing is not None and self._is_alone(partition, existing):
            self._settle_alone(dispute, alive[0])

    # --- private ---

    def _settle_alone(self, dispute: Dispute, computation: Computation) -> None:
        """Only one is left, and it has computed again. If it repeats itself, its results are
        accepted, as those of any single replica; if not, a new incarnation of it decides."""
        if computation.slot in dispute.repeated:
            self._end(dispute.partition, DisputeEvent.SINGLE_REPLICA)
            return
        self._disputes[dispute.partition] = dispute.with_replaced(computation)
        what = "its results contradict each other; it is replaced"
        message = f"epoch {dispute.epoch}: {what}"
        self._mark_diverged(computation.slot, computation.incarnation, message)

    def _is_alone(self, partition: Partition, slots: Iterable[Slot]) -> bool:
        """Whether a partition has a single replica, and at most one of these is compared. Two are
        in a planned move."""
        if self._replicas is None or self._replicas.get(partition, 0) > 1:
            return False
        compared = {s for s in slots if partition_of(s) == partition and self.is_compared(s)}
        return len(compared) < 2

    def _has_partners(self, slot: Slot, existing: Iterable[Slot]) -> bool:
        return self.is_compared(slot) and not self._is_alone(partition_of(slot), existing)

    def _is_configured(self, partition: Partition) -> bool:
        """Whether the newest generation has it."""
        return self._replicas is None or partition in self._replicas

    def _compare(self, partition: Partition, epoch: int) -> None:
        """Compare the results that the current boots report for an epoch."""
        results = [
            (record.computation, record.digests[epoch])
            for slot, record in sorted(self._records[partition].items())
            if epoch in record.digests and slot not in self._diverged
        ]
        groups = _equal_results(results)
        counts = [self._witness_count(partition, group) for group in groups]
        if len(groups) < 2:
            self._record_agreement(partition, epoch, results)
            return
        after = min(self.witnessed(partition), epoch - 1)
        self._untrusted.append(UntrustedOutput(partition, after))
        ordered = sorted(counts)
        correct = groups[counts.index(ordered[-1])] if ordered[-1] > max(1, ordered[-2]) else []
        copies = self._discard_copies(partition, correct)
        originals = [(c, digests) for c, digests in results if c not in copies]
        if correct:
            wrong = [c for c, digests in originals if (c, digests) not in correct]
            self._mark_all_diverged(wrong, epoch, correct[0][0])
        else:
            name = groups[0][0][1].difference(groups[1][0][1]) or "digest"
            self._disputes[partition] = Dispute(partition, after, epoch, name, tuple(originals))
            self._requested_at.pop(partition, None)

    def _record_agreement(
        self, partition: Partition, epoch: int, results: Sequence[Result]
    ) -> None:
        """Record that these results have no comparable differences."""
        records = self._records[partition]
        agreeing = {
            c: [other for other, found in results if other != c and _agree(digests, found)]
            for c, digests in results
        }
        is_witnessed = any(agreeing.values()) and self._witness_count(partition, results) > 1
        if is_witnessed:
            self._witnessed[partition] = max(epoch, self.witnessed(partition))
        for computation, others in agreeing.items():
            record = records[computation.slot]
            for other in others:
                record.agreed[other] = max(epoch, record.agreed.get(other, NO_EPOCH))
            if others and is_witnessed:
                record.witnessed = max(epoch, record.witnessed)

    def _witness_count(self, partition: Partition, group: Sequence[Result]) -> int:
        """How many of these equal results were computed independently: copies are not counted, but
        a group counts as one at least."""
        copies = sum(self._is_copy(partition, c) for c, _ in group)
        return max(1, len(group) - copies)

    def _is_copy(self, partition: Partition, computation: Computation) -> bool:
        """Whether its results up to `copied_through` are a partner's, and neither a committed
        checkpoint nor a further computation has the same ones."""
        record = self._records[partition].get(computation.slot)
        if record is None or record.computation != computation or record.copied_through is None:
            return False
        return record.copied_through > max(record.witnessed, record.committed)

    def _match_committed(self, partition: Partition) -> None:
        """Mark the computations that have the results of the committed checkpoint, and the
        checkpoint if two of them do."""
        if partition not in self._committed:
            return
        epoch, committed = self._committed[partition]
        records = self._records.get(partition, {}).values()
        results = [(r.computation, r.digests[epoch]) for r in records if epoch in r.digests]
        alike = [(c, digests) for c, digests in results if digests.agrees(committed, "state")]
        if len(alike) > 1 and self._witness_count(partition, alike) > 1:
            self._verified_state[partition] = epoch
        for record in records:
            found = record.digests.get(epoch)
            if found is not None and found.agrees(committed, "chained"):
                record.committed = epoch
                if record.witnessed >= epoch:
                    self._verified[partition] = epoch

    def _discard_copies(
        self, partition: Partition, correct: Sequence[Result] = ()
    ) -> list[Computation]:
        """Results of this partition are untrusted: copies compute again, except those that are
        known to be correct; so will tasks that begin with a lent state later. Returns the
        copies."""
        records = self._records.get(partition, {}).values()
        spared = [c for c, _ in correct]
        started = [record.computation for record in records]
        copies = [c for c in started if c not in spared and self._is_copy(partition, c)]
        for record in records:
            record.may_copy = False
        self.discard(copies)
        return copies

    def _decide(
        self, partition: Partition, computation: Computation, restored_from: int | None
    ) -> None:
        """Decide the partition's dispute by a computation that is not a party to it, of a replica
        that has not diverged."""
        dispute = self._disputes.get(partition)
        if dispute is None or dispute.is_party(computation) or computation.slot in self._diverged:
            return
        if restored_from is not None and restored_from >= dispute.epoch:
            self._end(partition, DisputeEvent.SUPERSEDED)
            self.discard(self._running(dispute))
            is_state = dispute.digest_name == "state"
            verified = self._verified_state if is_state else self._verified
            self._go_on_from(partition, restored_from, dispute.agreed_through, verified)
            return
        found = self._records[partition][computation.slot].digests.get(dispute.epoch)
        if found is None:
            return
        if not dispute.results:
            if self._is_complete(found, dispute, computation):
                self._continue(dispute.with_first(computation, found))
            return
        own = [
            earlier
            for other, earlier in dispute.results
            if dispute.may_share_node(other, computation)
        ]
        if any(found.agrees(digests, dispute.digest_name) for digests in own):
            self._continue(dispute.with_repetition(computation, found))
            return
        name = dispute.digest_name
        same = [(other, found.agrees(digests, name)) for other, digests in dispute.results]
        correct = [other for other, agrees in same if agrees]
        wrong = [other for other, agrees in same if agrees is False]
        if correct:
            self._end(partition, DisputeEvent.MATCHED)
            self._witnessed[partition] = max(dispute.epoch, self.witnessed(partition))
            for record in self._records[partition].values():
                if record.computation in (computation, *correct):
                    record.witnessed = max(dispute.epoch, record.witnessed)
            self._mark_all_diverged(wrong, dispute.epoch, computation)
        elif wrong:
            self._continue(dispute.with_difference(computation, found, own))
        elif not any(dispute.is_party(r.computation) for r in self._records[partition].values()):
            self._end(partition, DisputeEvent.NO_COMMON_BASE)

    def _is_complete(self, found: EpochDigests, dispute: Dispute, computation: Computation) -> bool:
        """Whether a result has the digest in which others differ. A state is saved some epochs
        later; if it is not by then, this boot has no checkpoint at that epoch."""
        newest = max(self._records[dispute.partition][computation.slot].digests)
        waited = newest - dispute.epoch > _STATE_WAIT_EPOCHS
        return waited or getattr(found, dispute.digest_name) is not None

    def _go_on_from(
        self,
        partition: Partition,
        checkpoint: int,
        agreed_through: int,
        verified: Mapping[Partition, int],
    ) -> None:
        """Replicas that disagree after `agreed_through` go on from a committed checkpoint. If only
        one of them has computed it, nobody knows whether it is right, and nothing will show it.
        `verified`: checkpoints that two have computed."""
        if checkpoint > verified.get(partition, NO_EPOCH):
            found = UnverifiedCheckpoint(partition, agreed_through, checkpoint)
            self._unverified.setdefault(partition, found)

    def _running(self, dispute: Dispute) -> list[Computation]:
        """The parties that are the current boots of their slots."""
        current = {r.computation for r in self._records.get(dispute.partition, {}).values()}
        return [computation for computation, _ in dispute.results if computation in current]

    def _end(self, partition: Partition, event: DisputeEvent) -> None:
        self._disputes.pop(partition).step(event)

    def _continue(self, dispute: Dispute) -> None:
        """Continue a dispute after a result that does not decide it. A replica that contradicts its
        own result is replaced if another one has repeated its own; if none has, the operator may be
        at fault."""
        self._disputes[dispute.partition] = dispute
        self._requested_at.pop(dispute.partition, None)
        if dispute.unresolved or not dispute.repeated - dispute.contradicted:
            return
        for slot in sorted(dispute.contradicted):
            record = self._records[dispute.partition].get(slot)
            if record is not None and dispute.is_party(record.computation):
                what = "its results contradict each other, and another replica repeats its own"
                dispute = dispute.with_replaced(record.computation)
                self._disputes[dispute.partition] = dispute
                message = f"epoch {dispute.epoch}: {what}"
                self._mark_diverged(slot, record.computation.incarnation, message)

    def _mark_all_diverged(
        self, wrong: Iterable[Computation], epoch: int, matching: Computation
    ) -> None:
        """Only those that still run: what has ended need not be replaced."""
        for computation in wrong:
            record = self._records[partition_of(computation.slot)].get(computation.slot)
            current = record.computation if record else self._restarts.get(computation.slot)
            if current is not None and current.incarnation == computation.incarnation:
                other = f"replica {matching.slot.replica} and one other computation have"
                message = f"its epoch {epoch} differs from what {other}"
                self._mark_diverged(computation.slot, computation.incarnation, message)

    def _mark_diverged(self, slot: Slot, incarnation: int, message: str) -> None:
        self._restarts.pop(slot, None)
        self._diverged.setdefault(slot, Divergence(slot, incarnation, message))


def _equal_results(results: Sequence[Result]) -> list[list[Result]]:
    """Groups of results without comparable differences."""
    groups: list[list[Result]] = []
    for computation, digests in results:
        alike = (g for g in groups if all(digests.difference(d) is None for _, d in g))
        group = next(alike, None)
        if group is None:
            groups.append([(computation, digests)])
        else:
            group.append((computation, digests))
    return groups


def _agree(one: EpochDigests, two: EpochDigests) -> bool:
    """Whether two results agree, in the chained digest or in that of the epoch."""
    return any(one.agrees(two, digest_name) for digest_name in ("chained", "digest"))
