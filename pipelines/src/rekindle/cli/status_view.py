"""Builds what `rekindle status` shows from a topology's objects in the cluster. Pure.

The objects may be of another release, or incomplete because the operator has not started: fields
that are missing or have another type are left out. The coordinator reports task phases
(`status.dataPlane`); the conditions show whether its report is old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rekindle import names
from rekindle.report import Report, TaskReport, read_report
from rekindle.timeline.api_objects import event_time, read_time
from rekindle.topology.model import Topology

Json = Mapping[str, Any]

_HEALTHY = {
    "Valid": "True",
    "Available": "True",
    "Redundant": "True",
    "Consistent": "True",
    "Checkpointed": "True",
    "Degraded": "False",
}
"""By condition type: the status of the condition in a healthy topology."""


@dataclass(frozen=True, slots=True)
class Restart:
    """What a task would do if it restarted now, without a partner that lends its state: load
    `state_bytes`, and replay `epochs` epochs, in `replay_s` at most."""

    state_bytes: int
    epochs: int
    replay_s: float


@dataclass(frozen=True, slots=True)
class TaskLine:
    """One replica of one partition; `name`: the numbers of both. `phase` is empty if the
    coordinator does not report it. `restart`: None if it is not known."""

    name: str
    phase: str
    epoch: int | None = None
    pod: str = ""
    node: str = ""
    remark: str = ""
    restart: Restart | None = None


@dataclass(frozen=True, slots=True)
class SegmentLine:
    name: str
    tasks: tuple[TaskLine, ...]

    @property
    def live(self) -> int:
        return sum(task.phase == "Live" for task in self.tasks)


@dataclass(frozen=True, slots=True)
class QueryLine:
    """`segments`: all that it needs, sources first; empty if the spec cannot be compiled.
    `missing`: results that no definition of it writes, in words."""

    name: str
    priority: int | None
    state: str
    epoch: int | None
    lag: str
    waiting_for: str
    missing: tuple[str, ...] = ()
    segments: tuple[SegmentLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    epoch: int
    at: datetime | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class RecoveryLine:
    """`plan`: names of queries, in order; `plan_message`: why it is so, from the last Event about
    it, at `planned_at`."""

    mode: str
    since: datetime | None
    lost_nodes: tuple[str, ...]
    plan: tuple[str, ...]
    plan_message: str
    planned_at: datetime | None


@dataclass(frozen=True, slots=True)
class ConditionLine:
    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusView:
    """`conditions`: the unhealthy ones; `unqueried_segments`: segments, with their tasks, that
    belong to no query of the spec (of another generation, or if the spec does not compile).
    `restart`: the most that any task would load, and replay."""

    name: str
    namespace: str
    phase: str
    generation: int | None
    observed_generation: int | None
    queries_live: str
    redundancy: str
    lag: str
    checkpoint: Checkpoint | None
    restart: Restart | None
    recovery: RecoveryLine | None
    conditions: tuple[ConditionLine, ...]
    problems: tuple[str, ...]
    queries: tuple[QueryLine, ...]
    unqueried_segments: tuple[SegmentLine, ...]


def read_status(
    resource: Json,
    topology: Topology | None,
    pods: Iterable[Json] = (),
    events: Iterable[Json] = (),
) -> StatusView:
    """`resource`: the StreamTopology; `topology`: its compiled spec, None if it does not compile;
    `pods`: its task pods; `events`: the Events about it."""
    meta, status = _mapping(resource.get("metadata")), _mapping(resource.get("status"))
    report = read_report(status.get("dataPlane"))
    segments = _segments(status, report, topology, list(pods))
    queries = _queries(resource, status, topology, segments)
    shown = {s.name for q in queries for s in q.segments}
    return StatusView(
        name=_text(meta.get("name")),
        namespace=_text(meta.get("namespace")),
        phase=_text(status.get("phase")) or "no status yet",
        generation=_integer(meta.get("generation")),
        observed_generation=_integer(status.get("observedGeneration")),
        queries_live=_text(status.get("queriesLive")),
        redundancy=_text(status.get("redundancy")),
        lag=_text(status.get("lag")),
        checkpoint=_checkpoint(_mapping(status.get("checkpoint"))),
        restart=_largest(task.restart for s in segments.values() for task in s.tasks),
        recovery=_recovery(_mapping(status.get("recovery")), events),
        conditions=tuple(_conditions(status)),
        problems=report.problems,
        queries=queries,
        unqueried_segments=tuple(s for s in segments.values() if s.name not in shown),
    )


def _segments(
    status: Json, report: Report, topology: Topology | None, pods: Sequence[Json]
) -> dict[str, SegmentLine]:
    """By id, in the topology's order: every slot of the spec, and any other in the cluster."""
    incarnations = {
        _text(s.get("slot")): _integer(s.get("incarnation")) for s in _mappings(status, "slots")
    }
    newest = _newest_pods(pods)
    if topology is not None:
        present = {*report.tasks, *newest}
        known = [
            slot.key
            for slot in topology.slots()
            # A replica that has moved runs under its other number.
            if slot.key in present or slot.alternate.key not in present
        ]
        segment_names = {s.id: s.name for s in topology.segments}
    else:
        # Only slots of tasks: the coordinator has an incarnation too.
        known, segment_names = [key for key in incarnations if key.count("/") == 2], {}
    for pod in pods:
        if name := _label(pod, "segment-name"):
            segment_names.setdefault(_label(pod, "segment"), name)
    tasks: dict[str, list[TaskLine]] = {}
    for key in dict.fromkeys((*known, *report.tasks, *newest)):
        segment, _, rest = key.partition("/")
        line = _task(rest, report.tasks.get(key), incarnations.get(key), newest.get(key, {}))
        tasks.setdefault(segment, []).append(line)
    return {
        segment: SegmentLine(segment_names.get(segment, segment), tuple(lines))
        for segment, lines in tasks.items()
    }


def _newest_pods(pods: Sequence[Json]) -> dict[str, Json]:
    """By slot: the pod of the newest incarnation."""
    newest: dict[str, Json] = {}
    for pod in sorted(pods, key=lambda pod: _integer(_label(pod, "incarnation")) or 0):
        parts = [_label(pod, part) for part in ("segment", "partition", "replica")]
        if all(parts):
            newest["/".join(parts)] = pod
    return newest


def _label(pod: Json, name: str) -> str:
    labels = _mapping(_mapping(pod.get("metadata")).get("labels"))
    return _text(labels.get(f"{names.OWN_PREFIX}{name}"))


def _task(name: str, report: TaskReport | None, reserved: int | None, pod: Json) -> TaskLine:
    """The task of the newest incarnation; reports of older ones are ignored."""
    incarnation = _integer(_label(pod, "incarnation"))
    if incarnation is None:
        incarnation = reserved
    if report is None or incarnation not in (None, report.incarnation):
        report = TaskReport(name, 0, None, suspected=False)
    meta, spec = _mapping(pod.get("metadata")), _mapping(pod.get("spec"))
    node = _text(spec.get("nodeName"))
    phase: str = report.phase or ""
    if not phase or phase == "Waiting":
        phase = "Starting" if node else "Waiting" if pod else phase
    remarks = []
    if report.suspected:
        silent_s = report.silent_s
        remarks.append(f"no response for {silent_s} s" if silent_s else "no response")
    if phase == "Waiting" and pod:
        remarks.append("its pod is not scheduled yet")
    restored = _epoch(report.restored_from)
    if phase in ("Restoring", "CatchingUp") and restored is not None:
        remarks.append(f"restored from epoch {restored}")
    if report.tentative_epoch is not None:
        remarks.append(f"tentative through epoch {report.tentative_epoch}")
    if report.source_behind:
        remarks.append(f"{report.source_behind:,} offsets behind the end of its topic")
    if report.bad_records:
        remarks.append(f"{report.bad_records:,} bad records, such as {report.bad_record}")
    if report.hot_key:
        remarks.append(report.hot_key)
    if report.problem:
        remarks.append(report.problem)
    return TaskLine(
        name=name,
        phase=phase,
        epoch=_epoch(report.stable_epoch),
        pod=report.pod or _text(meta.get("name")),
        node=node,
        remark="; ".join(remarks),
        restart=_restart(report),
    )


def _restart(report: TaskReport) -> Restart | None:
    stable, after = report.stable_epoch, report.replay_from
    if stable is None or after is None:
        return None
    return Restart(report.state_bytes or 0, max(0, stable - after), report.replay_s or 0.0)


def _largest(restarts: Iterable[Restart | None]) -> Restart | None:
    known = [restart for restart in restarts if restart is not None]
    if not known:
        return None
    return Restart(
        max(restart.state_bytes for restart in known),
        max(restart.epochs for restart in known),
        max(restart.replay_s for restart in known),
    )


def _queries(
    resource: Json,
    status: Json,
    topology: Topology | None,
    segments: Mapping[str, SegmentLine],
) -> tuple[QueryLine, ...]:
    """By descending priority. Before there is a status, those of the spec."""
    reported = _mappings(status, "queries") or _mappings(_mapping(resource.get("spec")), "queries")
    specs = {q.name: q for q in topology.spec.queries} if topology is not None else {}
    lines = []
    for query in reported:
        name = _text(query.get("name"))
        needs: tuple[SegmentLine, ...] = ()
        if topology is not None and name in specs:
            needs = tuple(segments[s.id] for s in topology.needed_segments(specs[name]))
        lines.append(
            QueryLine(
                name=name,
                priority=_integer(query.get("priority")),
                state=_text(query.get("state")),
                epoch=_epoch(query.get("stableEpoch")),
                lag=_text(query.get("lag")),
                waiting_for=_text(query.get("waitingFor")),
                missing=tuple(map(_missing, _mappings(query, "missing"))),
                segments=needs,
            )
        )
    return tuple(sorted(lines, key=lambda q: (-(q.priority or 0), q.name)))


def _missing(raw: Json) -> str:
    """Since an edit began the query anew."""
    begin, end = _text(raw.get("from")), _text(raw.get("to"))
    epochs = f"epochs {_text(raw.get('fromEpoch'))} to {_text(raw.get('toEpoch'))}"
    between = f"from {begin} to {end}" if begin else f"before {end}"
    what = f"{between} ({epochs})" if end else f"of {epochs}"
    return f"lacks results {what}, since generation {_text(raw.get('sinceGeneration'))} began anew"


def _checkpoint(raw: Json) -> Checkpoint | None:
    epoch = _epoch(raw.get("epoch"))
    if epoch is None:
        return None
    return Checkpoint(epoch, read_time(raw.get("time")), _integer(raw.get("bytes")))


def _recovery(raw: Json, events: Iterable[Json]) -> RecoveryLine | None:
    """None if no recovery is in progress."""
    if not raw.get("startedAt"):
        return None
    since = read_time(raw["startedAt"])
    planned_at, message = _last_plan(events, since)
    return RecoveryLine(
        mode=_text(raw.get("mode")),
        since=since,
        lost_nodes=tuple(_text(n) for n in _entries(raw, "lostNodes")),
        plan=tuple(_text(q) for q in _entries(raw, "plan")),
        plan_message=message,
        planned_at=planned_at,
    )


def _last_plan(events: Iterable[Json], since: datetime | None) -> tuple[datetime | None, str]:
    plans = [
        (at, _text(event.get("message")))
        for event in events
        if event.get("reason") == "RecoveryPlanned"
        and (at := event_time(event)) is not None
        # The Events of a recovery are written after the reconcile pass in which it started.
        and (since is None or at >= since.replace(microsecond=0))
    ]
    return max(plans) if plans else (None, "")


def _conditions(status: Json) -> Iterable[ConditionLine]:
    for condition in _mappings(status, "conditions"):
        condition_type, value = _text(condition.get("type")), _text(condition.get("status"))
        if value == _HEALTHY.get(condition_type, value):
            continue
        yield ConditionLine(
            condition_type, value, _text(condition.get("reason")), _text(condition.get("message"))
        )


def _mapping(value: Any) -> Json:
    return value if isinstance(value, Mapping) else {}


def _entries(raw: Json, field: str) -> Sequence[Any]:
    value = raw.get(field)
    return value if isinstance(value, list | tuple) else ()


def _mappings(raw: Json, field: str) -> list[Json]:
    return [entry for entry in _entries(raw, field) if isinstance(entry, Mapping)]


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _integer(value: Any) -> int | None:
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _epoch(value: Any) -> int | None:
    """-1 means none yet."""
    epoch = _integer(value)
    return None if epoch is None or epoch < 0 else epoch
