"""Bugs that are planted in the lending of states, and in what copies of a state count for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rekindle.coordinator.agreement.comparison import DigestComparison
from rekindle.coordinator.checkpoints.sinks import assigned_sinks
from rekindle.coordinator.core import desired_state
from rekindle.coordinator.core.desired_state import DesiredState
from rekindle.coordinator.tasks.lending import Lending
from rekindle.task.core.lending import LendingCore
from rekindle_testing.simulation.lending import LentRequest, SimulatedLentState
from rekindle_testing.simulation.planting import Mutant, replaced


def _copies_count(is_copy: Any) -> Any:
    return lambda self, partition, by: False


def _wrong_field(name: str, of: Callable[[Any, Any], object]) -> Mutant:
    """One field of the desired state of a task is another one."""

    def make(fields_of: Any) -> Any:
        return lambda self, task: {**fields_of(self, task), name: of(self, task)}

    return replaced(DesiredState, "fields_of", make)


def _sinks_of(state: Any, task: Any) -> object:
    return assigned_sinks(state.graph, state.manifest, task.partition.segment)


def _newest_entry_counts(may_be_live: Any) -> Any:
    """An older entry, which is kept for a consumer, is not looked at."""

    def wrong(task: Any, manifest: Any) -> bool:
        refs = manifest.entries.get(task.partition.key)
        return task.lent_from is None or (bool(refs) and refs[0].epoch >= task.lent_from)

    return wrong


def _any_epoch_is_restored(restore_point: Any) -> Any:
    def wrong(self: Any, task: Any, replicas: Any, refs: Any, *more: Any) -> Any:
        return restore_point(self, task, replicas, [replace(refs[0], epoch=-1)], *more)

    return wrong


def _another_epoch(requested: Any) -> Any:
    """The state of an epoch is lent under the number of the one before."""

    def wrong(self: LendingCore, state: Any, not_before: int, now: float) -> None:
        requested(self, replace(state, epoch=state.epoch - 1), not_before, now)

    return wrong


def _newest_when_read(read: Any) -> Any:
    """What is lent goes on with the lender."""

    def wrong(self: SimulatedLentState, request: LentRequest, reply: Any) -> None:
        parts = self._core.parts
        read(self, request, lambda found: reply(found and parts and parts.loop.state))

    return wrong


LENDING_MUTANTS: Mapping[str, Mutant] = {
    "a copy counts as a witness": replaced(DigestComparison, "_is_copy", _copies_count),
    "a task is Live before the lent epoch is committed": _wrong_field(
        "may_be_live", lambda state, task: True
    ),
    "a task is Live while an older entry is kept": replaced(
        desired_state, "may_be_live", _newest_entry_counts
    ),
    "a task saves before the lent epoch is committed": _wrong_field(
        "saver", lambda state, task: True
    ),
    "a task gets sinks before the lent epoch is committed": _wrong_field("sinks", _sinks_of),
    "a partner that is behind the checkpoint lends": replaced(
        Lending, "restore_point", _any_epoch_is_restored
    ),
    "a state is lent under another epoch": replaced(LendingCore, "requested", _another_epoch),
    "what is lent changes while it is read": replaced(
        SimulatedLentState, "_read", _newest_when_read
    ),
}
