"""Bugs that are planted in what makes, corrects and hands on tentative results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.deadlines import Deadlines
from rekindle.consistency.inputs import ReceivedInputs
from rekindle.consistency.live_union import LiveUnion
from rekindle.consistency.messages import EmitReconciliationDone, EmitUndo, Policy
from rekindle.consistency.partners import Partners, Permission
from rekindle.protocol import ConsistencyState
from rekindle.task.core.loop import AppendEpochs, AppendTentative, LoopCore
from rekindle.task.core.streams import StreamsCore
from rekindle_testing.simulation.planting import Mutant, replaced


def _without(kind: type) -> Any:
    """Effects of a method, but for those of a kind."""

    def make(method: Any) -> Any:
        def wrong(self: Any, *arguments: Any) -> Any:
            return [e for e in method(self, *arguments) if not isinstance(e, kind)]

        return wrong

    return make


def _undoes_too_late(stabilize: Any) -> Any:
    def wrong(self: ConsistencyCore, now: float) -> Any:
        effects = stabilize(self, now)
        return [EmitUndo(e.from_epoch + 1) if isinstance(e, EmitUndo) else e for e in effects]

    return wrong


def _appends_to_log(processed: Any) -> Any:
    def wrong(self: LoopCore, outputs: Any, operators: Any, now: float) -> Any:
        effects = processed(self, outputs, operators, now)
        return [AppendEpochs([e.output]) if isinstance(e, AppendTentative) else e for e in effects]

    return wrong


def _forks_each_epoch(taken: Any) -> Any:
    return lambda self, attempt, epoch, forks, now: taken(self, attempt, epoch, True, now)


def _keeps_tentative_state(appended: Any) -> Any:
    """The stable branch goes on from the state of the tentative one."""

    def wrong(self: LoopCore, now: float) -> Any:
        self.state = replace(self.state, operators=self._operators)
        return appended(self, now)

    return wrong


def _breaks_promise(permission: Any) -> Any:
    def wrong(self: Partners, now: float) -> Permission:
        return Permission.BEGIN if now < self._serving_until else permission(self, now)

    return wrong


def _repeats_epoch(add: Any) -> Any:
    """A channel that lacks an epoch gives the one before it again."""

    def wrong(self: LiveUnion, channel: Any, batch: Any) -> None:
        add(self, channel, batch)
        add(self, channel, replace(batch, epoch=batch.epoch + 1))

    return wrong


def _counts_from_newest(first_arrival: Any) -> Any:
    """An epoch waits from when anything arrived last."""

    def wrong(self: Deadlines, epoch: int) -> float:
        first = float(first_arrival(self, epoch))
        return max(first, self._times[-1]) if self._times else first

    return wrong


def _suspends_in_failure(policy: Any) -> Any:
    def wrong(self: ConsistencyCore, now: float) -> Policy:
        fails = self.state is ConsistencyState.UP_FAILURE
        return Policy.SUSPEND if fails else Policy(policy(self, now))

    return wrong


def _never_corrects(try_to_stabilize: Any) -> Any:
    return lambda self, now: []


def _skips_epoch(take: Any) -> Any:
    """A correction begins an epoch too late."""

    def wrong(self: ReceivedInputs, first: Any) -> Any:
        epochs = take(self, first)
        return epochs[1:] if len(epochs) > 2 else epochs

    return wrong


def _max_delay_from_start(began: Any) -> Any:
    """`maxDelay` holds from the start on, not only once the task is Live."""

    def wrong(self: StreamsCore, settings: Any, *arguments: Any) -> None:
        began(self, settings, *arguments)
        self._core.max_delay_changed(settings.max_delay_s, -inf)

    return wrong


def _never_reads_live(subscribe: Any) -> Any:
    """Later tasks of a chain then give no tentative result."""
    return lambda self, forked, may_be_tentative, live_epoch: []


TENTATIVE_MUTANTS: Mapping[str, Mutant] = {
    "UNDO is forgotten": replaced(ConsistencyCore, "_stabilize", _without(EmitUndo)),
    "UNDO begins an epoch too late": replaced(ConsistencyCore, "_stabilize", _undoes_too_late),
    "REC_DONE is never sent": replaced(ConsistencyCore, "_end", _without(EmitReconciliationDone)),
    "tentative rows enter the log, and so the sinks": replaced(
        LoopCore, "epochs_processed", _appends_to_log
    ),
    "each tentative epoch begins with the stable state": replaced(
        LoopCore, "tentative_taken", _forks_each_epoch
    ),
    "the stable branch goes on from the tentative state": replaced(
        LoopCore, "tentative_appended", _keeps_tentative_state
    ),
    "a replica that has promised to serve begins to correct": replaced(
        Partners, "permission", _breaks_promise
    ),
    "a missing epoch is replaced by the one before": replaced(LiveUnion, "add", _repeats_epoch),
    "an epoch waits from when anything arrived last": replaced(
        Deadlines, "first_arrival", _counts_from_newest
    ),
    "new input waits during a failure": replaced(ConsistencyCore, "_policy", _suspends_in_failure),
    "corrections never begin": replaced(ConsistencyCore, "_try_to_stabilize", _never_corrects),
    "a correction begins an epoch too late": replaced(ReceivedInputs, "take", _skips_epoch),
    "tentative output of an upstream is not read": replaced(
        ReceivedInputs, "subscribe", _never_reads_live
    ),
    "a task is tentative before it is Live": replaced(
        StreamsCore, "__init__", _max_delay_from_start
    ),
}
