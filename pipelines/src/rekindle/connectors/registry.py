"""Opens a source or a sink by the connector that its kind names (`rekindle.topology.kinds`).

A connector is a function (`OpenSource` or `OpenSink`) in a module of this package that is imported
on first use. No other module distinguishes the kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pyarrow as pa

from rekindle.connectors.dead_letters import DeadLetterFiles, DeadLetters, OpenDeadLetters
from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.live_source import LiveSource
from rekindle.connectors.sink import OpenSink, Sink, SinkContext
from rekindle.connectors.source import (
    OpenLiveSource,
    OpenSource,
    ReplayableSource,
    SourceContext,
)
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
    partition: int = 0,
    *,
    verifies_checksums: bool = True,
) -> ReplayableSource:
    """A partition of the source of `node`. Its prepared files (an index of its epochs, and its rows
    as Arrow unless they are read in place) are in `work_dir` and are reused after a restart. With
    `memory`, a generator refuses an epoch before it computes it, if it would be too large.
    `verifies_checksums`: each cut verifies a checksum of its rows (see `SourceContext`).

    Raises SourceFailed, which names the file, row and column where it can.
    """
    kind, options = source.kind
    opener: OpenSource | None = connector(type(options))
    if opener is None:
        raise SourceFailed(f"source {source.name}: sources of kind {kind} are not supported yet")
    context = SourceContext(
        source, node, epoch_interval_us, work_dir, memory, partition, verifies_checksums
    )
    return opener(options, context)


def open_live_source(
    source: SourceSpec,
    node: Node,
    epoch_interval_us: int,
    work_dir: Path,
    memory: MemoryPlan | None = None,
    partition: int = 0,
) -> LiveSource:
    """A partition of a live source. `memory` limits what is planned for one epoch. Raises
    SourceFailed."""
    kind, options = source.kind
    opener: OpenLiveSource | None = connector(type(options))
    if opener is None or not options.is_live:
        raise SourceFailed(f"source {source.name}: sources of kind {kind} are not live")
    return opener(
        options, SourceContext(source, node, epoch_interval_us, work_dir, memory, partition)
    )


def open_dead_letters(
    source: SourceSpec, node: Node, partition: int, topology_uid: str
) -> DeadLetters | None:
    """Where a partition of the source keeps records that are no rows; None: nowhere."""
    options = source.kind[1]
    if options.output_url is not None:
        return DeadLetterFiles(options.output_url, node.name, node.id, partition, topology_uid)
    if options.dead_letter_connector is None:
        return None
    opener: OpenDeadLetters = _imported(options.dead_letter_connector)
    return opener(options, node.name, node.id, partition, topology_uid)


class SinkSettings(TypedDict, total=False):
    """Fields of `SinkContext` that not every sink needs."""

    event_time: str | None
    epoch_interval_us: int
    store: str | None


def open_sink(
    query: str,
    spec: SinkSpec,
    partition: int,
    topology_uid: str,
    schema: pa.Schema,
    definition: Definition | None = None,
    **context: Unpack[SinkSettings],
) -> Sink:
    """The sink of `query` for rows of `schema`; `context`: of `SinkContext`. Raises SinkRefused if
    its URL belongs to another topology."""
    kind, options = spec.kind
    opener: OpenSink | None = connector(type(options))
    if opener is None:
        raise SinkRefused(f"query {query}: sinks of kind {kind} are not supported yet")
    return opener(
        options, SinkContext(query, partition, topology_uid, schema, definition, **context)
    )


def connector(options: type[SourceOptions | SinkOptions]) -> Callable[..., Any] | None:
    """The function that opens sources or sinks of a kind; None if the kind is not supported."""
    return None if options.connector is None else _imported(options.connector)


def _imported(connector: str) -> Callable[..., Any]:
    module, _, function = connector.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"rekindle.connectors.{module}"), function)
    return found
