"""Wrong results of replicas, and what follows from them.

What a task computes from a wrong state or a wrong input is as wrong as that, and no error of its
own.

Design: docs/simulation.md#wrong-results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rekindle_testing.simulation.values import hash_of, is_idle, watermark_of, with_mark


class Recurrence(Enum):
    """What a pod computes for an epoch that it has computed wrongly once."""

    ONCE = auto()  # the right result: a bit flip
    REPEATED = auto()  # the same wrong result: a part of its machine is defective
    DIFFERENT = auto()  # another wrong result


@dataclass(slots=True)
class WrongResult:
    """Of a pod. `epoch`: the one that it computes wrongly; None: it has not done so yet."""

    recurrence: Recurrence
    epoch: int | None = None
    times: int = 0

    @property
    def has_begun(self) -> bool:
        return self.epoch is not None

    def concerns(self, epoch: int) -> bool:
        if self.epoch is None:
            return True
        return epoch == self.epoch and not (self.recurrence is Recurrence.ONCE and self.times)


class WrongResults:
    """All wrong values of a simulation; no two values are equal."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def is_wrong(self, value: str) -> bool:
        """Whether it is wrong, or follows from what is."""
        return value in self._values

    def any_wrong(self, values: Iterable[str]) -> bool:
        return not self._values.isdisjoint(values)

    def computed(self, value: str, before: str, inputs: Sequence[Sequence[str]]) -> None:
        """A value was computed from a state and the values of each input."""
        if self._values and (before in self._values or any(map(self.any_wrong, inputs))):
            self._values.add(value)

    def instead_of(self, value: str, epoch: int, planned: WrongResult) -> str:
        """What a pod computes for an epoch that its wrong result concerns."""
        planned.epoch, planned.times = epoch, planned.times + 1
        number = planned.times if planned.recurrence is Recurrence.DIFFERENT else 0
        wrong = with_mark(hash_of("wrong", value, number), watermark_of(value), is_idle(value))
        self._values.add(wrong)
        return wrong
