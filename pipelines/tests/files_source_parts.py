"""A files source over small files."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
from schema_parts import topology_schema

from rekindle.connectors.files_source import FilesSource
from rekindle.connectors.registry import open_source
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec

SECOND = 1_000_000


T0 = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)


T0_US = int(T0.timestamp()) * SECOND


SCHEMA = pa.schema([("k", pa.string()), ("v", pa.float64()), ("t", pa.timestamp("us", "UTC"))])


def source_of(
    tmp: Path,
    url: str,
    schema: pa.Schema = SCHEMA,
    lateness: str = "0s",
    partition: tuple[int, int] = (0, 1),
    verifies_checksums: bool = True,
    **files: Any,
) -> FilesSource:
    """`partition`: its number, and how many there are. `verifies_checksums`: each cut does."""
    spec = {
        "name": "s",
        "schema": "-",
        "eventTime": {"column": "t", "lateness": lateness},
        "files": {"url": url, "format": "csv", "orderBy": "t", "speedup": 3600, **files},
    }
    event_time: str | None = "t"
    if "t" not in schema.names or not pa.types.is_timestamp(schema.field("t").type):
        event_time = None
    source = SourceSpec.model_validate(spec)
    node = Node(
        "s",
        "id-s",
        source,
        inputs=(),
        schema=topology_schema(schema),
        event_time=event_time,
        partitions=partition[1],
    )
    opened = open_source(
        source,
        node,
        SECOND,
        tmp / "work",
        partition=partition[0],
        verifies_checksums=verifies_checksums,
    )
    assert isinstance(opened, FilesSource)
    return opened


def csv(tmp: Path, *lines: str, name: str = "in.csv", header: str = "k,v,t") -> str:
    path = tmp / name
    path.write_text("\n".join((header, *lines)) + "\n")
    return f"file://{path}"


def values_of_k(source: FilesSource, epoch: int) -> list[str]:
    return source.cut(epoch).rows.column("k").to_pylist()  # type: ignore[no-any-return]
