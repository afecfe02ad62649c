"""Builds a topology's history from its objects in the cluster: status, Events and nodes. Pure.

Events have times of the operator's clock and are kept for an hour; older recoveries come from
`status.recovery.history`, which has the last ten, and the newest loss of a query from its `since`.
A query's name is the first word of its Events. Events do not distinguish Restoring from CatchingUp:
both are drawn as Restoring, or as Starting before the query is live for the first time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rekindle.timeline.history import ClusterEvent, History, StateChange

Json = Mapping[str, Any]

_STATE_BY_REASON = {
    "QueryLost": "Waiting",
    "QueryRestoring": "Restoring",
    "QueryTentative": "Tentative",
    "QueryLive": "Live",
}
_NOTE_BY_REASON = {
    "CoordinatorReplaced": "coordinator replaced",
    "Suspended": "suspended",
    "Resumed": "resumed",
    "Diverged": "replicas diverged",
}
_SAME_TIME = timedelta(seconds=2)
"""Times that differ by at most this count as equal: nodes that are lost, or join, then share a mark
in the drawing."""
_PADDING = timedelta(seconds=5)
"""Time drawn before the first known change."""
_SECONDS = re.compile(r"([\d.]+)s")


@dataclass(frozen=True, slots=True)
class _Moment:
    """What happened at a time: a query entered a state, nodes were lost or joined, or a note."""

    at: datetime
    query: str = ""
    state: str = ""
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """`began`: the time from which the history's seconds count."""

    history: History
    began: datetime
    since_creation: bool

    @property
    def time_axis(self) -> str:
        if self.since_creation:
            return "seconds since the topology was created"
        return f"seconds since {self.began:%Y-%m-%d %H:%M:%S} UTC"


def read_timeline(
    topology: Json,
    events: Iterable[Json],
    nodes: Iterable[Json],
    now: datetime,
    since: datetime | None = None,
) -> Timeline:
    """`topology`: the StreamTopology; `events`: about it (core/v1); `nodes`: all nodes;
    `since`: where the drawing begins (default: at the oldest known change)."""
    status = topology.get("status") or {}
    names = [str(q["name"]) for q in status.get("queries") or () if q.get("name")]
    moments = list(_from_events(events, names))
    oldest = min((m.at for m in moments), default=now)
    moments += _from_recovery_history(status, names, oldest)
    created = read_time(topology["metadata"].get("creationTimestamp")) or oldest
    first = min((m.at for m in moments), default=created)
    began = since or (created if first - created <= _SAME_TIME + _PADDING else first - _PADDING)
    moments += (m for m in _from_nodes(nodes) if m.at >= max(first, began))
    moments.sort(key=lambda m: m.at)
    history = History(ended_s=max(1.0, (now - began).total_seconds()))
    history.changes = _changes(moments, status, names, began, now)
    history.events = list(_cluster_events(moments, began))
    return Timeline(history, began, since is None and began == created)


def read_time(value: Any) -> datetime | None:
    """Parse an RFC 3339 time of the API; None if it is not one."""
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return None


def event_time(event: Json) -> datetime | None:
    """When a core/v1 Event happened."""
    created = (event.get("metadata") or {}).get("creationTimestamp")
    times = (event.get("eventTime"), event.get("lastTimestamp"), created)
    return next((at for value in times if value and (at := read_time(value))), None)


def _from_events(events: Iterable[Json], names: Sequence[str]) -> Iterator[_Moment]:
    for event in events:
        at, reason = event_time(event), event.get("reason")
        message = str(event.get("message") or "").split()
        if at is None or not message:
            continue
        if reason in _STATE_BY_REASON and message[0] in names:
            is_starting = message[1:3] == ["is", "starting;"]  # for the first time, without state
            state = "Starting" if is_starting else _STATE_BY_REASON[reason]
            yield _Moment(at, query=message[0], state=state)
        elif reason == "NodeLost" and len(message) > 1:  # "node NAME is ..."
            yield _Moment(at, lost=(message[1],))
        elif reason in _NOTE_BY_REASON:
            yield _Moment(at, note=_NOTE_BY_REASON[reason])


def _from_recovery_history(
    status: Json, names: Sequence[str], before: datetime
) -> Iterator[_Moment]:
    """Recoveries that started before `before`, whose Events the cluster has deleted."""
    for entry in (status.get("recovery") or {}).get("history") or ():
        started = read_time(entry.get("startedAt"))
        if started is None or started >= before - _SAME_TIME:
            continue
        yield _Moment(started, lost=tuple(str(node) for node in entry.get("lostNodes") or ()))
        for query in entry.get("queries") or ():
            name, after = str(query.get("name")), _SECONDS.fullmatch(str(query.get("liveAfter")))
            if name in names:
                yield _Moment(started, query=name, state="Waiting")
                if after is not None:
                    live = started + timedelta(seconds=float(after[1]))
                    yield _Moment(live, query=name, state="Live")


def _from_nodes(nodes: Iterable[Json]) -> Iterator[_Moment]:
    for node in nodes:
        meta = node.get("metadata") or {}
        if (at := read_time(meta.get("creationTimestamp"))) is not None:
            yield _Moment(at, joined=(str(meta.get("name")),))


def _changes(
    moments: Sequence[_Moment],
    status: Json,
    names: Sequence[str],
    began: datetime,
    now: datetime,
) -> list[StateChange]:
    """For each query: its state at the beginning, each change, and its state now."""
    states_now = {
        str(q.get("name")): str(q.get("state") or "") for q in status.get("queries") or ()
    }
    by_priority = sorted(
        (q for q in status.get("queries") or () if q.get("name") in names),
        key=lambda q: -int(q.get("priority") or 0),
    )
    since = {str(q.get("name")): read_time(q.get("since")) for q in status.get("queries") or ()}
    changes: list[StateChange] = []
    for name in (str(q["name"]) for q in by_priority):
        of_query = [m for m in moments if m.query == name]
        earlier = [m.state for m in of_query if m.at < began]
        later = [m for m in of_query if m.at >= began]
        state = earlier[-1] if earlier else _state_before(later, states_now[name])
        changes.append(StateChange(0.0, name, state))
        for moment in later:
            if moment.state != state:
                state = moment.state
                changes.append(StateChange((moment.at - began).total_seconds(), name, state))
        if states_now[name] and _differs(state, states_now[name]):
            # Without an Event of its loss, as after an hour: the status says since when it is down.
            lost = since[name] if state == "Live" else None
            at = max(lost or now, later[-1].at if later else began)
            changes.append(StateChange((at - began).total_seconds(), name, states_now[name]))
    return changes


def _state_before(later: Sequence[_Moment], state_now: str) -> str:
    """The state of a query before its first known Event."""
    if not later:
        return state_now or "Waiting"
    return "Live" if later[0].state == "Waiting" else "Waiting"


def _differs(drawn: str, now: str) -> bool:
    alike = ("Starting", "Restoring", "CatchingUp")
    return now != drawn and not (drawn in alike[:2] and now in alike)


def _cluster_events(moments: Sequence[_Moment], began: datetime) -> Iterator[ClusterEvent]:
    """Nodes that are lost or join together share one mark."""
    for kind in ("lost", "joined"):
        group: list[str] = []
        start: datetime | None = None
        for moment in moments:
            nodes = moment.lost if kind == "lost" else moment.joined
            if not nodes or moment.at < began:
                continue
            if start is not None and moment.at - start > _SAME_TIME:
                yield ClusterEvent(
                    (start - began).total_seconds(), kind, _describe_nodes(group, kind)
                )
                group, start = [], None
            start = start or moment.at
            group += nodes
        if start is not None:
            yield ClusterEvent((start - began).total_seconds(), kind, _describe_nodes(group, kind))
    for moment in moments:
        if moment.note and moment.at >= began:
            yield ClusterEvent((moment.at - began).total_seconds(), "note", moment.note)


def _describe_nodes(nodes: Sequence[str], kind: str) -> str:
    unique = list(dict.fromkeys(nodes))
    if len(unique) > 2:
        return f"{len(unique)} nodes {kind}"
    return f"{' and '.join(unique)} {kind}"
