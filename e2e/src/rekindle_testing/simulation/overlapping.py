"""What lasts until the last of several faults is over."""

from __future__ import annotations

from collections.abc import Callable


class OverlappingFaults:
    """True between the first call of `begin` and as many calls of `end`."""

    def __init__(self) -> None:
        self._open = 0

    def __bool__(self) -> bool:
        return self._open > 0

    def begin(self) -> Callable[[], None]:
        """Returns `end`."""
        self._open += 1
        return self.end

    def end(self) -> None:
        self._open -= 1
