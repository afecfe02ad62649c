"""The operator's part of `status`, as Python objects: read once, when a topology is received. Pure.

`status` is written by this operator, or by another version of it. An entry that cannot be read is
left out, so that it never stops a recovery. What the coordinator writes is in `rekindle.report`.

Design: docs/design/kubernetes.md#status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from rekindle.report import MissingResults, read_missing, report_json

E = TypeVar("E", bound=StrEnum)


class TopologyPhase(StrEnum):
    """`status.phase`; which phase follows which is in `reconcile.phases`."""

    PENDING = "Pending"  # no generation is accepted yet
    INVALID = "Invalid"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    DEGRADED = "Degraded"
    SUSPENDED = "Suspended"
    UNKNOWN = "Unknown"
    DELETING = "Deleting"


class QueryState(StrEnum):
    """`status.queries[].state`."""

    LIVE = "Live"
    TENTATIVE = "Tentative"  # it goes on without an input, or corrects what it did
    CATCHING_UP = "CatchingUp"
    RESTORING = "Restoring"
    FAILED = "Failed"
    UNKNOWN = "Unknown"
    WAITING = "Waiting"


@dataclass(frozen=True, slots=True)
class ConditionEntry:
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int | None = None
    last_transition_time: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "lastTransitionTime": self.last_transition_time,
        }


@dataclass(frozen=True, slots=True)
class QueryEntry:
    """`durable_epoch`: newest one that is durable in the sink; written as `stableEpoch`. `since`:
    when it stopped being live; empty while it is, and if it never was. `complete_until`: the time
    up to which its results are complete; `finished_generation`: in which they are so for good."""

    name: str
    priority: int = 0
    state: QueryState | None = None  # None: not written, or a value of another version
    waiting_for: str = ""
    durable_epoch: int | None = None
    lag: str = ""  # like "1.5s"
    since: str = ""
    complete_until: str = ""
    finished_generation: int | None = None
    missing: tuple[MissingResults, ...] = ()

    def to_json(self) -> dict[str, Any]:
        optional = {
            "stableEpoch": self.durable_epoch,
            "lag": self.lag or None,
            "waitingFor": self.waiting_for or None,
            "since": self.since or None,
            "completeUntil": self.complete_until or None,
            "finishedGeneration": self.finished_generation,
            "missing": report_json(self.missing) or None,
        }
        entry = {"name": self.name, "priority": self.priority, "state": self.state}
        return entry | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TopologyOperatorEntry:
    """One operator of the topology. `stable_epoch`: newest one in the log of its segment that is
    final."""

    name: str
    partitions: int
    replicas_ready: int
    stable_epoch: int | None = None

    def to_json(self) -> dict[str, Any]:
        entry = {
            "name": self.name,
            "partitions": self.partitions,
            "replicasReady": self.replicas_ready,
        }
        return entry | ({} if self.stable_epoch is None else {"stableEpoch": self.stable_epoch})


@dataclass(frozen=True, slots=True)
class RecoveredQuery:
    """A query that was down in a recovery; `live_after`: how long, empty while it is down."""

    name: str
    live_after: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name} | ({"liveAfter": self.live_after} if self.live_after else {})


@dataclass(frozen=True, slots=True)
class RecoveryEntry:
    """One recovery of the history. Open while `finished_at` is empty."""

    started_at: str
    mode: str = ""  # Progressive or Blocking, as the spec had it
    lost_nodes: tuple[str, ...] = ()
    queries: tuple[RecoveredQuery, ...] = ()
    finished_at: str = ""

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "startedAt": self.started_at,
            "mode": self.mode,
            "lostNodes": list(self.lost_nodes),
            "queries": [q.to_json() for q in self.queries],
        }
        return entry | ({"finishedAt": self.finished_at} if self.finished_at else {})


@dataclass(frozen=True, slots=True)
class RecoveryStatus:
    """`history`: newest first. While a recovery is in progress its first entry is the active one,
    and `plan` names queries in the order in which they come back."""

    is_active: bool = False
    plan: tuple[str, ...] = ()
    history: tuple[RecoveryEntry, ...] = ()

    @property
    def newest(self) -> RecoveryEntry | None:
        return self.history[0] if self.history else None

    @property
    def active(self) -> RecoveryEntry | None:
        return self.newest if self.is_active else None

    def to_json(self) -> dict[str, Any]:
        history = [entry.to_json() for entry in self.history]
        if (active := self.active) is None:
            return {"history": history} if history else {}
        return {
            "startedAt": active.started_at,
            "mode": active.mode,
            "lostNodes": list(active.lost_nodes),
            "plan": list(self.plan),
            "history": history,
        }


@dataclass(frozen=True, slots=True)
class RebalancingEntry:
    """A move of a task to an emptier node that is in progress, or that has failed. `slot`,
    `incarnation`: of the pod that takes over. `task`: the name of the one that is replaced, for
    people. `message`: why it has failed."""

    slot: str
    incarnation: int
    task: str = ""
    source: str = ""  # node; written as `from`
    target: str = ""  # node; written as `to`
    started_at: str = ""
    failed_at: str = ""
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "slot": self.slot,
            "incarnation": self.incarnation,
            "task": self.task,
            "from": self.source,
            "to": self.target,
            "startedAt": self.started_at,
        }
        failure = {"failedAt": self.failed_at, "message": self.message}
        return entry | (failure if self.failed_at else {})


@dataclass(frozen=True, slots=True)
class TopologyStatus:
    """What decisions and Events need of a status."""

    phase: TopologyPhase | None = None
    conditions: Mapping[str, ConditionEntry] = field(default_factory=dict)  # by type
    queries: Mapping[str, QueryEntry] = field(default_factory=dict)  # by name
    redundancy: str = ""  # live slots of all slots: "3/4"
    recovery: RecoveryStatus = field(default_factory=RecoveryStatus)
    rebalancing: RebalancingEntry | None = None
    bad_records: tuple[str, ...] = ()  # sources with records that are no rows
    hot_keys: tuple[str, ...] = ()  # "operator/partition" of which most rows have one key
    incarnations: Mapping[str, int] = field(default_factory=dict)  # reserved, by slot key
    # By generation: the digest of its accepted generation record, empty if it is not accepted.
    # None: a version of the operator without this list wrote the status.
    generations: Mapping[int, str] | None = field(default_factory=dict)

    def condition(self, kind: str) -> ConditionEntry:
        """Empty if it was never written."""
        return self.conditions.get(kind, ConditionEntry(kind))


def read_topology_status(raw: Mapping[str, Any]) -> TopologyStatus:
    queries = (_query(q) for q in _entries(raw, "queries"))
    conditions = (_condition(c) for c in _entries(raw, "conditions"))
    return TopologyStatus(
        phase=_phase(raw.get("phase")),
        conditions={c.type: c for c in conditions if c.type},
        queries={q.name: q for q in queries if q.name},
        redundancy=_text(raw, "redundancy"),
        recovery=_recovery(_mapping(raw.get("recovery"))),
        rebalancing=_rebalancing(_mapping(raw.get("rebalancing"))),
        bad_records=_texts(raw, "badRecords"),
        hot_keys=_texts(raw, "hotKeys"),
        incarnations={
            str(s.get("slot")): incarnation
            for s in _entries(raw, "slots")
            if (incarnation := _integer(s.get("incarnation"))) is not None
        },
        generations=_generations(raw),
    )


def _phase(value: Any) -> TopologyPhase | None:
    """A value of another version: the topology is known, its phase is not."""
    return (_member(TopologyPhase, value) or TopologyPhase.UNKNOWN) if value else None


def _generations(raw: Mapping[str, Any]) -> Mapping[int, str] | None:
    if raw and "generations" not in raw:
        return None
    return {
        generation: _text(entry, "digest")
        for entry in _entries(raw, "generations")
        if (generation := _integer(entry.get("generation"))) is not None
    }


def _condition(raw: Mapping[str, Any]) -> ConditionEntry:
    return ConditionEntry(
        type=_text(raw, "type"),
        status=_text(raw, "status"),
        reason=_text(raw, "reason"),
        message=_text(raw, "message"),
        observed_generation=_integer(raw.get("observedGeneration")),
        last_transition_time=_text(raw, "lastTransitionTime"),
    )


def _query(raw: Mapping[str, Any]) -> QueryEntry:
    return QueryEntry(
        name=_text(raw, "name"),
        priority=_integer(raw.get("priority")) or 0,
        state=_member(QueryState, raw.get("state")),
        waiting_for=_text(raw, "waitingFor"),
        durable_epoch=_integer(raw.get("stableEpoch")),
        lag=_text(raw, "lag"),
        since=_text(raw, "since"),
        complete_until=_text(raw, "completeUntil"),
        finished_generation=_integer(raw.get("finishedGeneration")),
        missing=read_missing(raw),
    )


def _recovery(raw: Mapping[str, Any]) -> RecoveryStatus:
    history = (_recovery_entry(e) for e in _entries(raw, "history"))
    return RecoveryStatus(
        is_active=bool(raw.get("startedAt")),
        plan=_texts(raw, "plan"),
        history=tuple(entry for entry in history if entry.started_at),
    )


def _recovery_entry(raw: Mapping[str, Any]) -> RecoveryEntry:
    queries = (
        RecoveredQuery(_text(q, "name"), _text(q, "liveAfter")) for q in _entries(raw, "queries")
    )
    return RecoveryEntry(
        started_at=_text(raw, "startedAt"),
        mode=_text(raw, "mode"),
        lost_nodes=_texts(raw, "lostNodes"),
        queries=tuple(q for q in queries if q.name),
        finished_at=_text(raw, "finishedAt"),
    )


def _rebalancing(raw: Mapping[str, Any]) -> RebalancingEntry | None:
    slot, incarnation = _text(raw, "slot"), _integer(raw.get("incarnation"))
    if not slot or incarnation is None:
        return None
    return RebalancingEntry(
        slot=slot,
        incarnation=incarnation,
        task=_text(raw, "task"),
        source=_text(raw, "from"),
        target=_text(raw, "to"),
        started_at=_text(raw, "startedAt"),
        failed_at=_text(raw, "failedAt"),
        message=_text(raw, "message"),
    )


def _member(kind: type[E], value: Any) -> E | None:
    try:
        return kind(value)
    except ValueError:
        return None


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    return "" if value is None else str(value)


def _texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key)
    return tuple(str(v) for v in value) if isinstance(value, (list, tuple)) else ()


def _integer(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _entries(raw: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    value = raw.get(key)
    if isinstance(value, (list, tuple)):
        yield from (entry for entry in value if isinstance(entry, Mapping))
