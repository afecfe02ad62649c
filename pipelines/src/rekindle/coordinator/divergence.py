"""Do replicas agree? Digests of the same epoch by different replicas (design §3).

Determinism makes them equal; where they are not, one replica computes wrongly. The one that
disagrees with the committed checkpoint is named, else those outside the majority, else the higher
index. What it says counts no more until its slot has a new incarnation. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.coordinator.model import Partition, partition_of
from rekindle.topology.model import Slot

_EPOCHS = 64


@dataclass(frozen=True, slots=True)
class Divergence:
    slot: Slot
    incarnation: int
    message: str


@dataclass(slots=True)
class _Record:
    incarnation: int
    digests: dict[int, str]


class DigestComparison:
    """The newest digests of each replica's current incarnation."""

    def __init__(self) -> None:
        self._records: dict[Partition, dict[Slot, _Record]] = {}
        self._found: dict[Slot, Divergence] = {}

    @property
    def found(self) -> Mapping[Slot, Divergence]:
        return self._found

    def is_diverged(self, slot: Slot) -> bool:
        return slot in self._found

    def observed(
        self, slot: Slot, incarnation: int, digests: Mapping[int, str]
    ) -> tuple[Divergence, ...]:
        """Take in what a replica computed; returns what is newly known to disagree."""
        replicas = self._records.setdefault(partition_of(slot), {})
        record = replicas.get(slot)
        if record is None or record.incarnation != incarnation:
            record = replicas[slot] = _Record(incarnation, {})
            self._found.pop(slot, None)
        fresh = [e for e, d in digests.items() if record.digests.get(e) != d]
        record.digests.update(digests)
        for epoch in sorted(record.digests)[:-_EPOCHS]:
            del record.digests[epoch]
        return tuple(d for epoch in sorted(fresh) for d in self._judge(replicas, epoch))

    def contradicted(self, slot: Slot, incarnation: int, epoch: int) -> tuple[Divergence, ...]:
        """A replica saved another state at `epoch` than the checkpoint that is trusted."""
        message = f"its state after epoch {epoch} differs from the checkpoint's"
        return self._blame(slot, incarnation, message)

    def forget(self, slot: Slot) -> None:
        """The slot's task ended or was replaced."""
        self._records.get(partition_of(slot), {}).pop(slot, None)
        self._found.pop(slot, None)

    def _judge(self, replicas: Mapping[Slot, _Record], epoch: int) -> tuple[Divergence, ...]:
        said = {
            slot: record.digests[epoch]
            for slot, record in sorted(replicas.items())
            if epoch in record.digests and slot not in self._found
        }
        if len(set(said.values())) < 2:
            return ()
        # most_common keeps the order of first appearance: the lowest index wins a tie.
        trusted = Counter(said.values()).most_common(1)[0][0]
        witness = next(slot for slot, digest in said.items() if digest == trusted)
        found: list[Divergence] = []
        for slot, digest in said.items():
            if digest != trusted:
                message = f"epoch {epoch}: digest {digest}, replica {witness.replica} has {trusted}"
                found += self._blame(slot, replicas[slot].incarnation, message)
        return tuple(found)

    def _blame(self, slot: Slot, incarnation: int, message: str) -> tuple[Divergence, ...]:
        if slot in self._found:
            return ()
        self._found[slot] = Divergence(slot, incarnation, message)
        return (self._found[slot],)
