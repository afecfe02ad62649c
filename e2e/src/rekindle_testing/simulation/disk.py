"""A task's disk: its output log, the highest fence, the mark that the log has to be discarded.

It outlives the containers of a pod, not the pod.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.streams.epochs import NO_EPOCH


@dataclass(slots=True)
class Disk:
    """The log holds the values of epochs `base` to `last`. `discard`: the mark."""

    values: dict[int, str] = field(default_factory=dict)
    base: int = 0
    last: int = NO_EPOCH
    fence: int = NO_EPOCH
    discard: bool = False
    unreadable: bool = False  # the next access for a state movement fails
    attempts: int = 1  # the first number of a tentative branch that no boot may have used

    def start_at(self, epoch: int, keep: bool) -> None:
        """As `OutputLog.start_at`. `keep`: a log that reaches to `epoch` stays, and is compared."""
        if keep and not self.discard and self.last + 1 >= epoch:
            return
        self.values, self.base, self.last = {}, epoch, epoch - 1
        self.discard = False

    def take(self, base: int, last: int, values: dict[int, str]) -> None:
        """The log of a partner in place of the own one."""
        self.values, self.base, self.last = dict(values), base, last
        self.discard = False

    def append(self, epoch: int, value: str) -> str:
        """Append an epoch. Returns the value that the log has: of an earlier boot, if it has one.
        Of a truncated epoch there is none to compare with."""
        assert epoch <= self.last + 1, f"epoch {epoch} cannot follow {self.last}"
        if epoch > self.last:
            self.values[epoch] = value
            self.last = epoch
        return self.values.get(epoch, value)

    def access_fails(self) -> bool:
        failed, self.unreadable = self.unreadable, False
        return failed

    def truncate(self, floor: int) -> None:
        for epoch in range(self.base, min(floor, self.last) + 1):
            del self.values[epoch]
        self.base = max(self.base, min(floor, self.last) + 1)
