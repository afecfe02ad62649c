"""Checks of single fields and of related fields: times, sizes, names, counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel

from rekindle.errors import Problem
from rekindle.names import OWN_PREFIX, OWN_VARIABLES, PART_OF, PART_OF_LABEL, TASK_CONTAINER
from rekindle.topology.checks.object_names import check_object_names
from rekindle.topology.checks.resources import check_resources
from rekindle.topology.checks.unsupported import UNSUPPORTED
from rekindle.topology.checks.urls import check_urls
from rekindle.topology.graph import nodes_with_paths
from rekindle.topology.kinds.base import spec_in
from rekindle.topology.kinds.stream import DEFAULT_RETAIN_BYTES
from rekindle.topology.model import MAX_REPLICAS
from rekindle.topology.operators.registry import KINDS
from rekindle.topology.problems import nearest
from rekindle.topology.spec import (
    OperatorSpec,
    SinkSpec,
    SourceSpec,
    TopologySpec,
)
from rekindle.topology.units import MILLISECOND, SECOND, format_duration, format_size

NAME_IN_SPEC = re.compile(r"[a-z]([a-z0-9_-]{0,38}[a-z0-9])?")
TOPOLOGY_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
MAX_ITEMS = 64
MAX_INPUTS = 16
MAX_KEYS = 16
MAX_PARTITIONS = 64
MIN_LOG_BUDGET_BYTES = 16 * 1024**2
MIN_RETAIN_BYTES = 1024**2
EPOCH_INTERVALS = (100 * MILLISECOND, 60 * SECOND)
MIN_MAX_DELAY = 100 * MILLISECOND
MIN_REPLAY_TARGET = SECOND
_RESERVED_CONF = {
    "spark.master": "a task is one application with local[n]",
    "spark.sql.ansi.enabled": "results must not depend on it",
    "spark.sql.caseSensitive": "results must not depend on it",
    "spark.sql.adaptive.enabled": "rows must be aggregated in order",
    "spark.sql.execution.replaceHashWithSortAggregate": "rows must be aggregated in order",
    "spark.sql.execution.useHashAggregateExec": "rows must be aggregated in order",
    "spark.sql.legacy.timeParserPolicy": "the legacy parser fills in a missing date from the clock",
    "spark.sql.session.timeZone": "the time zone is always UTC",
}
_MERGED_FIELDS: dict[tuple[str, ...], tuple[str, ...]] = {
    (): ("metadata", "spec"),
    ("metadata",): ("labels", "annotations"),
}
"""Fields of `podTemplate` that are merged into the pods of tasks, by the path of their object."""
_MERGED_PATHS = tuple((*path, field) for path, fields in _MERGED_FIELDS.items() for field in fields)


def check_fields(spec: TopologySpec, name: str, *, skip_cluster_checks: bool) -> list[Problem]:
    found: list[Problem] = []
    found += _names(spec, name)
    found += _counts(spec)
    found += _durations(spec)
    found += _log_budget(spec)
    found += _retained(spec)
    found += check_urls(spec, skip_cluster_checks=skip_cluster_checks)
    found += () if skip_cluster_checks else check_object_names(spec)
    found += _spark_conf(spec)
    found += _pod_template(spec.pod_template)
    found += check_resources(spec.resources, "spec.resources")
    if spec.coordinator is not None:
        found += check_resources(spec.coordinator.resources, "spec.coordinator.resources")
    for path, node in nodes_with_paths(spec):
        found += check_resources(node.resources or {}, f"{path}.resources")
        found += _limit(node.replicas, MAX_REPLICAS, f"{path}.replicas", "replicas")
        found += _source(node, path) if isinstance(node, SourceSpec) else _operator(node, path)
    for at, query in enumerate(spec.queries):
        found += _sink(query.sink, spec, f"spec.queries[{at}].sink")
    return found


def _sink(sink: SinkSpec, spec: TopologySpec, path: str) -> Iterator[Problem]:
    yield from _exactly_one(sink, list(sink.kinds), path)
    for kind, options in sink.kinds.items():
        if options is not None and spec.epoch_interval > 0:
            intervals = spec.epoch_interval, spec.checkpoint.interval
            yield from options.check(*intervals, f"{path}.{kind}")


def _names(spec: TopologySpec, name: str) -> Iterator[Problem]:
    if not TOPOLOGY_NAME.fullmatch(name):
        what = f"{name!r} is not a valid topology name"
        yield Problem("metadata.name", "InvalidName", what, "use at most 40 of a-z, 0-9 and -")
    nodes = [(f"{path}.name", node.name) for path, node in nodes_with_paths(spec)]
    queries = [(f"spec.queries[{at}].name", q.name) for at, q in enumerate(spec.queries)]
    for group in (nodes, queries):
        for path, own in group:
            if not NAME_IN_SPEC.fullmatch(own):
                hint = "begin with a-z; at most 40 of a-z, 0-9, - and _; end in a-z or 0-9"
                yield Problem(path, "InvalidName", f"{own!r} is not a valid name", hint)
        yield from _duplicates(group)


def _duplicates(group: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Names that are equal after `_` is replaced by `-`, as in object names."""
    first: dict[str, tuple[str, str]] = {}
    for path, name in group:
        key = name.replace("_", "-")
        if key not in first:
            first[key] = (path, name)
            continue
        where, other = first[key]
        same = (
            "is already used" if other == name else f"equals {other} in object names (_ becomes -)"
        )
        yield Problem(path, "DuplicateName", f"the name {name} {same}", f"see {where}")


def _counts(spec: TopologySpec) -> Iterator[Problem]:
    for field in ("sources", "operators", "queries"):
        yield from _limit(len(getattr(spec, field)), MAX_ITEMS, f"spec.{field}", field)
    for field in ("sources", "queries"):
        if not getattr(spec, field):
            yield Problem(f"spec.{field}", "Empty", f"there are no {field}", "write at least one")
    yield from _limit(spec.replicas, MAX_REPLICAS, "spec.replicas", "replicas")


def _limit(value: int | None, most: int, path: str, what: str) -> Iterator[Problem]:
    if value is not None and value > most:
        yield Problem(path, "TooMany", f"{value} {what} are too many", f"write at most {most}")


def _durations(spec: TopologySpec) -> Iterator[Problem]:
    least, most = EPOCH_INTERVALS
    if not least <= spec.epoch_interval <= most:
        what = f"{format_duration(spec.epoch_interval)} is not between 100ms and 60s"
        yield Problem("spec.epochInterval", "OutOfRange", what, "write a duration like 1s")
        return
    if spec.max_delay is not None and spec.max_delay < MIN_MAX_DELAY:
        what = f"{format_duration(spec.max_delay)} is less than {format_duration(MIN_MAX_DELAY)}"
        hint = "write how late a result may be, like 3s, or Infinite"
        yield Problem("spec.maxDelay", "OutOfRange", what, hint)
    interval = spec.checkpoint.interval
    if interval < spec.epoch_interval or interval % spec.epoch_interval:
        what = (
            f"{format_duration(interval)} is not a multiple of epochInterval "
            f"({format_duration(spec.epoch_interval)})"
        )
        hint = "checkpoints are taken at the ends of epochs: write a multiple"
        yield Problem("spec.checkpoint.interval", "NotAMultiple", what, hint)
    yield from _replay_target(spec.checkpoint.replay_target, "spec.checkpoint")
    for at, operator in enumerate(spec.operators):
        path = f"spec.operators[{at}].checkpoint"
        yield from _replay_target(operator.checkpoint.replay_target, path)


def _replay_target(target: int | None, path: str) -> Iterator[Problem]:
    if target is not None and target < MIN_REPLAY_TARGET:
        what = f"{format_duration(target)} is less than {format_duration(MIN_REPLAY_TARGET)}"
        hint = "write how long a replay may take, like 60s, or leave it out"
        yield Problem(f"{path}.replayTarget", "OutOfRange", what, hint)


def _log_budget(spec: TopologySpec) -> Iterator[Problem]:
    """A log consists of files of 1/8 of its budget; each has to hold several epochs."""
    if spec.log_budget < MIN_LOG_BUDGET_BYTES:
        what = f"{spec.log_budget} bytes are less than {MIN_LOG_BUDGET_BYTES // 1024**2}Mi"
        yield Problem("spec.logBudget", "OutOfRange", what, "write 16Mi or more, like 1Gi")


def _retained(spec: TopologySpec) -> Iterator[Problem]:
    """What is kept for readers is in the output log, so its budget limits it."""
    most = spec.log_budget // 2
    for at, query in enumerate(spec.queries):
        stream = query.sink.stream
        if stream is None or stream.retain == DEFAULT_RETAIN_BYTES:
            continue  # the default is reduced to half of a small budget
        path = f"spec.queries[{at}].sink.stream.retain"
        if stream.retain < MIN_RETAIN_BYTES:
            what = f"{stream.retain} bytes are less than {MIN_RETAIN_BYTES // 1024**2}Mi"
            yield Problem(path, "OutOfRange", what, "write 1Mi or more, like 256Mi")
        elif stream.retain > most:
            what = (
                f"{format_size(stream.retain)} are more than half of logBudget "
                f"({format_size(spec.log_budget)})"
            )
            needed = format_size(2 * stream.retain)
            hint = f"write at most {format_size(most)}, or raise spec.logBudget to {needed}"
            yield Problem(path, "OutOfRange", what, hint)


def _spark_conf(spec: TopologySpec) -> Iterator[Problem]:
    for key, why in _RESERVED_CONF.items():
        if key in spec.spark_conf:
            what = f"{key} cannot be set: {why}"
            yield Problem(f"spec.sparkConf[{key}]", "ReservedSetting", what, "leave it out")


def _pod_template(template: Mapping[str, object]) -> Iterator[Problem]:
    """Fields that are merged must be mappings; other fields are refused, since they would be
    ignored. The API server checks the fields of the pod's spec."""
    for path in _MERGED_PATHS:
        *parents, last = path
        parent = _at(template, parents)
        if not isinstance(parent, Mapping) or isinstance(parent.get(last, {}), Mapping):
            continue
        what = f"{parent[last]!r} is not a mapping"
        hint = f"write the fields of {last} below it, or leave it out"
        yield Problem(".".join(("spec.podTemplate", *path)), "InvalidValue", what, hint)
    for path, known in _MERGED_FIELDS.items():
        parent = _at(template, path)
        for field, value in parent.items() if isinstance(parent, Mapping) else ():
            if field not in known and value is not None:
                where = ".".join(("spec.podTemplate", *path, str(field)))
                hint = nearest(str(field), known)
                yield Problem(where, "UnknownField", f"unknown field {field}", hint)
    yield from _reserved_names(template)
    yield from _replaced_values(template)
    yield from _other_containers(template)


def _other_containers(template: Mapping[str, object]) -> Iterator[Problem]:
    """Containers are merged by name. One of another name is a further container, which needs an
    image; without one, it was meant for the container of the task."""
    containers = _at(template, ("spec", "containers"))
    for at, container in enumerate(containers if isinstance(containers, list) else ()):
        if not isinstance(container, Mapping) or container.get("image") is not None:
            continue
        name = container.get("name")
        if isinstance(name, str) and name != TASK_CONTAINER:
            what = f"a further container, {name}, has no image"
            hint = f"give it one, or name it {TASK_CONTAINER}, as the container of tasks is called"
            yield Problem(f"spec.podTemplate.spec.containers[{at}]", "Missing", what, hint)


def _reserved_names(template: Mapping[str, object]) -> Iterator[Problem]:
    """Labels and annotations that the operator sets on pods and bases its decisions on."""
    for kind in _MERGED_FIELDS["metadata",]:
        entries = _at(template, ("metadata", kind))
        for key in entries if isinstance(entries, Mapping) else ():
            if str(key).startswith(OWN_PREFIX):
                where = f"spec.podTemplate.metadata.{kind}[{key}]"
                why = f"names that begin with {OWN_PREFIX} are reserved for the operator"
                yield Problem(
                    where, "ReservedSetting", f"{key} cannot be set: {why}", "leave it out"
                )


def _replaced_values(template: Mapping[str, object]) -> Iterator[Problem]:
    """A label and variables that all pods get from the operator, whatever the template says."""
    labels = _at(template, ("metadata", "labels"))
    if isinstance(labels, Mapping) and labels.get(PART_OF_LABEL, PART_OF) != PART_OF:
        where = f"spec.podTemplate.metadata.labels[{PART_OF_LABEL}]"
        what = f"the operator replaces it: all its pods have the value {PART_OF}"
        yield Problem(where, "Replaced", what, "leave it out")
    containers = _at(template, ("spec", "containers"))
    for at, container in enumerate(containers if isinstance(containers, list) else ()):
        if not isinstance(container, Mapping) or container.get("name") != TASK_CONTAINER:
            continue
        variables = container.get("env")
        for i, variable in enumerate(variables if isinstance(variables, list) else ()):
            name = variable.get("name") if isinstance(variable, Mapping) else None
            if isinstance(name, str) and name.startswith(OWN_VARIABLES):
                where = f"spec.podTemplate.spec.containers[{at}].env[{i}]"
                what = f"the operator sets {name}, as all variables that begin with {OWN_VARIABLES}"
                yield Problem(where, "Replaced", what, "leave it out")


def _at(template: Mapping[str, object], path: Iterable[str]) -> object:
    parent: object = template
    for part in path:
        parent = parent.get(part, {}) if isinstance(parent, Mapping) else {}
    return parent


def _exactly_one(node: BaseModel, kinds: Sequence[str], path: str) -> Iterator[Problem]:
    given = [k for k in kinds if getattr(node, k) is not None]
    empty = [k for k in kinds if k in node.model_fields_set and getattr(node, k) is None]
    if not given and len(empty) == 1:
        spec = spec_in(type(node).model_fields[empty[0]].annotation)
        hint = spec.how_to_write() if spec else "write one"
        yield Problem(f"{path}.{empty[0]}", "Missing", "has no value", hint)
    elif len(given) != 1:
        supported = [k for k in kinds if k not in UNSUPPORTED.get(type(node), {})]
        what = f"has {' and '.join(given)}" if given else f"has no {' and no '.join(supported)}"
        hint = (
            f"write exactly one of {', '.join(supported)}"
            if len(supported) > 1
            else f"write {supported[0]}"
        )
        yield Problem(path, "ExactlyOneOf", what, hint)


def _source(node: SourceSpec, path: str) -> Iterator[Problem]:
    yield from _exactly_one(node, list(node.kinds), path)
    event_time = node.event_time.column if node.event_time else None
    yield from _limit(node.partitions, MAX_PARTITIONS, f"{path}.partitions", "partitions")
    for kind, given in node.kinds.items():
        if given is not None:
            yield from given.check(event_time, f"{path}.{kind}")
            if node.partitions > 1 and not given.can_be_partitioned:
                what = f"a source of the kind {kind} has 1 partition, not {node.partitions}"
                hint = "leave it out, and distribute rows by keyBy of an operator"
                yield Problem(f"{path}.partitions", "InvalidValue", what, hint)
            if node.event_time and node.event_time.idle_after is not None and not given.is_live:
                what = f"a source of the kind {kind} is never idle: its epochs close by themselves"
                yield Problem(f"{path}.eventTime.idleAfter", "InvalidValue", what, "leave it out")


def _operator(node: OperatorSpec, path: str) -> Iterator[Problem]:
    yield from _exactly_one(node, OperatorSpec.KINDS, path)
    yield from _limit(len(node.inputs), MAX_INPUTS, f"{path}.inputs", "inputs")
    yield from _limit(len(node.key_by), MAX_KEYS, f"{path}.keyBy", "columns")
    yield from _limit(node.partitions, MAX_PARTITIONS, f"{path}.partitions", "partitions")
    if not node.inputs:
        yield Problem(f"{path}.inputs", "Empty", "there are no inputs", "name at least one")
    for field, values in (("inputs", node.inputs), ("keyBy", node.key_by)):
        for value in (v for v, n in Counter(values).items() if n > 1):
            what = f"{value} is listed twice"
            yield Problem(f"{path}.{field}", "DuplicateName", what, "list it once")
    for field, kind in KINDS.items():
        if getattr(node, field) is not None:
            yield from kind(node).check(path)
