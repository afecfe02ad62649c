"""Do replicas agree? What different computations say of the same epochs. Pure.

Determinism makes them equal. Where two differ, neither is believed: the partition is disputed, and
one of its replicas is told to compute again from the committed checkpoint. Of three results two
decide; the odd one out is named, and counts no more until its slot has a new incarnation. A replica
that only repeats itself decides nothing, for its node may be at fault: then the other one computes
again, and if that repeats itself too, one is replaced, so that a third node decides. A replica that
contradicts itself is replaced in the same way, if another one repeats itself. Where all contradict
themselves, or a new node agrees with none, the operator itself is not deterministic, and the
dispute stays.

Chained digests (`streams.digest`) cover all epochs since their base, so that a difference is seen
at any later epoch. Those of different bases say nothing of each other; then the epoch's own digest
is compared.

Design: docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.coordinator.model import Partition, partition_of
from rekindle.protocol import PollResponse
from rekindle.streams.digest import same_base
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Slot

_EPOCHS = 64
PATIENCE_S = 60.0
"""How long a third computation may take to come to the epoch before another replica is told."""


@dataclass(frozen=True, slots=True, order=True)
class Computation:
    """One life of a replica: what it says was computed by one process from one restore point."""

    slot: Slot
    incarnation: int
    boot: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What a computation says of an epoch: the chained digest of all output through it, the digest
    of its own output, and of the state after it where that was saved."""

    chain: str | None = None
    digest: str | None = None
    state: str | None = None

    def difference(self, other: Claim) -> str | None:
        """In what two claims of one epoch differ; None if in nothing that can be compared."""
        kinds = ("digest", "state") if self.agrees(other, "chain") is None else ("chain", "state")
        return next((kind for kind in kinds if self.agrees(other, kind) is False), None)

    def agrees(self, other: Claim, kind: str) -> bool | None:
        """Whether they agree in one thing; None if that cannot be compared."""
        mine, yours = getattr(self, kind), getattr(other, kind)
        if mine is None or yours is None or (kind == "chain" and not same_base(mine, yours)):
            return None
        return bool(mine == yours)


def claims_of(response: PollResponse) -> dict[int, Claim]:
    """What an answer says, by epoch."""
    states = {done.epoch: done.digest for done in response.checkpoints}
    epochs = {*response.chained, *response.digests, *states}
    return {
        e: Claim(response.chained.get(e), response.digests.get(e), states.get(e))
        for e in sorted(epochs)
    }


@dataclass(frozen=True, slots=True)
class Divergence:
    slot: Slot
    incarnation: int
    message: str


@dataclass(frozen=True, slots=True)
class Dispute:
    """Computations of a partition that differ at `epoch`, in the claim's field `kind`; all is sound
    through `after`. `repeated`: replicas that computed again what they had claimed before;
    `contradicted`: that computed something else."""

    partition: Partition
    after: int
    epoch: int
    kind: str
    claims: tuple[tuple[Computation, Claim], ...]
    repeated: frozenset[Slot] = frozenset()
    contradicted: frozenset[Slot] = frozenset()
    unresolved: bool = False

    def is_party(self, by: Computation) -> bool:
        return any(by == other for other, _ in self.claims)


@dataclass(frozen=True, slots=True)
class Doubt:
    """What read a partition's epochs after `after` may have read a wrong one."""

    partition: Partition
    after: int


@dataclass(slots=True)
class _Record:
    by: Computation
    claims: dict[int, Claim]


class DigestComparison:
    """The newest claims of each replica's current life, the disputes, and who was found wrong."""

    def __init__(self) -> None:
        self._records: dict[Partition, dict[Slot, _Record]] = {}
        self._agreed: dict[Partition, int] = {}
        self._found: dict[Slot, Divergence] = {}
        self._disputes: dict[Partition, Dispute] = {}
        self._restarts: dict[Slot, Computation] = {}
        self._asked_at: dict[Partition, float] = {}
        self._doubts: list[Doubt] = []
        self._took_back: dict[Slot, Computation] = {}
        self._replicas: Mapping[Partition, int] | None = None  # as configured; None: not known

    # --- what others may rely on ---

    @property
    def found(self) -> Mapping[Slot, Divergence]:
        """Replicas that computed wrongly."""
        return self._found

    @property
    def disputes(self) -> Mapping[Partition, Dispute]:
        return self._disputes

    def is_doubted(self, slot: Slot) -> bool:
        """Whether nobody may read it: wrong, disputed, or about to compute again."""
        disputed = partition_of(slot) in self._disputes
        return disputed or slot in self._found or slot in self._restarts

    def must_restart(self, slot: Slot) -> str | None:
        """The boot of a slot's task that has to compute again."""
        found = self._restarts.get(slot)
        return found.boot if found is not None else None

    def agreed(self, partition: Partition) -> int:
        """The newest epoch on which two computations of a partition agreed."""
        return self._agreed.get(partition, NO_EPOCH)

    def take_doubts(self) -> list[Doubt]:
        """What has come up since the last call."""
        found, self._doubts = self._doubts, []
        return found

    # --- events ---

    def configured(self, replicas: Mapping[Partition, int]) -> None:
        """How many replicas each partition is to have. With one alone there is nobody to compare it
        with, and none can decide a dispute: the one that is left is taken as it is."""
        self._replicas = replicas
        for records in self._records.values():
            for slot in [slot for slot in records if not self._is_compared(slot)]:
                del records[slot]
        for partition in [p for p in self._disputes if replicas.get(p, 0) < 2]:
            del self._disputes[partition]

    def observed(
        self, by: Computation, claims: Mapping[int, Claim], restored_from: int | None = None
    ) -> bool:
        """Take in what a computation says; True if this changed what is known of anybody."""
        before = (dict(self._found), dict(self._disputes), dict(self._restarts))
        if self._restarts.get(by.slot) == by:
            return False  # it is about to end
        if not self._is_compared(by.slot):
            return False
        self._restarts.pop(by.slot, None)
        partition = partition_of(by.slot)
        replicas = self._records.setdefault(partition, {})
        record = replicas.get(by.slot)
        if record is None or record.by != by:
            if by.slot in self._found and self._found[by.slot].incarnation != by.incarnation:
                del self._found[by.slot]
            record = replicas[by.slot] = _Record(by, {})
        fresh = [e for e, claim in claims.items() if record.claims.get(e) != claim]
        record.claims.update(claims)
        for epoch in sorted(record.claims)[:-_EPOCHS]:
            if epoch not in claims:
                del record.claims[epoch]
        self._decide(partition, by, restored_from)
        for epoch in sorted(fresh):
            if partition not in self._disputes:
                self._judge(partition, epoch)
        return before != (self._found, self._disputes, self._restarts)

    def took_back(self, by: Computation, epoch: int) -> bool:
        """A replica computed something else than an earlier life of it had given out: what reads it
        may have taken that. True if it is news."""
        if self._took_back.get(by.slot) == by:
            return False
        self._took_back[by.slot] = by
        self._doubts.append(Doubt(partition_of(by.slot), epoch - 1))
        return True

    def contradicted(self, slot: Slot, incarnation: int, epoch: int) -> None:
        """A replica saved another state at `epoch` than the checkpoint that is trusted."""
        message = f"its state after epoch {epoch} differs from the checkpoint's"
        self._blame(slot, incarnation, message)

    def discard(self, tainted: Iterable[Computation]) -> None:
        """These may have read a wrong epoch: they compute again, and what they said is void."""
        for by in tainted:
            partition = partition_of(by.slot)
            self._restarts[by.slot] = by
            self._records.get(partition, {}).pop(by.slot, None)
            dispute = self._disputes.get(partition)
            if dispute is not None and dispute.is_party(by):
                del self._disputes[partition]

    def forget(self, slot: Slot) -> None:
        """The slot's task ended or was replaced. What it claimed in a dispute still counts."""
        partition = partition_of(slot)
        self._records.get(partition, {}).pop(slot, None)
        self._found.pop(slot, None)
        self._took_back.pop(slot, None)
        self._restarts.pop(slot, None)
        dispute = self._disputes.get(partition)
        if dispute is not None and dispute.unresolved:
            left = tuple((by, claim) for by, claim in dispute.claims if by.slot != slot)
            self._disputes[partition] = replace(dispute, claims=left)
            if not left:
                del self._disputes[partition]

    def ask_again(self, partition: Partition, alive: Sequence[Computation], now: float) -> None:
        """Have a disputed partition computed once more, by one of its tasks that are heard, unless
        one does so already. The highest index, for the lowest one saves checkpoints."""
        dispute = self._disputes.get(partition)
        if dispute is None or dispute.unresolved:
            return
        if any(not dispute.is_party(by) for by in alive):
            self._asked_at.setdefault(partition, now)  # it has not come to the epoch yet
        asked_at = self._asked_at.get(partition)
        if asked_at is not None and now - asked_at < PATIENCE_S:
            return
        alive = [by for by in alive if dispute.is_party(by)]
        if any(by.slot in self._found or by.slot in self._restarts for by in alive):
            return
        untried = [by for by in alive if by.slot not in dispute.repeated | dispute.contradicted]
        if untried:
            self._asked_at[partition] = now
            self._restarts[max(untried).slot] = max(untried)
        elif len(alive) > 1:
            last = max(alive)
            what = "replicas repeat different results; it is replaced, so that a third one decides"
            self._blame(last.slot, last.incarnation, f"epoch {dispute.epoch}: {what}")

    # --- inside ---

    def _is_compared(self, slot: Slot) -> bool:
        """Whether it is one of the replicas that its partition is to have."""
        return self._replicas is None or slot.replica < self._replicas.get(partition_of(slot), 0)

    def _judge(self, partition: Partition, epoch: int) -> None:
        """Compare what the current lives say of an epoch."""
        said = [
            (record.by, record.claims[epoch])
            for slot, record in sorted(self._records[partition].items())
            if epoch in record.claims and slot not in self._found
        ]
        groups: list[list[tuple[Computation, Claim]]] = []
        for by, claim in said:
            alike = (g for g in groups if all(claim.difference(c) is None for _, c in g))
            group = next(alike, None)
            if group is None:
                groups.append([(by, claim)])
            else:
                group.append((by, claim))
        if len(groups) < 2:
            if _has_agreement([claim for _, claim in said]):
                self._agreed[partition] = max(epoch, self.agreed(partition))
            return
        after = min(self.agreed(partition), epoch - 1)
        self._doubts.append(Doubt(partition, after))
        sizes = sorted(len(group) for group in groups)
        if sizes[-1] > max(1, sizes[-2]):
            right = max(groups, key=len)
            wrong = [by for group in groups if group is not right for by, _ in group]
            self._blame_all(wrong, epoch, right[0][0])
            return
        kind = groups[0][0][1].difference(groups[1][0][1]) or "digest"
        self._disputes[partition] = Dispute(partition, after, epoch, kind, tuple(said))
        self._asked_at.pop(partition, None)

    def _decide(self, partition: Partition, by: Computation, restored_from: int | None) -> None:
        """Let a computation that is no party to its partition's dispute decide it."""
        dispute = self._disputes.get(partition)
        if dispute is None or dispute.is_party(by):
            return
        if restored_from is not None and restored_from >= dispute.epoch:
            del self._disputes[partition]  # a checkpoint that was trusted is beyond it
            return
        mine = self._records[partition][by.slot].claims.get(dispute.epoch)
        if mine is None:
            return
        mine_before = [c for other, c in dispute.claims if _is_same_replica(other, by)]
        if any(mine.agrees(claim, dispute.kind) for claim in mine_before):
            repeated = dispute.repeated | {by.slot}
            self._go_on(replace(dispute, claims=(*dispute.claims, (by, mine)), repeated=repeated))
            return
        same = [(other, mine.agrees(claim, dispute.kind)) for other, claim in dispute.claims]
        right = [other for other, agrees in same if agrees]
        wrong = [other for other, agrees in same if agrees is False]
        if right:
            del self._disputes[partition]
            self._agreed[partition] = max(dispute.epoch, self.agreed(partition))
            self._blame_all(wrong, dispute.epoch, by)
        elif wrong:
            contradicted = dispute.contradicted | ({by.slot} if mine_before else frozenset())
            steady = bool(mine_before) and any(
                c.slot not in contradicted for c, _ in dispute.claims
            )
            claims = (*dispute.claims, (by, mine))
            after = replace(dispute, claims=claims, contradicted=contradicted)
            self._go_on(replace(after, unresolved=not steady))

    def _go_on(self, dispute: Dispute) -> None:
        """With one more result that decides nothing. Who contradicts himself is replaced once
        another one has repeated itself: if nobody does, it is the operator's fault."""
        self._disputes[dispute.partition] = dispute
        self._asked_at.pop(dispute.partition, None)
        if dispute.unresolved or not dispute.repeated - dispute.contradicted:
            return
        for slot in sorted(dispute.contradicted):
            record = self._records[dispute.partition].get(slot)
            if record is not None and dispute.is_party(record.by):
                what = "its results contradict each other, and another replica repeats its own"
                self._blame(slot, record.by.incarnation, f"epoch {dispute.epoch}: {what}")

    def _blame_all(self, wrong: Iterable[Computation], epoch: int, witness: Computation) -> None:
        for by in wrong:
            record = self._records[partition_of(by.slot)].get(by.slot)
            if record is None or record.by.incarnation == by.incarnation:
                other = f"replica {witness.slot.replica} and one other computation have"
                message = f"its epoch {epoch} differs from what {other}"
                self._blame(by.slot, by.incarnation, message)

    def _blame(self, slot: Slot, incarnation: int, message: str) -> None:
        self._restarts.pop(slot, None)
        self._found.setdefault(slot, Divergence(slot, incarnation, message))


def _is_same_replica(one: Computation, two: Computation) -> bool:
    return (one.slot, one.incarnation) == (two.slot, two.incarnation)


def _has_agreement(claims: Sequence[Claim]) -> bool:
    """Whether two of them could be compared, by all output or by that of the epoch."""
    return any(
        one.agrees(two, kind)
        for at, one in enumerate(claims)
        for two in claims[at + 1 :]
        for kind in ("chain", "digest")
    )
