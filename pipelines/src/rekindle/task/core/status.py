"""The status of a task: its phase, problems and digests, and the poll responses that report them.
Pure.

A task's process writes and reads it under the one lock of its core. What it reads of the ports must
not wait for their calls.

Design: docs/design/task.md#passive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from rekindle.engine.model import DroppedRows
from rekindle.errors import StateLost
from rekindle.identity import STREAM_VERSIONS
from rekindle.protocol import (
    ConsistencyState,
    Contradiction,
    PollResponse,
    RestorePoint,
    TaskPhase,
    TaskProblem,
    TaskRef,
)
from rekindle.streams.epochs import NO_EPOCH
from rekindle.task.core.hot_keys import HotKeys
from rekindle.task.core.lending import LendingCore
from rekindle.task.core.partner import PartnerMessages
from rekindle.task.core.parts import Parts
from rekindle.task.core.phases import TaskEvent, new_phase
from rekindle.task.core.saver import SaverCore
from rekindle.task.core.source import LiveSourceStatus

REPORTED_DIGESTS = 16
"""Number of newest epochs whose digests are in each response."""
KEPT_DIGESTS = 256
"""Number of newest epochs whose digests can be requested."""
LIVE_WITHIN_EPOCHS = 2
"""A task that catches up becomes Live when it is at most so many epochs behind the head, and has
fetched all of its state: state that is only in the store may be lost, so a task without it would be
no redundancy."""
BEHIND_AFTER_EPOCHS = 10
"""A Live task becomes CatchingUp when it is more than so many epochs behind the head."""


class PortsView(Protocol):
    """What responses tell of the threads and files around the core."""

    def log_bytes(self) -> int:
        """Of the output log, on local disk."""
        ...

    def unreadable(self) -> tuple[str, ...]:
        """Addresses of replicas of upstreams at which the last call failed."""
        ...

    def problem(self) -> TaskProblem | None:
        """A call that does not return, or a thread that has failed."""
        ...


class FetchView(Protocol):
    """The fetching of a restored state."""

    @property
    def problem(self) -> str | None: ...
    @property
    def unfetched_bytes(self) -> int: ...
    @property
    def lost(self) -> StateLost | None: ...


class TaskStatus:
    """See the module's docstring. `clock`: Unix time in seconds."""

    def __init__(
        self,
        ref: TaskRef,
        boot_id: str,
        origin_us: int,
        epoch_interval_us: int,
        clock: Callable[[], float],
        saver: SaverCore,
        lending: LendingCore,
    ) -> None:
        self._phase = new_phase()
        self.head = NO_EPOCH  # the newest epoch that time, or the upstreams, have released
        self.restored_from: int | None = None
        self.restoring: str | None = None  # the entry of which state is still fetched
        self.fetch: FetchView | None = None  # while state is fetched
        self.last_epoch: int | None = None  # of a bounded source: no later epoch has rows
        self.ports: PortsView | None = None
        self.parts: Parts | None = None  # once the task is restored
        self.lent_from: int | None = None  # the epoch after which a partner's state begins
        self.may_be_live = True
        self.dropped: Mapping[str, DroppedRows] = {}  # the chain updates it in place
        self.source: LiveSourceStatus | None = None  # its inputs update it in place
        self.hot_keys: HotKeys | None = None  # the engine's thread updates it in place
        self._saver = saver
        self._lending = lending
        self._ref = ref
        self.boot_id = boot_id
        self._origin_us = origin_us
        self._epoch_interval_us = epoch_interval_us
        self._clock = clock
        self._problems: dict[str, TaskProblem] = {}
        self._failure: TaskProblem | None = None
        self._calls: deque[tuple[int, float]] = deque(maxlen=512)  # epochs and duration of each
        self._computed: dict[int, tuple[str, str]] = {}  # digest and chained digest, oldest first
        self._requested: frozenset[int] = frozenset()
        self._committed = NO_EPOCH
        # With the epoch of the newest checkpoint that was committed when it was reported.
        self._contradiction: tuple[Contradiction, int] | None = None
        self._output: Mapping[str, object] = {}  # fields of responses
        self.held_log: tuple[int, int] | None = None  # until it has a restore point

    # -- written ---------------------------------------------------------------------------------

    def set_problem(self, subject: str, problem: TaskProblem | None) -> None:
        """Report the problem of a part of the task; None if it has recovered."""
        if problem is None:
            self._problems.pop(subject, None)
        else:
            self._problems[subject] = problem

    def step(self, event: TaskEvent) -> None:
        """Change the phase. Raises InvalidTransition."""
        self._phase.step(event)

    def fail(self, problem: TaskProblem) -> None:
        """The task cannot continue; the first failure is kept."""
        # Before the phase changes, so that a failed task always has a problem.
        self._failure = self._failure or problem
        self.step(TaskEvent.FAILED)

    def processed(self, epochs: int, seconds: float) -> None:
        """One call of the chain, of so many epochs, took `seconds`, with appending its output to
        the log."""
        self._calls.append((epochs, seconds))

    def computed(self, epoch: int, digest: str, chained: str) -> None:
        """This process has computed an epoch: its digest, and that of all output through it."""
        self._computed[epoch] = (digest, chained)
        if epoch - KEPT_DIGESTS not in self._requested:
            self._computed.pop(epoch - KEPT_DIGESTS, None)

    def contradicted(self, epoch: int, message: str) -> None:
        """An earlier boot may have served another result for an epoch. The first report is kept
        until a checkpoint that contains the epoch is committed."""
        if self._contradiction is None:
            contradiction = Contradiction(epoch=epoch, message=message)
            self._contradiction = (contradiction, self._committed)

    def start_from(self, point: RestorePoint) -> None:
        self.restored_from, self.restoring, self.held_log = point.epoch, point.object, None
        if point.lender is not None:
            self.lent_from, self.may_be_live = point.epoch, False
        self.step(TaskEvent.START_BEGUN)

    def committed(self, epoch: int, may_be_live: bool = True) -> None:
        """The newest committed checkpoint of this partition. `may_be_live`: of the poll."""
        self._committed, self.may_be_live = epoch, may_be_live
        if self._contradiction is not None:
            contradiction, before = self._contradiction
            if epoch > before and epoch >= contradiction.epoch:
                self._contradiction = None

    def request_digests(self, epochs: Iterable[int]) -> None:
        """Keep the digests of these epochs, and report them in each response."""
        self._requested = frozenset(epochs)

    def update_phase(self) -> None:
        """The task becomes Live within LIVE_WITHIN_EPOCHS of the head, once all of its state is
        fetched, and stays so until it is more than BEHIND_AFTER_EPOCHS behind. One that began with
        a lent state waits until polls allow it."""
        phase = self.phase
        if self.parts is None or not phase.serves:
            return
        # The log of an earlier boot may be ahead of the engine.
        behind = self.head - self.parts.loop.state.epoch
        near = self.head != NO_EPOCH and behind <= LIVE_WITHIN_EPOCHS
        ready = self.restoring is None and self.may_be_live
        if phase is TaskPhase.CATCHING_UP and near and ready:
            self.step(TaskEvent.CAUGHT_UP)
        elif phase is TaskPhase.LIVE and behind > BEHIND_AFTER_EPOCHS:
            self.step(TaskEvent.FELL_BEHIND)

    def set_consistency(
        self,
        state: ConsistencyState,
        tentative_epoch: int | None,
        missing: Sequence[str],
        partner: PartnerMessages,
    ) -> None:
        """The state of the output of a task whose output may be tentative; `missing`: its input
        streams that are missing."""
        self._output = {
            "consistency": state,
            "tentative_epoch": NO_EPOCH if tentative_epoch is None else tentative_epoch,
            "missing": tuple(missing),
            "asks": partner.asks,
            "answer": partner.answer,
        }

    # -- read ------------------------------------------------------------------------------------

    @property
    def phase(self) -> TaskPhase:
        return self._phase.state

    def lag_s(self) -> float:
        """Age of the oldest epoch whose time has passed and that is not in the log."""
        if self.parts is None and self.restored_from is None:
            return 0.0
        stable = self.parts.log.last if self.parts else (self.restored_from or 0)
        oldest = stable + 1
        due_us = self._origin_us + (oldest + 1) * self._epoch_interval_us  # its end
        return max(0.0, self._clock() - due_us / 1e6)

    def missing_state_bytes(self) -> int:
        """State that is still fetched."""
        fetch = self.fetch
        return fetch.unfetched_bytes if fetch is not None else 0

    def snapshot_bytes(self) -> int:
        """Memory that checkpoints and lent states keep beyond the newest state."""
        if self.parts is None:
            return 0
        newest = self.parts.loop.state.operators
        return sum(held.nbytes for held in self._saver.snapshots.held(newest))

    def epoch_p99_s(self) -> float:
        """Of the durations of calls, each of one or more epochs."""
        ordered = sorted(seconds for _, seconds in self._calls)
        return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0

    def epoch_mean_s(self) -> float:
        """Time for an epoch. In a replay, whose calls have many epochs each, it is shorter."""
        epochs = sum(epochs for epochs, _ in self._calls)
        return sum(seconds for _, seconds in self._calls) / epochs if epochs else 0.0

    def state_bytes(self) -> int:
        """Size of the newest state, wherever it is kept."""
        return self.parts.loop.state.operators.nbytes if self.parts is not None else 0

    def hot_key_shares(self) -> Mapping[str, float]:
        """By input whose rows are distributed by a key: `HotKeys.shares`."""
        if self.hot_keys is None or self.parts is None:
            return {}
        return self.hot_keys.shares(self.parts.loop.state.epoch)

    def response(self, fence: int) -> PollResponse:
        parts, fetch = self.parts, self.fetch
        lost = fetch.lost if fetch is not None else None
        in_store = self.lent_from is None  # what it fetches
        base = PollResponse(
            task=self._ref,
            boot_id=self.boot_id,
            fence=fence,
            phase=self.phase,
            lag_s=self.lag_s(),
            restored_from=self.restored_from,
            lent_from=self.lent_from,
            lent=self._lending.newest,
            restoring=self.restoring if in_store else None,
            lost=lost.object if lost is not None and in_store else None,
            problem=self._problem(parts),
            contradiction=self._contradiction[0] if self._contradiction is not None else None,
            stream_protocol=STREAM_VERSIONS.protocol,
            oldest_stream_protocol=STREAM_VERSIONS.oldest,
            epoch_p99_s=self.epoch_p99_s(),
            epoch_mean_s=self.epoch_mean_s(),
            state_bytes=self.state_bytes(),
            held_log=self.held_log,
        )
        if parts is None:
            return base.model_copy(update=self._output)
        computed = self._digests_to_report()
        progress: dict[str, object] = {
            "stable_epoch": parts.log.last,
            "head_epoch": self.head,
            "last_epoch": self.last_epoch,
            "log_base": parts.log.base,
            "digests": {e: digest for e, (digest, _) in computed.items()},
            "chained": {e: chained for e, (_, chained) in computed.items()},
            "checkpoints": self._saver.saved(),
            "sinks": parts.sinks.progress(),
            "source": self.source.progress() if self.source is not None else None,
            "hot_key": self.hot_keys.text(parts.loop.state.epoch) if self.hot_keys else "",
        }
        if self.ports is not None:
            progress["unreadable"] = self.ports.unreadable()
            progress["log_bytes"] = self.ports.log_bytes()
        return base.model_copy(update={**self._output, **progress})

    def _digests_to_report(self) -> dict[int, tuple[str, str]]:
        known = self._computed
        newest = next(reversed(known), NO_EPOCH)
        epochs = {*range(newest - REPORTED_DIGESTS + 1, newest + 1), *self._requested}
        return {epoch: known[epoch] for epoch in sorted(epochs) if epoch in known}

    def _problem(self, parts: Parts | None) -> TaskProblem | None:
        problem = self._failure or next(iter(self._problems.values()), None)
        fetch = self.fetch
        if problem is None and fetch is not None and fetch.problem is not None:
            problem = TaskProblem(
                message=f"part of the state is not fetched yet: {fetch.problem}",
                saving=parts is not None,  # after the start, checkpoints wait for it
            )
        if problem is None and parts is not None:
            if (message := parts.sinks.problem()) is not None:
                problem = TaskProblem(message=message)
            elif (message := self._saver.problem) is not None:
                problem = TaskProblem(message=message, saving=True)
        if problem is None and self.ports is not None:
            problem = self.ports.problem()
        return problem
