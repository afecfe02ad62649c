"""Runs in memory-mapped files, so that state may be larger than memory.

A file is unlinked before it is written: a process that dies leaves nothing behind, and the space is
freed when the last run of the file is dropped. The pages of a mapped file count as the page
cache of the pod, which the kernel reclaims.

Design: docs/design/engine.md#state.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from rekindle.engine.failure import DiskFull
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import Run, RunFile

STATE_BYTES = 32 << 20
"""Default limit of a task's state in memory."""
MIN_BUFFER_BYTES = 1 << 20
"""The lowest value of `RunFiles.buffer_bytes`."""
LIVE_SHARE = 0.25
"""If a smaller share of a file's bytes is live, its runs are written to another file."""


class RunFiles:
    """Writes runs to files below `directory`; at most `memory_bytes` of runs stay in memory."""

    def __init__(self, directory: Path, memory_bytes: int = STATE_BYTES) -> None:
        self._directory = directory
        self._memory_bytes = memory_bytes

    @property
    def buffer_bytes(self) -> int:
        """Limit of the rows that callers hold in memory before they write them."""
        return max(MIN_BUFFER_BYTES, self._memory_bytes // 2)

    def spill(self, states: Mapping[str, OperatorState]) -> Mapping[str, OperatorState]:
        """The same states, with runs moved to files if there are too many in memory. Raises
        DiskFull; then nothing has changed."""
        runs = [
            run for state in states.values() for run in (*state.tree_nodes.values(), *state.runs())
        ]
        in_memory = [run for run in runs if run.in_memory]
        size = sum(run.nbytes for run in in_memory)
        if size <= self._memory_bytes:
            return states
        pa.default_memory_pool().release_unused()  # return memory freed since the last spill
        by_schema: dict[pa.Schema, list[Run]] = {}
        # Tree nodes (folds of ranges of panes), pages, then deltas, oldest first.
        for run in in_memory:
            if size <= self._memory_bytes // 2:
                break
            size -= run.nbytes
            by_schema.setdefault(run.table.schema, []).append(run)
        for run in _in_sparse_files(runs):
            by_schema.setdefault(run.table.schema, []).append(run)
        moved: dict[object, Run] = {}
        for schema, chosen in by_schema.items():
            moved.update((run.id, run) for run in self.write(schema, chosen))
        return {operator: state.with_runs(moved) for operator, state in states.items()}

    def write(self, schema: pa.Schema, runs: Sequence[Run]) -> list[Run]:
        """The same runs, in one new file. Raises DiskFull."""
        if not runs:
            return []
        try:
            tables = self._write(schema, [run.table for run in runs])
        except OSError as error:
            raise DiskFull(
                f"state cannot be written to {self._directory}: {error.strerror or error}"
            ) from error
        file = RunFile(sum(run.nbytes for run in runs))
        pairs = zip(runs, tables, strict=True)
        return [Run(table, run.id, file) for run, table in pairs]

    def _write(self, schema: pa.Schema, tables: Iterable[pa.Table]) -> list[pa.Table]:
        self._directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="state-", suffix=".arrow", dir=self._directory)
        opened = f"/dev/fd/{handle}"
        try:
            Path(name).unlink()  # before it has content, which a killed process would leave behind
            with pa.OSFile(opened, "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for table in tables:
                    writer.write_batch(_one_batch(table))
            reader = pa.ipc.open_file(pa.memory_map(opened, "r"))
        finally:
            os.close(handle)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        return [pa.Table.from_batches([batch]) for batch in batches]


def _in_sparse_files(runs: Iterable[Run]) -> list[Run]:
    """The runs in files that have little live data, which they keep from being freed."""
    by_file: dict[RunFile, list[Run]] = {}
    for run in runs:
        if run.file is not None:
            by_file.setdefault(run.file, []).append(run)
    return [
        run
        for file, live in by_file.items()
        if sum(run.nbytes for run in live) < LIVE_SHARE * file.nbytes
        for run in live
    ]


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches() or [
        pa.record_batch([pa.array([], f.type) for f in table.schema], table.schema)
    ]
    return batch
