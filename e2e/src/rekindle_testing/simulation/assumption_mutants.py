"""Bugs that are planted in what a process assumes: of its inputs, and of answers that it has not
got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.coordinator.checkpoints import retention
from rekindle.coordinator.checkpoints.committer import Committer
from rekindle.streams import sunion
from rekindle.streams.reader_core import ReaderCore
from rekindle.streams.sunion import SUnion
from rekindle_operator import uncached_check
from rekindle_operator.cluster.reports import ReportAges
from rekindle_testing.simulation.planting import Mutant, replaced

_AHEAD_EPOCHS = 4


def _watermark_by_arrival(add: Any) -> Any:
    """The watermark of the input that arrived last, not the lowest of all."""

    def wrong(self: SUnion, channel: Any, batch: Any) -> Any:
        return [replace(e, watermark=batch.watermark) for e in add(self, channel, batch)]

    return wrong


def _idle_holds(merge_watermarks: Any) -> Any:
    """An input that is idle holds the watermark back."""
    return lambda inputs: (min(watermark for watermark, _ in inputs), False)


def _received_before_it_is(progress_of: Any) -> Any:
    def wrong(tasks: Any) -> retention.Progress:
        found: retention.Progress = progress_of(tasks)
        ahead = {p: tuple(e + _AHEAD_EPOCHS for e in es) for p, es in found.positions.items()}
        entries = {p: tuple(e + _AHEAD_EPOCHS for e in es) for p, es in found.restoring.items()}
        return replace(found, positions=ahead, restoring=entries)

    return staticmethod(wrong)


def _starts_anew(store_failed: Any) -> Any:
    """A store that does not respond counts as one without a manifest."""
    return lambda self, message, now: self.manifest_read(None, now)


def _stays(call_failed: Any) -> Any:
    """A reader goes on to read the replica that has failed."""

    def wrong(self: ReaderCore, number: int, now: float, **_: Any) -> Any:
        self._ended(number)
        return []

    return wrong


def _believes_cache(preconditions_of: Any) -> Any:
    return lambda decisions, snapshot: []


def _ageless(as_of: Any) -> Any:
    """A report is as fresh as anything can be."""

    def wrong(self: ReportAges, *arguments: Any) -> Mapping[str, float]:
        return dict.fromkeys(as_of(self, *arguments), float("inf"))

    return wrong


ASSUMPTION_MUTANTS: Mapping[str, Mutant] = {
    "watermarks follow the order of arrival": replaced(SUnion, "add", _watermark_by_arrival),
    "an idle input holds the watermark": replaced(sunion, "merge_watermarks", _idle_holds),
    "epochs count as received before they are": replaced(
        retention.Progress, "of", _received_before_it_is
    ),
    "a store that does not respond is empty": replaced(Committer, "store_failed", _starts_anew),
    "a reader stays at the replica that failed": replaced(ReaderCore, "call_failed", _stays),
    "nothing is read before it is deleted": replaced(
        uncached_check, "preconditions_of", _believes_cache
    ),
    "reports have no age": replaced(ReportAges, "as_of", _ageless),
}
