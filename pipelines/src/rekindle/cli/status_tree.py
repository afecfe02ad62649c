"""Draws a `StatusView` for a terminal, with Rich. Pure: the time is passed in.

Strings from the cluster are wrapped in `Text`: Rich would parse `[...]` in a plain string as
markup."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rekindle.cli.formatting import readable_bytes, readable_duration
from rekindle.cli.status_view import (
    Checkpoint,
    QueryLine,
    RecoveryLine,
    Restart,
    SegmentLine,
    StatusView,
    TaskLine,
)

_STYLES = {
    "Live": "green",
    "Running": "green",
    "CatchingUp": "yellow",
    "Tentative": "yellow",
    "Restoring": "yellow",
    "Starting": "yellow",
    "Recovering": "yellow",
    "Waiting": "red",
    "Failed": "bold red",
    "Invalid": "bold red",
    "Degraded": "red",
    "Unknown": "magenta",
}
_NAME_WIDTH, _STATE_WIDTH = 20, 11
MAX_LIVE_TASKS = 8
"""Maximum number of Live tasks shown for each segment; the others are only counted."""


def render_status(
    view: StatusView, now: datetime, *, max_live_tasks: int = MAX_LIVE_TASKS
) -> RenderableType:
    """`max_live_tasks`: maximum number shown for each segment. Tasks that are not Live, or have a
    remark, are always shown."""
    parts: list[RenderableType] = [_title(view), _facts(view, now)]
    if view.recovery is not None:
        parts += ["", _recovery(view.recovery, view, now)]
    if view.conditions or view.problems:
        parts += ["", _problems(view)]
    parts += ["", _tree(view, max_live_tasks)]
    return Group(*parts)


def _title(view: StatusView) -> Text:
    title = Text.assemble((view.name, "bold"), "  ", _state(view.phase))
    title.append(f"  namespace {view.namespace}", "dim")
    if view.generation is not None:
        title.append(f", generation {view.generation}", "dim")
        if view.observed_generation is not None and view.observed_generation < view.generation:
            title.append(f" (the operator has observed {view.observed_generation})", "yellow")
    return title


def _facts(view: StatusView, now: datetime) -> Table:
    table = _grid()
    if view.queries_live:
        table.add_row("queries live", view.queries_live)
    if view.redundancy:
        table.add_row("replicas live", view.redundancy)
    if view.lag:
        table.add_row("lag", view.lag)
    table.add_row("last checkpoint", _checkpoint(view.checkpoint, now))
    if view.restart is not None:
        longest = readable_duration(view.restart.replay_s)
        table.add_row("a restart", f"{_restart(view.restart)} in {longest}, at most")
    return table


def _restart(restart: Restart) -> str:
    epochs = "1 epoch" if restart.epochs == 1 else f"{restart.epochs} epochs"
    return f"loads {readable_bytes(restart.state_bytes)}, replays {epochs}"


def _checkpoint(checkpoint: Checkpoint | None, now: datetime) -> str:
    if checkpoint is None:
        return "none"
    parts = [f"epoch {checkpoint.epoch}"]
    if checkpoint.at is not None:
        parts.append(f"{_age(checkpoint.at, now)} ago")
    if checkpoint.bytes is not None:
        parts.append(readable_bytes(checkpoint.bytes))
    return ", ".join(parts)


def _recovery(recovery: RecoveryLine, view: StatusView, now: datetime) -> Table:
    table = _grid()
    since = f" for {_age(recovery.since, now)}" if recovery.since is not None else ""
    table.add_row("recovery", Text(f"{recovery.mode}{since}", "yellow"))
    if recovery.lost_nodes:
        table.add_row("lost nodes", Text(", ".join(recovery.lost_nodes)))
    states = {query.name: query.state for query in view.queries}
    for number, name in enumerate(recovery.plan, 1):
        step = Text.assemble(f"{number}. {name:<{_NAME_WIDTH}} ", _state(states.get(name, "")))
        table.add_row("plan" if number == 1 else "", step)
    if not recovery.plan:
        table.add_row("plan", "replicas only: no query is down")
    if recovery.plan_message:
        at = f"{_age(recovery.planned_at, now)} ago: " if recovery.planned_at is not None else ""
        table.add_row("planned", Text(f"{at}{recovery.plan_message}"))
    return table


def _problems(view: StatusView) -> Table:
    table = _grid()
    for condition in view.conditions:
        style = "magenta" if condition.status == "Unknown" else "red"
        text = Text.assemble((f"{condition.status}, {condition.reason}", style))
        table.add_row(condition.type, text.append(f": {condition.message}", "default"))
    for problem in view.problems:
        table.add_row("problem", Text(problem))
    return table


def _tree(view: StatusView, max_live_tasks: int) -> RenderableType:
    if not view.queries and not view.unqueried_segments:
        return Text("no queries", "dim")
    tree = Tree("queries, by priority", guide_style="dim")
    shown: dict[str, str] = {}
    for query in view.queries:
        branch = tree.add(_query(query))
        if query.waiting_for:
            branch.add(Text(f"waits for {query.waiting_for}", "yellow"))
        for missing in query.missing:
            branch.add(Text(missing, "yellow"))
        for segment in query.segments:
            item = branch.add(_segment(segment))
            if segment.name in shown:
                item.label = _segment(segment).append(f"  see {shown[segment.name]}", "dim")
                continue
            shown[segment.name] = query.name
            for line in _tasks(segment, max_live_tasks):
                item.add(line)
    if view.unqueried_segments:
        rest = tree.add(Text("tasks of no query in this spec", "dim") if view.queries else "tasks")
        for segment in view.unqueried_segments:
            item = rest.add(_segment(segment))
            for line in _tasks(segment, max_live_tasks):
                item.add(line)
    return tree


def _query(query: QueryLine) -> Text:
    line = Text.assemble(
        (f"{query.name:<{_NAME_WIDTH}} ", "bold"), _state(query.state, _STATE_WIDTH)
    )
    if query.priority is not None:
        line.append(f"  priority {query.priority}")
    if query.epoch is not None:
        line.append(f"  epoch {query.epoch}")
    if query.lag:
        line.append(f"  lag {query.lag}")
    return line


def _segment(segment: SegmentLine) -> Text:
    live, total = segment.live, len(segment.tasks)
    return Text.assemble(
        f"{segment.name:<{_NAME_WIDTH}} ",
        (f"{live}/{total} live", "green" if live == total else "red"),
    )


def _tasks(segment: SegmentLine, max_live_tasks: int) -> Iterator[Text]:
    shown = 0
    for task in segment.tasks:
        if task.phase == "Live" and not task.remark:
            shown += 1
            if shown > max_live_tasks:
                continue
        yield _task(task)
    if shown > max_live_tasks and max_live_tasks:
        yield Text(f"{shown - max_live_tasks} more are Live (--all shows them)", "dim")


def _task(task: TaskLine) -> Text:
    line = Text.assemble(f"{task.name:<7} ", _state(task.phase or "no pod", _STATE_WIDTH))
    if task.epoch is not None:
        line.append(f"  epoch {task.epoch}")
    where = " on ".join(part for part in (task.pod, task.node) if part)
    if where:
        line.append(f"  {where}", "dim")
    if task.restart is not None:
        line.append(f"  a restart {_restart(task.restart)}", "dim")
    if task.remark:
        line.append(f"  {task.remark}", "yellow")
    return line


def _state(state: str, width: int = 0) -> Text:
    return Text(f"{state or 'Unknown':<{width}}", _STYLES.get(state or "Unknown", "default"))


def _age(at: datetime, now: datetime) -> str:
    """The time since `at`; never negative, although the cluster's clock may be ahead of this
    machine's."""
    return readable_duration(max(0.0, (now - at).total_seconds()))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
