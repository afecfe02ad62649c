"""Opens a source or a sink by the connector that its kind names (`rekindle.topology.kinds`).

A connector is a function of a module of this package, `OpenSource` or `OpenSink`, which is loaded
when it is first used. Nothing else tells one kind from another.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.sink import OpenSink, Sink, SinkContext
from rekindle.connectors.source import OpenSource, ReplayableSource, SourceContext
from rekindle.engine.memory import MemoryPlan
from rekindle.errors import SinkRefused, SourceFailed
from rekindle.topology.kinds.base import SinkOptions, SourceOptions
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
    kind, options = source.kind
    opener: OpenSource | None = connector(type(options))
    if opener is None:
        raise SourceFailed(f"source {source.name}: sources of kind {kind} are not supported yet")
    return opener(options, SourceContext(source, node, epoch_interval_us, work_dir, memory))


def open_sink(
    query: str,
    spec: SinkSpec,
    partition: int,
    topology_uid: str,
    schema: pa.Schema,
    definition: Definition | None = None,
) -> Sink:
    """The sink of `query` for rows of `schema`. Raises SinkRefused if the place is another's."""
    kind, options = spec.kind
    opener: OpenSink | None = connector(type(options))
    if opener is None:
        raise SinkRefused(f"query {query}: sinks of kind {kind} are not supported yet")
    return opener(options, SinkContext(query, partition, topology_uid, schema, definition))


def connector(options: type[SourceOptions | SinkOptions]) -> Callable[..., Any] | None:
    """The function that opens a kind; None if the kind is not built."""
    if options.connector is None:
        return None
    module, _, function = options.connector.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"rekindle.connectors.{module}"), function)
    return found
