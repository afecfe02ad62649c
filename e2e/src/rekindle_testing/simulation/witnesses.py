"""Which epochs two replicas have computed on their own, as the simulation knows it.

A task that has started from its partner's state repeats what that has computed: it is no witness,
until the epoch of that state is witnessed, or in a manifest.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.topology.model import Partition, Slot

_KEPT_EPOCHS = 64

_Pod = tuple[Slot, int]
"""A slot and an incarnation."""


class Witnesses:
    """`committed`: the newest epoch of a partition in a manifest."""

    def __init__(self, committed: Callable[[Partition], int]) -> None:
        self._committed = committed
        # Partition and epoch -> value -> pods that have computed it -> the epoch of the partner's
        # state that the pod's boot had started from; None: it was no copy.
        self._computed: dict[tuple[Partition, int], dict[str, dict[_Pod, int | None]]] = {}
        self._witnessed: dict[Partition, int] = {}
        self._newest: dict[Partition, int] = {}

    def computed(
        self,
        partition: Partition,
        slot: Slot,
        incarnation: int,
        epoch: int,
        value: str,
        copied: int | None,
    ) -> None:
        """`copied`: the epoch of the partner's state that it started from."""
        results = self._computed.setdefault((partition, epoch), {})
        pods = results.setdefault(value, {})
        pod = slot, incarnation
        if not (pod in pods and pods[pod] is None):
            pods[pod] = copied
        self._computed.pop((partition, epoch - _KEPT_EPOCHS), None)
        self._newest[partition] = max(epoch, self._newest.get(partition, -1))

    def is_known(self, partition: Partition, epoch: int) -> bool:
        """Whether two replicas have computed the same for an epoch on their own; or it is too old
        to know. While all results are equal, the pods of one slot count as one; if results differ,
        each pod counts, since the next incarnation may run on another node."""
        forgotten = self._newest.get(partition, -1) - _KEPT_EPOCHS
        known = max(self._witnessed.get(partition, -1), self._committed(partition))
        # Each epoch may make copies witnesses of the next ones.
        for earlier in range(max(known, forgotten) + 1, epoch + 1):
            if self._agree(partition, earlier, known):
                known = self._witnessed[partition] = earlier
        return epoch <= max(known, forgotten)

    def _agree(self, partition: Partition, epoch: int, known: int) -> bool:
        """Whether two have computed the same, of which none is a copy of what came after the epoch
        `known`."""
        results = self._computed.get((partition, epoch), {})
        for pods in results.values():
            own = [pod for pod, copied in pods.items() if copied is None or copied <= known]
            if len(set(own) if len(results) > 1 else {slot for slot, _ in own}) > 1:
                return True
        return False
