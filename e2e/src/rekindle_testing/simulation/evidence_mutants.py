"""Bugs that are planted in what a process believes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.coordinator.checkpoints import retention
from rekindle.streams.sunion import SUnion
from rekindle_testing.simulation.planting import Mutant, replaced

_AHEAD_EPOCHS = 4


def _watermark_by_arrival(add: Any) -> Any:
    """The watermark of the input that arrived last, not the lowest of all."""

    def wrong(self: SUnion, channel: Any, batch: Any) -> Any:
        return [replace(e, watermark=batch.watermark) for e in add(self, channel, batch)]

    return wrong


def _received_before_it_is(progress_of: Any) -> Any:
    def wrong(tasks: Any) -> retention.Progress:
        found: retention.Progress = progress_of(tasks)
        ahead = {p: tuple(e + _AHEAD_EPOCHS for e in es) for p, es in found.positions.items()}
        entries = {p: tuple(e + _AHEAD_EPOCHS for e in es) for p, es in found.restoring.items()}
        return replace(found, positions=ahead, restoring=entries)

    return staticmethod(wrong)


EVIDENCE_MUTANTS: Mapping[str, Mutant] = {
    "watermarks follow the order of arrival": replaced(SUnion, "add", _watermark_by_arrival),
    "epochs count as received before they are": replaced(
        retention.Progress, "of", _received_before_it_is
    ),
}
