"""What tasks report of the rows that they read: records that are left out, and keys that most rows
have. Pure.

Design: docs/operations.md#watch.
"""

from __future__ import annotations

from rekindle_operator.reconcile.context import ReconcileContext


def bad_records(context: ReconcileContext) -> dict[str, str]:
    """Sources of which tasks have left out records, and an example of each."""
    if context.running is None:
        return {}
    sources = {s.id: s.nodes[0] for s in context.running.topology.segments if s.is_source}
    return {
        source: report.bad_record
        for report in context.report.tasks.values()
        if report.bad_records and (source := sources.get(report.slot.partition("/")[0]))
    }


def hot_keys(context: ReconcileContext) -> dict[str, str]:
    """By "operator/partition": which key most rows have, as a replica says it."""
    if context.running is None:
        return {}
    operators = {s.id: s.nodes[0] for s in context.running.topology.segments}
    found = dict[str, str]()
    for slot, report in sorted(context.report.tasks.items()):
        segment, _, rest = slot.partition("/")
        if report.hot_key and segment in operators:
            found.setdefault(f"{operators[segment]}/{rest.partition('/')[0]}", report.hot_key)
    return found
