"""Runs in memory-mapped files, so that state may be larger than memory.

A file is unlinked as soon as it is mapped: a process that dies leaves nothing behind, and the space
is freed when the last run of the file is dropped. The pages of a mapped file count as the page
cache of the pod, which the kernel reclaims.

Design: docs/design/engine.md#state.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import Run

STATE_BYTES = 32 << 20
"""State of a task in memory, by default."""


class RunFiles:
    """Files below `directory`; `memory_bytes` of runs stay in memory."""

    def __init__(self, directory: Path, memory_bytes: int = STATE_BYTES) -> None:
        self._directory = directory
        self._memory_bytes = memory_bytes

    def spill(self, states: Mapping[str, OperatorState]) -> Mapping[str, OperatorState]:
        """The same states, with runs moved to files if there are too many in memory. Raises
        OSError; then nothing has changed."""
        in_memory = [
            run
            for state in states.values()
            for run in (*state.nodes.values(), *state.runs())
            if not run.spilled
        ]
        size = sum(run.nbytes for run in in_memory)
        if size <= self._memory_bytes:
            return states
        pa.default_memory_pool().release_unused()  # what was freed since the last spill
        by_schema: dict[pa.Schema, list[Run]] = {}
        for run in in_memory:  # nodes and pages first, then deltas, oldest first
            if size <= self._memory_bytes // 2:
                break
            size -= run.nbytes
            by_schema.setdefault(run.table.schema, []).append(run)
        moved: dict[object, Run] = {}
        for schema, runs in by_schema.items():
            tables = self.write(schema, (run.table for run in runs))
            for run, table in zip(runs, tables, strict=True):
                moved[run.id] = replace(run, table=table, spilled=True)
        return {operator: state.with_runs(moved) for operator, state in states.items()}

    def write(self, schema: pa.Schema, tables: Iterable[pa.Table]) -> list[pa.Table]:
        """The same tables, in one new file. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="state-", suffix=".arrow", dir=self._directory)
        os.close(handle)
        try:
            with pa.OSFile(name, "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for table in tables:
                    writer.write_batch(_one_batch(table))
            reader = pa.ipc.open_file(pa.memory_map(name, "r"))
        finally:
            Path(name).unlink()
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        return [pa.Table.from_batches([batch]) for batch in batches]


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches() or [
        pa.record_batch([pa.array([], f.type) for f in table.schema], table.schema)
    ]
    return batch
