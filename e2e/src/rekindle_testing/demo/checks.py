"""Checks a finished demo by its history and the row comparison: pure, so it can be tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.connectors.compare import Difference
from rekindle.timeline.history import History

LONGEST_PAUSE_S = 4.0
"""Maximum pause of the output of a query that has replicas left, with epochs of one second. It is
longer than an epoch, since all nodes of the demo share the cores on which six of them die and
others start."""


def failures(
    history: History,
    *,
    lost_at_s: float,
    last_loss_s: float,
    plan: Sequence[str],
    expected_lost: Sequence[str],
    survivors: Sequence[str],
    differences: Mapping[str, Difference],
    last_epoch: int,
    restored_from: Mapping[str, int],
    pauses: Mapping[str, float],
) -> list[str]:
    """Everything that makes the demo fail, as sentences; empty if it succeeded.

    `lost_at_s`: when the nodes were killed, in seconds since `kubectl apply`; `last_loss_s`: when
    some of the lost queries were lost again, or the same; `plan`: the planned order of the queries,
    as it was when the first one recovered; `restored_from`: epochs of checkpoints; `last_epoch`:
    the epoch in which the input ends; `pauses`: the longest pauses of the survivors' sinks in
    seconds.
    """
    found = []
    if (newest := history.newest_epoch(last_loss_s)) >= last_epoch:
        found.append(f"the nodes were lost at epoch {newest}, and the input ended at {last_epoch}")
    for query in survivors:
        if pauses[query] > LONGEST_PAUSE_S:
            found.append(f"{query} had replicas left and paused for {pauses[query]:.1f} s")
        if outage := history.outage(query, lost_at_s):
            found.append(f"{query} had replicas left and still was down at {outage.lost_s:.1f} s")
    recovered: list[tuple[float, str]] = []
    for query in expected_lost:
        outage = history.outage(query, last_loss_s)
        if outage is None:
            found.append(f"{query} lost its only task, and the status did not report it")
        elif outage.live_s is None:
            found.append(f"{query} did not recover")
        else:
            recovered.append((outage.live_s, query))
        if restored_from.get(query, -1) < 0:
            found.append(f"{query} was not restored from a checkpoint")
    order = [query for _, query in sorted(recovered)]
    planned = [query for query in plan if query in order]
    if sorted(planned) != sorted(order):
        found.append(f"the plan {list(plan)} does not name all that were lost: {order}")
    elif planned != order:
        found.append(f"queries recovered in the order {order}, the plan was {planned}")
    for query, difference in differences.items():
        if difference:
            found.append(f"{query}: {difference}")
        if not difference.expected_rows:
            found.append(f"{query} wrote no rows: nothing was compared")
    return found


def result(
    history: History,
    *,
    lost_at_s: float,
    last_loss_s: float,
    plan: Sequence[str],
    differences: Mapping[str, Difference],
    restored_from: Mapping[str, int],
    pauses: Mapping[str, float],
    failed: Sequence[str],
) -> dict[str, Any]:
    """The content of `build/demo/result.json`. Times are seconds since `kubectl apply`; those of a
    query are of its last outage."""
    queries = []
    for name in history.queries():
        outage = history.outage(name, last_loss_s)
        queries.append(
            {
                "name": name,
                "lostAt": outage and round(outage.lost_s, 2),
                "restoredAt": outage and outage.restored_s and round(outage.restored_s, 2),
                "liveAt": outage and outage.live_s and round(outage.live_s, 2),
                "outageSeconds": outage
                and outage.live_s
                and round(outage.live_s - outage.lost_s, 2),
                "restoredFromEpoch": restored_from.get(name),
                "rowsCompared": differences[name].actual_rows if name in differences else 0,
                "rowsEqual": name in differences and not differences[name],
            }
        )
    return {
        "ok": not failed,
        "failures": list(failed),
        "plannedOrder": list(plan),
        "plans": [{"at": round(at_s, 2), "order": list(order)} for at_s, order in history.plans],
        "longestPauseSeconds": {q: round(pause_s, 2) for q, pause_s in pauses.items()},
        "nodesLostAt": round(lost_at_s, 2),
        "durationSeconds": round(history.ended_s, 2),
        "queries": queries,
        "events": [
            {"at": round(e.at_s, 2), "kind": e.kind, "text": e.text} for e in history.events
        ],
    }
