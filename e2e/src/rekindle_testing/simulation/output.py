"""All output of one boot of a simulated task in its order, as `rekindle.streams.live_output`: its
log, and a branch for each attempt, in memory."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import NO_EPOCH, BatchKind
from rekindle.streams.live_history import LiveHistory, Position
from rekindle.streams.wire import LivePosition, LiveReport
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.reading import READ_EPOCHS, OutputItem, SimulatedRead

Found = tuple[tuple[OutputItem, ...], LivePosition | None]


class SimulatedOutput:
    """`changed` is called after each change of the branches, the controls or the state; the log has
    listeners of its own."""

    def __init__(self, disk: Disk, boot: str, changed: Callable[[], None]) -> None:
        self._disk = disk
        self._boot = boot
        self._changed = changed
        self._history = LiveHistory()
        self._branches: dict[int, dict[int, str]] = {}
        self._state = ConsistencyState.STABLE

    @property
    def report(self) -> LiveReport:
        history = self._history
        return LiveReport(self._boot, self._state, history.tentative, history.corrected)

    def append(self, attempt: int, epoch: int, value: str) -> bool:
        """Append a tentative epoch. Returns False if the log has it already: then it is dropped."""
        if epoch <= self._disk.last:
            return False
        branch = self._branches.setdefault(attempt, {})
        if epoch - 1 not in branch:
            branch.clear()
            self._history.begin_at(attempt, epoch)
        branch[epoch] = value
        self._history.append(BatchKind.TENTATIVE, epoch, self._disk.last, attempt)
        self._drop_unreadable()
        self._changed()
        return True

    def control(self, kind: BatchKind, epoch: int) -> None:
        self._history.append(kind, epoch, self._disk.last)
        self._changed()

    def enter(self, state: ConsistencyState) -> None:
        if state is not self._state:
            self._state = state
            self._changed()

    def truncate(self, floor: int) -> None:
        self._history.truncate(floor)
        self._drop_unreadable()

    def _drop_unreadable(self) -> None:
        readable = self._history.attempts()
        self._branches = {a: b for a, b in self._branches.items() if a in readable}

    def read(self, request: SimulatedRead) -> Found | None:
        """What follows the position of a live request, and where its reader goes on; None if the
        log no longer has it."""
        at, disk, history = request.live, self._disk, self._history
        assert at is not None
        from_epoch = request.from_epoch
        is_known = at.boot == self._boot
        position = Position(at.span, at.epoch) if is_known else None
        items: list[OutputItem] = []
        while len(items) < READ_EPOCHS:
            position = position or history.begin(from_epoch, disk.last)
            span = history.next(position, from_epoch, disk.last)
            if span is None:
                break
            if span.is_control:
                items.append(OutputItem(span.kind, span.first))
                position = Position(span.number + 1, NO_EPOCH)
                continue
            values = self._branches[span.attempt] if span.attempt else disk.values
            if span.first not in values:
                return None
            last = min(span.last, span.first + READ_EPOCHS - len(items) - 1)
            items += [
                OutputItem(span.kind, epoch, values[epoch], span.attempt)
                for epoch in range(span.first, last + 1)
            ]
            # Of the newest tentative epoch the reader also gets the stable version.
            from_epoch = last + 1 if span.kind is BatchKind.STABLE else last
            position = Position(span.number, last + 1)
        live = LivePosition(self._boot, *position) if items and position is not None else None
        return tuple(items), live
