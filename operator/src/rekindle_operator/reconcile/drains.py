"""Why a cordoned node cannot be drained, for `status` and Events. Pure.

Design: docs/design/planned-moves.md#what-a-drain-waits-for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rekindle_operator.reconcile.context import ReconcileContext, draining_nodes
from rekindle_operator.reconcile.coordinator import waiting_drain_of_coordinator
from rekindle_operator.reconcile.health import ReplicaState, replica_state, without_successors
from rekindle_operator.reconcile.moves import is_on, problem_of
from rekindle_operator.reconcile.slots import SlotState

_MAX_NODES = 3
_MAX_REASONS = 2  # of a node
_MAX_TASKS = 3  # with one reason
_MAX_REASON_CHARS = 120  # a condition's message has 1,024 for all
_CONFLICT = "no successor: its image and running tasks have other stream protocols"
_NOT_LIVE = "not live: it moves once it is"
_COORDINATOR = "the coordinator"


def waiting_drains(context: ReconcileContext, states: Sequence[SlotState]) -> list[str]:
    """A text for each node: what stays on it, and why. Without what only takes its time."""
    draining = draining_nodes(context)
    if not draining or context.running is None or context.report_stale_since is not None:
        return []
    successors = {s.slot.alternate: s for s in states if s.is_successor}
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for state in without_successors(states):
        if not is_on(state, draining) or state.pod is None or state.pod.node is None:
            continue
        if why := _why(context, state, successors.get(state.slot)):
            found[state.pod.node][why].append(state.name)
    if waits := waiting_drain_of_coordinator(context):
        found[waits.node][waits.why].insert(0, _COORDINATOR)
    more = len(found) - _MAX_NODES
    texts = [_text(node, reasons) for node, reasons in sorted(found.items())[:_MAX_NODES]]
    return [*texts, f"and of {more} more nodes"] if more > 0 else texts


def _why(context: ReconcileContext, state: SlotState, successor: SlotState | None) -> str:
    if successor is not None:
        problem = problem_of(context, successor)
        return f"successor: {problem}" if problem else ""
    if replica_state(context, state) is not ReplicaState.LIVE:
        return _NOT_LIVE
    return _CONFLICT if context.report.stream_conflict else ""


def _text(node: str, reasons: Mapping[str, Sequence[str]]) -> str:
    def order(item: tuple[str, Sequence[str]]) -> tuple[bool, int, str]:
        why, waiting = item
        return _COORDINATOR not in waiting, -len(waiting), why

    most_first = sorted(reasons.items(), key=order)
    shown = []
    for why, tasks in most_first[:_MAX_REASONS]:
        some = f"{', '.join(tasks[:_MAX_TASKS])}{' ...' * (len(tasks) > _MAX_TASKS)}"
        shown.append(f"{some} ({cut(why, _MAX_REASON_CHARS)})")
    more = " and others" if len(most_first) > _MAX_REASONS else ""
    return f"a drain of node {node} waits for {' and '.join(shown)}{more}"


def cut(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else f"{text[: most_chars - 4]} ..."
