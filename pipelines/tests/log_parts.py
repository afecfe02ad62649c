"""Epochs for an output log, and a spill in memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from rekindle.errors import ObjectMissing
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog

SCHEMA = pa.schema([("n", pa.int64()), ("s", pa.string())])


def batch(epoch: int, rows: int = 3, *, salt: int = 0, watermark: int | None = None) -> EpochBatch:
    table = pa.table(
        {"n": [epoch * 100 + i + salt for i in range(rows)], "s": ["x" * 10] * rows}, schema=SCHEMA
    )
    mark = epoch * 1000 if watermark is None else watermark
    return EpochBatch("stream", 0, epoch, mark, table, digest_table(table))


def open_log(directory: Path, **options: object) -> OutputLog:
    return OutputLog(directory, "stream", 0, SCHEMA, **options)  # type: ignore[arg-type]


def filled(directory: Path, count: int, rows: int = 3, **options: object) -> OutputLog:
    log = open_log(directory, **options)
    for epoch in range(count):
        assert log.append(batch(epoch, rows))
    return log


class MemorySpill(dict[str, bytes]):
    def put(self, name: str, data: bytes) -> None:
        self[name] = data

    def get(self, name: str) -> bytes:  # type: ignore[override]
        if name not in self:
            raise ObjectMissing(name)
        return self[name]

    def delete(self, name: str) -> None:
        del self[name]
