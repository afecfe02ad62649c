"""The oracle of every failure test: what a run without failures would have written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import flights
from harness.cluster import MOUNT
from rekindle.connectors.compare import Difference, compare_sinks
from rekindle.connectors.kinds import open_source
from rekindle.topology.model import Topology
from rekindle.topology.spec import SourceSpec


def compare(
    document: dict[str, Any],
    shared: Path,
    reference: Path,
    until_epoch: int | None = None,
    since: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Difference]:
    """Every query's sink on the cluster against the reference execution's, row by row; `since`
    names the first epochs of queries that were added later."""
    differences = {}
    for query in document["spec"]["queries"]:
        files = query["sink"]["files"]
        actual = files["url"].replace(f"file://{MOUNT}", f"file://{shared}")
        expected = f"file://{reference / query['name']}"
        differences[query["name"]] = compare_sinks(
            expected,
            actual,
            files.get("format", "parquet"),
            since_epoch=since.get(query["name"], 0),
            until_epoch=until_epoch,
        )
    return differences


def check(
    document: dict[str, Any],
    shared: Path,
    scratch: Path,
    until_epoch: int,
    since: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Run the reference through `until_epoch` and compare; returns the rows that were compared.

    Raises AssertionError with every difference. Queries that wrote nothing at all are one.
    """
    reference = scratch / "reference"
    flights.run_reference(document, shared, reference, until_epoch)
    differences = compare(document, shared, reference, until_epoch, since)
    wrong = [f"{name}: {difference}" for name, difference in differences.items() if difference]
    wrong += [f"{n}: no rows to compare" for n, d in differences.items() if not d.expected_rows]
    assert not wrong, "\n".join(wrong)
    return sum(d.expected_rows for d in differences.values())


def last_epoch(topology: Topology, shared: Path, scratch: Path) -> int:
    """The epoch in which the longest source says END_OF_INPUT: all windows close in it."""
    lasts = []
    for segment in topology.segments:
        node = topology.nodes[segment.nodes[0]]
        if isinstance(node.spec, SourceSpec):
            spec = node.spec.model_copy(update={"files": _local(node.spec, shared)})
            directory = scratch / node.name
            directory.mkdir(parents=True, exist_ok=True)
            source = open_source(spec, node, topology.spec.epoch_interval, directory)
            lasts.append(source.last_epoch)
            source.close()
    return 1 + max(last for last in lasts if last is not None)


def _local(source: SourceSpec, shared: Path) -> Any:
    assert source.files is not None
    url = source.files.url.replace(f"file://{MOUNT}", f"file://{shared}")
    return source.files.model_copy(update={"url": url})
