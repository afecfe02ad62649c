"""The results that a computation of a partition reports for its epochs. Pure.

Chained digests (`streams.digest`) cover all epochs since their base, so that a difference is
visible at any later epoch. Chained digests with different bases cannot be compared; then the digest
of the epoch alone is compared.

Design: docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from rekindle.protocol import PollResponse
from rekindle.streams.digest import same_base
from rekindle.topology.model import Slot


@dataclass(frozen=True, slots=True, order=True)
class Computation:
    """One boot of a replica: one process that computes from one restore point. `node`: on which it
    runs; None if it is not known."""

    slot: Slot
    incarnation: int
    boot: str
    node: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EpochDigests:
    """Digests of one epoch: the chained digest of all output through it, the digest of its own
    output, and of the state after it if that was saved."""

    chained: str | None = None
    digest: str | None = None
    state: str | None = None

    def with_missing(self, known: EpochDigests | None) -> EpochDigests:
        """These digests, and those that only an earlier response of the same boot had."""
        if known is None or known == self:
            return self
        return EpochDigests(
            self.chained or known.chained, self.digest or known.digest, self.state or known.state
        )

    def difference(self, other: EpochDigests) -> str | None:
        """The field in which two results of an epoch differ; None if no comparable one does."""
        same_bases = self.agrees(other, "chained") is not None
        names = ("chained", "state") if same_bases else ("digest", "state")
        return next((name for name in names if self.agrees(other, name) is False), None)

    def agrees(self, other: EpochDigests, name: str) -> bool | None:
        """Whether they agree in one field; None if it cannot be compared."""
        mine, yours = getattr(self, name), getattr(other, name)
        if mine is None or yours is None or (name == "chained" and not same_base(mine, yours)):
            return None
        return bool(mine == yours)


DIGEST_NAMES = tuple(f.name for f in fields(EpochDigests))


def have_same_digests(one: PollResponse, other: PollResponse) -> bool:
    return (
        one.chained == other.chained
        and one.digests == other.digests
        and one.checkpoints == other.checkpoints
    )


def epoch_digests(response: PollResponse) -> dict[int, EpochDigests]:
    """The digests in a poll response, by epoch."""
    states = {done.epoch: done.digest for done in response.checkpoints}
    epochs = {*response.chained, *response.digests, *states}
    return {
        e: EpochDigests(response.chained.get(e), response.digests.get(e), states.get(e))
        for e in sorted(epochs)
    }
