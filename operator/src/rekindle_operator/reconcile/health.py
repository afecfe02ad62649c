"""How operators and queries are, from pods and the coordinator's report. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rekindle.topology.model import Slot, Topology
from rekindle.topology.spec import QuerySpec
from rekindle_operator.cluster.convert import rfc3339
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.slots import SlotState

_ORDER = ("Live", "CatchingUp", "Restoring", "Starting", "Failed", "Unknown", "Waiting")
_REASON_LIMIT = 400
_LIVE_WITHIN_EPOCHS = 10
"""How far the sink of a Live query may be behind its sources, and at least `_LIVE_WITHIN_S`: while
its upstream starts, a task knows of nothing newer, and calls itself Live."""
_LIVE_WITHIN_S = 5.0
_OVER_SHARE = "the namespace has its share of the cluster, as the administrator limits it"


@dataclass(frozen=True, slots=True)
class QueryHealth:
    """`state` as status has it; `waiting_for` names what is missing."""

    name: str
    priority: int
    state: str
    waiting_for: str = ""
    stable_epoch: int | None = None
    lag_s: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """`stages`: (segment id, partition) -> the best of its replicas, a word of `_ORDER`."""

    queries: tuple[QueryHealth, ...]
    stages: Mapping[tuple[str, int], str]
    live: int  # slots whose task is Live
    slots: int

    @property
    def queries_live(self) -> int:
        return sum(q.state == "Live" for q in self.queries)

    @property
    def is_unknown(self) -> bool:
        return any(q.state == "Unknown" for q in self.queries)


def examine(
    context: ReconcileContext,
    states: Sequence[SlotState],
    surplus: Iterable[PodView],
    over_share: Container[str] = (),
) -> Health:
    """`surplus`: replicas that are to go, and serve until others do; `over_share`: queries that
    wait because their namespace has its share of the cluster; "" for all of them."""
    by_partition: dict[tuple[str, int], list[str]] = defaultdict(list)
    for state in states:
        by_partition[state.slot.segment, state.slot.partition].append(slot_stage(context, state))
    for pod in surplus:
        if pod.slot is not None:
            by_partition[pod.slot.segment, pod.slot.partition].append(
                _stage(context, pod.slot, pod)
            )
    stages = {key: min(replicas, key=_ORDER.index) for key, replicas in by_partition.items()}
    queries = context.running.topology.spec.queries if context.running else ()
    return Health(
        queries=tuple(
            _query(context, q, states, stages, "" in over_share or q.name in over_share)
            for q in queries
        ),
        stages=stages,
        live=sum(slot_stage(context, s) == "Live" for s in states),
        slots=len(states),
    )


def slot_stage(context: ReconcileContext, state: SlotState) -> str:
    """`Waiting` for a node; `Starting` until its task answers; then what the task says, as long as
    the report of it is fresh; `Unknown` after that."""
    if not state.holds or state.pod is None:
        return "Waiting"
    return _stage(context, state.slot, state.pod)


def _stage(context: ReconcileContext, slot: Slot, pod: PodView) -> str:
    if context.stale_since is not None:
        return "Unknown" if pod.was_ready else "Starting"  # that much its kubelet says
    report = context.data.task(slot.key, pod.incarnation)
    if report is None or report.phase in ("Waiting", "Stopping") or report.suspected:
        return "Starting"
    return report.phase if report.phase in _ORDER else "Starting"


def still_needed(
    context: ReconcileContext, states: Iterable[SlotState], surplus: Iterable[PodView]
) -> list[PodView]:
    """The surplus replicas of partitions of which none that stays is live."""
    live = {(s.slot.segment, s.slot.partition) for s in states if slot_stage(context, s) == "Live"}
    return [p for p in surplus if p.slot and (p.slot.segment, p.slot.partition) not in live]


def _query(
    context: ReconcileContext,
    query: QuerySpec,
    states: Sequence[SlotState],
    stages: Mapping[tuple[str, int], str],
    over_share: bool,
) -> QueryHealth:
    assert context.running is not None
    names = {s.id: s.name for s in context.running.topology.ancestry(query)}
    needed = {key: stage for key, stage in stages.items() if key[0] in names}
    reasons = sorted({_reason(context, s) for s in states if _is_of(s, needed)} - {""})
    if over_share:
        reasons.insert(0, _OVER_SHARE)
    worst = max(needed.values(), key=_ORDER.index, default="Waiting")
    state = "Restoring" if worst == "Starting" else worst
    if context.suspended:
        return QueryHealth(query.name, query.priority, "Waiting", "spec.suspend is true")
    report = context.data.queries.get(query.name)
    lag_s = report.lag_s if report and context.stale_since is None else None
    short = [f"{names[s]}/{p}" for (s, p), stage in needed.items() if stage == worst]
    if worst == "Live" and lag_s is not None and lag_s > _live_within_s(context.running.topology):
        worst = state = "CatchingUp"
        short = [f"the sink of {query.name}"]
    return QueryHealth(
        name=query.name,
        priority=query.priority,
        state=state,
        waiting_for=""
        if state == "Live"
        else f"{report_age(context)}: it is not known how {', '.join(short[:5])} are"
        if state == "Unknown"
        else _explain(worst, short, reasons),
        stable_epoch=report.stable_epoch if report else None,
        lag_s=lag_s,
    )


def _live_within_s(topology: Topology) -> float:
    return max(_LIVE_WITHIN_S, _LIVE_WITHIN_EPOCHS * topology.spec.epoch_interval / 1e6)


def report_age(context: ReconcileContext) -> str:
    """In words that stay the same while nothing changes."""
    if context.stale_since is None:
        return "the coordinator's report is fresh"
    return f"no word from the coordinator since {rfc3339(context.stale_since)}"


def _is_of(state: SlotState, needed: Mapping[tuple[str, int], str]) -> bool:
    return (state.slot.segment, state.slot.partition) in needed


def _reason(context: ReconcileContext, state: SlotState) -> str:
    """Who will not have its pod and why, or what its task says is wrong."""
    report = context.data.task(state.slot.key, state.pod.incarnation) if state.pod else None
    return state.refusal or (report.problem if report is not None else "")


def _explain(stage: str, partitions: Sequence[str], reasons: Sequence[str]) -> str:
    what = {
        "Waiting": "a node for",
        "Failed": "a task that works for",
        "Starting": "the start of",
        "Restoring": "the state of",
        "CatchingUp": "the catch-up of",
    }[stage]
    shown = ", ".join(partitions[:5]) + (" ..." if len(partitions) > 5 else "")
    said = f" ({reasons[0][:_REASON_LIMIT]})" if reasons else ""
    return f"{what} {shown}{said}"
