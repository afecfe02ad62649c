"""Which epochs two replicas have computed on their own, as the simulation knows it.

A task that has started from its partner's state repeats what that has computed: it is no witness,
until nobody can compute again what it started from.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.coordinator.model import Partition
from rekindle.topology.model import Slot

_KEPT_EPOCHS = 64


class Witnesses:
    """`committed`: the newest epoch of a partition in a manifest."""

    def __init__(self, committed: Callable[[Partition], int]) -> None:
        self._committed = committed
        # What the newest boot that has computed an epoch was copied through, by replica.
        self._computed: dict[tuple[Partition, int], dict[Slot, int | None]] = {}
        self._witnessed: dict[Partition, int] = {}

    def computed(self, partition: Partition, slot: Slot, epoch: int, copied: int | None) -> None:
        """`copied`: the epoch of the partner's state that it started from."""
        replicas = self._computed.setdefault((partition, epoch), {})
        if not (slot in replicas and replicas[slot] is None):
            replicas[slot] = copied
        self._computed.pop((partition, epoch - _KEPT_EPOCHS), None)

    def is_known(self, partition: Partition, epoch: int) -> bool:
        """Whether two replicas have computed an epoch on their own; or it is too old to know."""
        known = max(self._witnessed.get(partition, -1), self._committed(partition))
        if epoch <= known:
            return True
        replicas = self._computed.get((partition, epoch), {})
        if sum(copied is None or copied <= known for copied in replicas.values()) < 2:
            return False
        self._witnessed[partition] = epoch
        return True
