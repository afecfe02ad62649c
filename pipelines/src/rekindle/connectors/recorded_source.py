"""A live source whose epochs are all recorded: the reference execution reads it like any other.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import pyarrow as pa

from rekindle.connectors.cut_records import CutRecord
from rekindle.connectors.input_identity import InputFile
from rekindle.connectors.live_source import LiveSource
from rekindle.connectors.source import EventTimes, SourceCut, SourceSummary
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK


class RecordedSource:
    """Implements `rekindle.connectors.source.ReplayableSource`. `records`: of one partition, from
    epoch 0 on. Owns the source."""

    input_files: tuple[InputFile, ...] = ()

    def __init__(self, source: LiveSource, records: Sequence[CutRecord]) -> None:
        self._source = source
        self._records = sorted(records, key=lambda record: record.first)
        self._firsts = [record.first for record in self._records]

    @property
    def schema(self) -> pa.Schema:
        return self._source.schema

    @property
    def last_epoch(self) -> int:
        return self._records[-1].last if self._records else NO_EPOCH

    @property
    def summary(self) -> SourceSummary:
        return SourceSummary(None, None, None)

    def cut(self, epoch: int) -> SourceCut:
        record = self._record(epoch)
        idle = record is not None and record.all_idle
        if record is None or epoch != record.first:
            return SourceCut(self.schema.empty_table(), self.event_times(epoch).watermark, idle)
        rows = self._source.read(record.start, record.end).table
        return SourceCut(rows, record.watermark, idle)

    def event_times(self, epoch: int) -> EventTimes:
        record = self._record(min(epoch, self.last_epoch))
        if record is None:
            return EventTimes(NO_WATERMARK, END_OF_INPUT)
        newest_us = max(record.newest_us.values(), default=NO_WATERMARK)
        return EventTimes(newest_us, record.watermark if epoch <= record.last else END_OF_INPUT)

    def next_epoch_to_cut(self, epoch: int) -> int | None:
        at = bisect_right(self._firsts, epoch - 1)
        if at < len(self._firsts):
            return self._firsts[at]
        end = self.last_epoch + 1
        return end if epoch <= end else None

    def close(self) -> None:
        self._source.close()

    def _record(self, epoch: int) -> CutRecord | None:
        at = bisect_right(self._firsts, epoch) - 1
        return self._records[at] if at >= 0 and epoch <= self._records[at].last else None
