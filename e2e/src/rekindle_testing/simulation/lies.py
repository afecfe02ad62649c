"""Wrong results: which values replicas have computed wrongly, and what follows from them.

A partition with two replicas has one that is wrong at a time, and its partner is Live: nothing is
promised otherwise. What a task computes from a wrong state or a wrong input is as wrong as that,
and no error of its own.

Design: docs/simulation.md#wrong-results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rekindle.coordinator.model import Partition
from rekindle_testing.simulation.values import hash_of


class LieKind(Enum):
    """What a pod computes for an epoch that it has computed wrongly once."""

    ONCE = auto()  # the right result: a cosmic ray
    REPEATED = auto()  # the same wrong result: a part of its machine is broken
    DIFFERENT = auto()  # another wrong result


@dataclass(slots=True)
class Lie:
    """Of a pod: `epoch` is the first one that it computes from now on."""

    kind: LieKind
    epoch: int | None = None
    times: int = 0


class Lies:
    """All wrong values of a simulation; no two values are equal."""

    def __init__(self) -> None:
        self._wrong: set[str] = set()
        self._partitions: set[Partition] = set()

    @property
    def happened(self) -> bool:
        return bool(self._partitions)

    def concern(self, partition: Partition) -> bool:
        """Whether a replica of a partition has been wrong."""
        return partition in self._partitions

    def explain(self, values: Iterable[str]) -> bool:
        """Whether one of them is wrong, or follows from what is."""
        return not self._wrong.isdisjoint(values)

    def computed(self, value: str, before: str, inputs: Sequence[Sequence[str]]) -> None:
        """A value was computed from a state and the values of each input."""
        if self._wrong and self.explain((before, *(v for values in inputs for v in values))):
            self._wrong.add(value)

    def tell(self, lie: Lie, partition: Partition, epoch: int, value: str) -> str:
        """What a pod computes in place of the right value."""
        if lie.epoch is None:
            lie.epoch = epoch
        if epoch != lie.epoch or (lie.kind is LieKind.ONCE and lie.times):
            return value
        lie.times += 1
        wrong = hash_of("wrong", value, lie.times if lie.kind is LieKind.DIFFERENT else 0)
        self._wrong.add(wrong)
        self._partitions.add(partition)
        return wrong
