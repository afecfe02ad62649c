"""The source `files`: csv, parquet or JSON lines, sorted once, then cut into epochs.

The first opening prepares the input (`connectors.files_preparation`): cuts are slices of a
memory-mapped file, or of the input files, so that resident memory stays small and a restart reuses
the prepared files. Each cut verifies the checksum of its rows; if prepared files are damaged, they
are prepared again (`connectors.prepared`). The input must not change while its topology exists,
because a replay has to read the same rows: the task compares the `input_files` with the recorded
ones (`rekindle.connectors.input_identity`).

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from rekindle.connectors.files_index import int64s
from rekindle.connectors.files_job import PreparationJob, fingerprint, require_order_and_speed
from rekindle.connectors.files_preparation import (
    EVENT_TIME_RANGE_KEY,
    INPUT_KEY,
    open_in_place,
    prepare,
    require_unchanged,
)
from rekindle.connectors.files_read import find_files
from rekindle.connectors.input_identity import InputFile, decode_input_files
from rekindle.connectors.prepared import (
    IN_PLACE,
    DamagedRows,
    MappedRows,
    PreparedSource,
    Rows,
    load,
)
from rekindle.connectors.source import EventTimes, SourceContext, SourceCut, SourceSummary
from rekindle.errors import SourceFailed
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK
from rekindle.topology.kinds.files import FilesSourceSpec

_log = logging.getLogger(__name__)


def open_source(options: FilesSourceSpec, context: SourceContext) -> FilesSource:
    """Prepare the source, unless it is prepared already, and open it. Input that is in order may be
    read in place; otherwise a sorted copy is read. Raises SourceFailed."""
    source, node, work_dir = context.spec, context.node, context.work_dir
    expression = source.event_time.expression if source.event_time else None
    job = PreparationJob(
        source.name,
        options,
        node.schema,
        node.event_time,
        expression,
        context.epoch_interval_us,
        context.partition,
        node.partitions,
        context.verifies_checksums,
    )
    require_order_and_speed(job)
    fs, found = find_files(job.files.url, job.name)
    prefix = f"source-{node.id}-{context.partition}-"
    file_stem = prefix + fingerprint(job, found)
    rows, index = work_dir / f"{file_stem}.arrow", work_dir / f"{file_stem}.index"

    def prepare_again() -> PreparedSource:
        try:
            work_dir.mkdir(parents=True, exist_ok=True)
            for leftover in work_dir.glob(f".{prefix}*"):
                leftover.unlink(missing_ok=True)  # of a process that was killed while it prepared
            index.unlink(missing_ok=True)
            prepare(job, fs, found, rows, index)
        except OSError as e:
            raise SourceFailed(f"source {job.name}: cannot be prepared in {work_dir}: {e}") from e
        _remove_others(work_dir, prefix, file_stem)
        prepared = load(rows, index)
        if prepared is None:
            raise SourceFailed(
                f"source {job.name}: the prepared rows in {work_dir} cannot be read; check its disk"
            )
        return prepared

    check_unchanged = partial(require_unchanged, job, found)

    def repair() -> PreparedSource:
        check_unchanged()  # first, so that a change is reported, not an error in the changed files
        return prepare_again()

    def open_rows(prepared: PreparedSource) -> Rows:
        if prepared.rows is not None:
            return MappedRows(prepared.rows)
        return open_in_place(job, fs, found, prepared.index.schema.metadata[IN_PLACE])

    lateness = source.event_time.lateness if source.event_time else 0
    prepared = load(rows, index) or prepare_again()
    opened = FilesSource(job, prepared, lateness, open_rows, repair, check_unchanged)
    if job.partitions > 1 and not opened.summary.rows:
        _log.warning(
            "source %s: partition %d has no rows: the input has too few files or row groups for "
            "%d partitions",
            job.name,
            job.partition,
            job.partitions,
        )
    return opened


class FilesSource:
    """A prepared input. `repair` prepares it again if its bytes are damaged; `require_unchanged`
    raises SourceFailed if a file has another size or time. `verifies_checksums`: each cut
    verifies the checksum of its rows. Otherwise (reference execution) only the last cut checks that
    the files' sizes and times are the same."""

    def __init__(
        self,
        job: PreparationJob,
        prepared: PreparedSource,
        lateness_us: int,
        open_rows: Callable[[PreparedSource], Rows],
        repair: Callable[[], PreparedSource],
        require_unchanged: Callable[[], None],
    ) -> None:
        self._name = job.name
        self._verifies_checksums = job.verifies_checksums
        self._lateness_us = lateness_us
        self._open_rows = open_rows
        self._repair = repair
        self._require_unchanged = require_unchanged
        self._use(prepared)

    def _use(self, prepared: PreparedSource) -> None:
        self._rows, index = self._open_rows(prepared), prepared.index
        self.input_files = _input_of(prepared)
        # Of all partitions:
        self._event_time_range_us: list[int | None] = json.loads(
            index.schema.metadata[EVENT_TIME_RANGE_KEY]
        )
        self._epochs = int64s(index.column("epoch"))
        self._starts = np.append(int64s(index.column("start")), self._rows.num_rows)
        self._max_times = int64s(index.column("max_time"))
        self._checksums = int64s(index.column("checksum"))

    @property
    def schema(self) -> pa.Schema:
        return self._rows.schema

    @property
    def last_epoch(self) -> int:
        return int(self._epochs[-1]) if len(self._epochs) else NO_EPOCH

    @property
    def summary(self) -> SourceSummary:
        return SourceSummary(self._rows.num_rows, *self._event_time_range_us)

    def cut(self, epoch: int) -> SourceCut:
        """The rows of `epoch`; none after the last one, with END_OF_INPUT."""
        at = int(np.searchsorted(self._epochs, epoch, side="right")) - 1
        if at < 0 or self._epochs[at] != epoch:
            return SourceCut(self.schema.empty_table(), self._watermark(epoch, at))
        rows = self._undamaged_rows(at)
        if rows is None:
            rows = self._repaired(epoch, at)
        if not self._verifies_checksums and epoch == self.last_epoch:
            self._require_unchanged()
        return SourceCut(rows, self._watermark(epoch, at))

    def _undamaged_rows(self, at: int) -> pa.Table | None:
        """The rows of the epoch at this position of the index; None if they are damaged."""
        start, end = int(self._starts[at]), int(self._starts[at + 1])
        try:
            rows = self._rows.slice(start, end - start)
        except DamagedRows:
            return None
        if self._verifies_checksums and self._rows.checksum(rows) != self._checksums[at]:
            return None
        return rows

    def _repaired(self, epoch: int, at: int) -> pa.Table:
        """The rows after the input was prepared again. Raises SourceFailed."""
        _log.warning("source %s: the prepared rows of epoch %d are damaged", self._name, epoch)
        prepared = self._repair()
        if _input_of(prepared) != self.input_files:
            raise SourceFailed(
                f"source {self._name}: the prepared rows of epoch {epoch} are damaged, and the "
                "input files have changed since they were prepared; restore the files"
            )
        self._use(prepared)
        rows = self._undamaged_rows(at)
        if rows is None:
            raise SourceFailed(
                f"source {self._name}: the rows of epoch {epoch} are damaged on the local disk, "
                "even after they were prepared again; check the disk"
            )
        return rows

    def next_epoch_to_cut(self, epoch: int) -> int | None:
        """The epochs with rows, and the one after them."""
        at = int(np.searchsorted(self._epochs, epoch, side="left"))
        if at < len(self._epochs):
            return int(self._epochs[at])
        end = self.last_epoch + 1
        return end if epoch <= end else None

    def close(self) -> None:
        self._rows.close()

    def event_times(self, epoch: int) -> EventTimes:
        at = int(np.searchsorted(self._epochs, epoch, side="right")) - 1
        return EventTimes(self._newest_us(at), self._watermark(epoch, at))

    def _watermark(self, epoch: int, at: int) -> int:
        if epoch > self.last_epoch:
            return END_OF_INPUT
        return max(self._newest_us(at) - self._lateness_us, NO_WATERMARK)

    def _newest_us(self, at: int) -> int:
        return int(self._max_times[at]) if at >= 0 else NO_WATERMARK


def _input_of(prepared: PreparedSource) -> tuple[InputFile, ...]:
    return decode_input_files(prepared.index.schema.metadata[INPUT_KEY])


def _remove_others(work_dir: Path, prefix: str, keep: str) -> None:
    """Remove files prepared from another input or spec of this partition."""
    for path in work_dir.glob(f"{prefix}*"):
        if not path.name.startswith(keep):
            path.unlink(missing_ok=True)
