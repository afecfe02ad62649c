"""Disputes: computations of a partition that differ at one epoch, until it is decided which is
right.

The table is complete; an event that it does not contain raises with the transitions so far. Pure.

Design: docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rekindle.coordinator.agreement.results import Computation, EpochDigests
from rekindle.topology.model import Partition, Slot
from rekindle.transitions import Table, next_state

Result = tuple[Computation, EpochDigests]


class DisputePhase(StrEnum):
    OPEN = "open"  # one replica after another computes the epoch again
    UNRESOLVED = "unresolved"  # every computation gives a different result: not deterministic
    DECIDED = "decided"  # two computations agree: the others are wrong
    DISSOLVED = "dissolved"  # nothing is left to decide


class DisputeEvent(StrEnum):
    """A new result of the epoch, or the end of what was compared."""

    REPEATED = "a replica repeated its result"
    CONTRADICTED = "a replica contradicted its result"
    FIRST_RESULT = "a first result, after all were discarded"
    SECOND_DIFFERS = "the first result of a second node differs"
    MATCHED = "two computations agree"
    MATCHED_NONE = "a new result differs from all"
    SUPERSEDED = "a committed checkpoint is beyond the epoch, and parties compute again from it"
    DISCARDED = "results count no more, since they may come from a wrong input"
    SINGLE_REPLICA = "the partition has one replica"
    NO_COMMON_BASE = "all computed again, from a checkpoint with another base of chained digests"
    PARTIES_GONE = "all parties ended"


_ENDINGS = {
    DisputeEvent.MATCHED: DisputePhase.DECIDED,
    DisputeEvent.SUPERSEDED: DisputePhase.DISSOLVED,
    DisputeEvent.SINGLE_REPLICA: DisputePhase.DISSOLVED,
    DisputeEvent.NO_COMMON_BASE: DisputePhase.DISSOLVED,
}

TRANSITIONS: Table[DisputePhase, DisputeEvent] = {
    DisputePhase.OPEN: {
        DisputeEvent.REPEATED: DisputePhase.OPEN,
        DisputeEvent.CONTRADICTED: DisputePhase.OPEN,
        DisputeEvent.FIRST_RESULT: DisputePhase.OPEN,
        DisputeEvent.SECOND_DIFFERS: DisputePhase.OPEN,
        DisputeEvent.MATCHED_NONE: DisputePhase.UNRESOLVED,
        DisputeEvent.DISCARDED: DisputePhase.OPEN,
        **_ENDINGS,
    },
    DisputePhase.UNRESOLVED: {
        DisputeEvent.REPEATED: DisputePhase.UNRESOLVED,
        DisputeEvent.CONTRADICTED: DisputePhase.OPEN,
        DisputeEvent.MATCHED_NONE: DisputePhase.UNRESOLVED,
        DisputeEvent.DISCARDED: DisputePhase.OPEN,
        DisputeEvent.PARTIES_GONE: DisputePhase.DISSOLVED,
        **_ENDINGS,
    },
    DisputePhase.DECIDED: {},
    DisputePhase.DISSOLVED: {},
}


@dataclass(frozen=True, slots=True)
class Dispute:
    """Computations of a partition that differ at `epoch`, in the field `digest_name` of
    EpochDigests; all agree through `agreed_through`. A dispute that an earlier coordinator opened
    begins with the result of one party at most. One between copies begins with none, since a copy
    is a party only once it has computed again; so does one whose parties all have to compute again.
    `repeated`: replicas that computed the same again; `contradicted`: those that computed something
    else. `replaced`: incarnations that are, or were, replaced because of this dispute. `history`:
    the transitions so far."""

    partition: Partition
    agreed_through: int
    epoch: int
    digest_name: str
    results: tuple[Result, ...]
    repeated: frozenset[Slot] = frozenset()
    contradicted: frozenset[Slot] = frozenset()
    replaced: frozenset[tuple[Slot, int]] = frozenset()
    phase: DisputePhase = DisputePhase.OPEN
    history: tuple[str, ...] = ()

    @property
    def unresolved(self) -> bool:
        """Each computation gave another result: the operator is not deterministic."""
        return self.phase is DisputePhase.UNRESOLVED

    def is_party(self, computation: Computation) -> bool:
        return any(computation == other for other, _ in self.results)

    def may_share_node(self, earlier: Computation, later: Computation) -> bool:
        """Whether both may have run on the same node. If the nodes are not known: they are of one
        slot, and no incarnation between them was replaced because of this dispute."""
        if earlier.node is not None and later.node is not None:
            return earlier.node == later.node
        incarnations = range(earlier.incarnation, later.incarnation)
        return earlier.slot == later.slot and not any(
            (earlier.slot, incarnation) in self.replaced for incarnation in incarnations
        )

    def with_replaced(self, computation: Computation) -> Dispute:
        """Its slot counts as another replica from the next incarnation on, if it is not known to be
        on the same node."""
        return replace(self, replaced=self.replaced | {(computation.slot, computation.incarnation)})

    def step(self, event: DisputeEvent) -> Dispute:
        """Raises InvalidTransition."""
        subject = f"dispute of {self.partition.key}, epoch {self.epoch}"
        phase, history = next_state(subject, TRANSITIONS, self.phase, event, self.history)
        return replace(self, phase=phase, history=history)

    def without(self, computation: Computation) -> Dispute:
        """Its result does not count any more, nor what that said of its replica."""
        return replace(
            self.step(DisputeEvent.DISCARDED),
            results=tuple((c, digests) for c, digests in self.results if c != computation),
            repeated=self.repeated - {computation.slot},
            contradicted=self.contradicted - {computation.slot},
        )

    def without_results(self) -> Dispute:
        """No result counts any more, nor what they said of replicas and nodes."""
        return replace(
            self.step(DisputeEvent.DISCARDED),
            results=(),
            repeated=frozenset(),
            contradicted=frozenset(),
            replaced=frozenset(),
        )

    def with_first(self, computation: Computation, digests: EpochDigests) -> Dispute:
        return replace(self.step(DisputeEvent.FIRST_RESULT), results=((computation, digests),))

    def with_repetition(self, computation: Computation, digests: EpochDigests) -> Dispute:
        repeated = self.repeated | {computation.slot}
        results = (*self.results, (computation, digests))
        return replace(self.step(DisputeEvent.REPEATED), results=results, repeated=repeated)

    def _is_second(self, computation: Computation) -> bool:
        """Whether it is the second result, or the first one of another node: a new coordinator may
        hear of a replica that repeats its result before it hears of the other one."""
        (first, _), *others = self.results
        return not others or (
            not self.may_share_node(first, computation)
            and all(self.may_share_node(first, other) for other, _ in others)
        )

    def with_difference(
        self, computation: Computation, digests: EpochDigests, own: Sequence[EpochDigests]
    ) -> Dispute:
        """Add a result that agrees with none. `own`: earlier results of the same node."""
        contradicted = self.contradicted | ({computation.slot} if own else frozenset())
        another_is_consistent = bool(own) and any(
            other.slot not in contradicted for other, _ in self.results
        )
        event = DisputeEvent.CONTRADICTED if another_is_consistent else DisputeEvent.MATCHED_NONE
        if self._is_second(computation) and not self.unresolved:
            event = DisputeEvent.SECOND_DIFFERS
        results = (*self.results, (computation, digests))
        repeated = self.repeated - {computation.slot}
        return replace(
            self.step(event), results=results, repeated=repeated, contradicted=contradicted
        )
