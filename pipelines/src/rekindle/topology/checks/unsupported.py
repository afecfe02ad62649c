"""What v1alpha1 names and this version does not do: refused with a reason, never ignored.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.errors import Problem
from rekindle.topology.graph import nodes_with_paths
from rekindle.topology.problems import NOT_SUPPORTED_YET
from rekindle.topology.spec import OperatorSpec, QuerySpec, SourceSpec, TopologySpec
from rekindle.topology.windows.registry import unsupported_fields


def check_unsupported(spec: TopologySpec) -> list[Problem]:
    """Every use of what is not built yet."""
    found = list(_settings(spec))
    for path, node in nodes_with_paths(spec):
        found += _source(node, path) if isinstance(node, SourceSpec) else _operator(node, path)
    for at, query in enumerate(spec.queries):
        found += _query(query, f"spec.queries[{at}]")
    return found


def _not_yet(path: str, what: str, hint: str) -> Problem:
    return Problem(path, NOT_SUPPORTED_YET, f"{what} is not supported yet", hint)


def _settings(spec: TopologySpec) -> Iterator[Problem]:
    if spec.max_delay is not None:
        hint = "leave it out or write Infinite: results are late in a failure, never tentative"
        yield _not_yet("spec.maxDelay", "a finite maxDelay", hint)
    for field, value in type(spec.availability).model_fields.items():
        if getattr(spec.availability, field) != value.default:
            alias = value.alias or field
            hint = f"leave it out: there are no tentative results yet (default {value.default})"
            yield _not_yet(f"spec.availability.{alias}", f"a {alias} other than the default", hint)
    if spec.buffering != "Always":
        yield _not_yet("spec.buffering", f"buffering {spec.buffering}", "use Always")
    if spec.executors:
        hint = "use 0: a task runs in one pod; raise its resources, or partitions of operators"
        yield _not_yet("spec.executors", "a number of executors", hint)
    if spec.recovery.autoscale:
        hint = "use false: waiting queries start when capacity comes"
        yield _not_yet("spec.recovery.autoscale", "autoscale", hint)
    if spec.deletion_policy != "Retain":
        hint = "use Retain, and delete the checkpoints and outputs yourself"
        yield _not_yet("spec.deletionPolicy", "deletionPolicy Delete", hint)


def _source(node: SourceSpec, path: str) -> Iterator[Problem]:
    if node.kafka is not None:
        yield _not_yet(f"{path}.kafka", "a kafka source", "use files or generator")
    if node.event_time is not None and node.event_time.idle_after is not None:
        hint = "leave it out: files and generators are never idle, their epochs close by themselves"
        yield _not_yet(f"{path}.eventTime.idleAfter", "idleAfter", hint)


def _operator(node: OperatorSpec, path: str) -> Iterator[Problem]:
    for kind in ("join", "distinct", "python"):
        if getattr(node, kind) is not None:
            yield _not_yet(f"{path}.{kind}", f"the operator {kind}", "this version has sql, window")
    if node.window is not None:
        yield from unsupported_fields(node.window, f"{path}.window")
    if node.checkpoint.mode != "Global":
        yield _not_yet(f"{path}.checkpoint.mode", "checkpoint mode PerWindow", "use Global")
    for field, alias in (("load_target", "loadTarget"), ("replay_target", "replayTarget")):
        if getattr(node.checkpoint, field) is not None:
            yield _not_yet(f"{path}.checkpoint.{alias}", alias, "it belongs to mode PerWindow")


def _query(query: QuerySpec, path: str) -> Iterator[Problem]:
    for kind in ("kafka", "stream"):
        if getattr(query.sink, kind) is not None:
            yield _not_yet(f"{path}.sink.{kind}", f"a {kind} sink", "use files")
