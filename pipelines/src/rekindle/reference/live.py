"""Live sources in a reference execution: the epochs that tasks have recorded, and no others.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path

from rekindle.checkpoints.cuts import CutObjects
from rekindle.checkpoints.store import Store
from rekindle.connectors.cut_records import CutRecord, decode_cut_record
from rekindle.connectors.recorded_source import RecordedSource
from rekindle.connectors.registry import open_live_source
from rekindle.connectors.source import ReplayableSource
from rekindle.errors import RekindleError
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec


def open_recorded(
    node: Node,
    spec: SourceSpec,
    epoch_interval_us: int,
    work: Path,
    cuts: str | None,
    stack: contextlib.ExitStack,
) -> dict[tuple[str, int], ReplayableSource]:
    """All partitions of a live source; `cuts`: `<store>/<uid>`. They are closed with the stack.
    Raises RekindleError."""
    if cuts is None:
        raise RekindleError(
            f"source {node.name} has no end, and its epochs are what tasks have recorded: give "
            "--cuts STORE/UID, the checkpoint store of the topology and its UID"
        )
    url, _, uid = cuts.rstrip("/").rpartition("/")
    store = Store(url, create=False)
    sources: dict[tuple[str, int], ReplayableSource] = {}
    for partition in range(node.partitions):
        records = _records(CutObjects(store, uid, node.id, partition), node.name, cuts)
        source = open_live_source(spec, node, epoch_interval_us, work, partition=partition)
        stack.callback(source.close)
        if any(record.identity != source.identity for record in records):
            raise RekindleError(
                f"source {node.name}: the epochs in {cuts} are of another topic of this name"
            )
        sources[node.name, partition] = RecordedSource(source, records)
    return sources


def _records(objects: CutObjects, source: str, cuts: str) -> list[CutRecord]:
    firsts = objects.list()
    if not firsts or firsts[0] != 0:
        raise RekindleError(
            f"source {source}: {cuts} has no record of epoch 0: it is not the store of this "
            "topology, or the record was deleted after a checkpoint"
        )
    found = [data for first in firsts if (data := objects.read(first)) is not None]
    records = [decode_cut_record(data) for data in found]
    for before, after in pairwise(records):
        if after.first != before.last + 1:
            raise RekindleError(
                f"source {source}: {cuts} has no record of epoch {before.last + 1}: it was deleted "
                "after a checkpoint"
            )
    return records
