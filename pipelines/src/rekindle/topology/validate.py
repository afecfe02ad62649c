"""Finds all problems of a topology, each with its field path: `validate`.

The API server checks types and single fields; this also checks the graph, the SQL and what this
version supports. Without a cluster it is the only check, so it repeats those of the API server.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

from rekindle.errors import Problem
from rekindle.topology.checks.fields import check_fields
from rekindle.topology.checks.references import check_references
from rekindle.topology.checks.streams import DerivedStreams, derive_streams
from rekindle.topology.checks.unsupported import check_unsupported
from rekindle.topology.spec import TopologySpec


def validate(spec: TopologySpec, name: str, *, skip_cluster_checks: bool = False) -> list[Problem]:
    """Every problem, in the order of the resource's fields; [] if the topology can run.

    `skip_cluster_checks`: for a run on one machine, where `file://` URLs need no shared volume,
    and for a spec that the operator has checked.
    """
    return validate_derived(
        spec, name, derive_streams(spec), skip_cluster_checks=skip_cluster_checks
    )


def validate_derived(
    spec: TopologySpec, name: str, derived: DerivedStreams, *, skip_cluster_checks: bool
) -> list[Problem]:
    """`validate` for a caller that has derived schema, event time and partitions of all nodes."""
    found = [
        *check_fields(spec, name, skip_cluster_checks=skip_cluster_checks),
        *check_references(spec),
        *check_unsupported(spec),
        *derived.problems,
    ]
    return sorted(dict.fromkeys(found), key=lambda p: _order(spec, p.path))


def _order(spec: TopologySpec, path: str) -> tuple[int, int]:
    """Sort key of a path: settings before sources, operators and queries, items by index."""
    for rank, field in enumerate(("sources", "operators", "queries"), start=1):
        if path.startswith(f"spec.{field}"):
            index = path.partition("[")[2].partition("]")[0]
            return rank, int(index) if index.isdigit() else -1
    return 0, 0
