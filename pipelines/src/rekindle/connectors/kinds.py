"""Chooses the connector for the kind of source or sink that a topology names."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.files_sink import FilesSink
from rekindle.connectors.files_source import open_files
from rekindle.connectors.generator import GeneratorSource
from rekindle.connectors.sink import Sink
from rekindle.connectors.source import ReplayableSource
from rekindle.engine.memory import MemoryPlan
from rekindle.errors import SinkRefused, SourceFailed
from rekindle.topology.model import Node
from rekindle.topology.spec import SinkSpec, SourceSpec


def open_source(
    source: SourceSpec,
    node: Node,
    epoch_interval_us: int,
    work_dir: Path,
    memory: MemoryPlan | None = None,
) -> ReplayableSource:
    """The source of `node`; what it prepares lies in `work_dir` and is reused after a restart.
    `memory` bounds an epoch that is computed, before it is.

    Raises SourceFailed, which names the file, row and column where it can.
    """
    if source.files is not None:
        return open_files(source, node, epoch_interval_us, work_dir)
    if source.generator is not None:
        return GeneratorSource(source, node, epoch_interval_us, memory)
    kind = "kafka" if source.kafka is not None else "none"
    raise SourceFailed(
        f"source {source.name}: sources of kind {kind} are not built yet; use files or generator"
    )


def open_sink(
    query: str,
    spec: SinkSpec,
    partition: int,
    topology_uid: str,
    schema: pa.Schema,
    definition: Definition | None = None,
) -> Sink:
    """The sink of `query` for rows of `schema`. Raises SinkRefused if the place is another's."""
    if spec.files is not None:
        return FilesSink(query, spec.files, partition, topology_uid, schema, definition=definition)
    kind = next((k for k in ("kafka", "stream") if getattr(spec, k) is not None), "none")
    raise SinkRefused(f"query {query}: sinks of kind {kind} are not built yet; use files")
