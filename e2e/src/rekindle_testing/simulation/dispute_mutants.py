"""Bugs that are planted in what is done when replicas disagree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.coordinator.agreement.comparison import DigestComparison
from rekindle.coordinator.agreement.containment import Containment
from rekindle.coordinator.agreement.disputes import Dispute
from rekindle_operator.reconcile import slots
from rekindle_testing.simulation.planting import Mutant, replaced


def _first_is_believed(witnesses: Any) -> Any:
    """The result of the lowest index counts as that of two."""

    def wrong(self: DigestComparison, partition: Any, group: Any) -> int:
        found: int = witnesses(self, partition, group)
        return found + 2 * any(computation.slot.replica_index == 0 for computation, _ in group)

    return wrong


def _commits_all(agreed_entries: Any) -> Any:
    return lambda self, slot, saved, replicas, is_suspected: list(saved)


def _decides_nothing(decide: Any) -> Any:
    return lambda self, partition, computation, restored_from: None


def _discards_nothing(discard: Any) -> Any:
    return lambda self, computations: None


def _holds_no_sink(sinks_through: Any) -> Any:
    return lambda self, slot: None


def _every_result_counts(may_share_node: Any) -> Any:
    return lambda self, earlier, later: False


def _compares_no_files(may_have_wrong_files: Any) -> Any:
    return lambda self, partition, graph: False


def _inherits_nothing(keep_contained: Any) -> Any:
    return lambda self, *arguments: False


def _replaces_none(has_diverged: Any) -> Any:
    return lambda context, slot, pod: False


DISPUTE_MUTANTS: Mapping[str, Mutant] = {
    "the first of two replicas that disagree is believed": replaced(
        DigestComparison, "_witness_count", _first_is_believed
    ),
    "a wrong replica's checkpoint is committed": replaced(
        Containment, "agreed_entries", _commits_all
    ),
    "a dispute never ends": replaced(DigestComparison, "_decide", _decides_nothing),
    "what has read a wrong epoch goes on": replaced(DigestComparison, "discard", _discards_nothing),
    "sinks write while replicas disagree": replaced(Containment, "sinks_through", _holds_no_sink),
    "a replica that repeats its result is believed": replaced(
        Dispute, "may_share_node", _every_result_counts
    ),
    "pods that start after a dispute compare no files": replaced(
        Containment, "may_have_wrong_files", _compares_no_files
    ),
    "a new coordinator does not go on with a dispute": replaced(
        Containment, "keep_contained", _inherits_nothing
    ),
    "a replica that is known to be wrong stays": replaced(slots, "has_diverged", _replaces_none),
}
