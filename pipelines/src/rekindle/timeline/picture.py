"""Draws a history: queries × time, coloured by state, with marks for nodes lost and joined.

Needs Matplotlib, which the extra `cli` installs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rekindle.timeline.history import History

COLOURS = {
    "Live": "#2e7d32",
    "CatchingUp": "#9ccc65",
    "Restoring": "#ffb300",
    "Starting": "#fff176",
    "Waiting": "#e0e0e0",
    "Failed": "#c62828",
    "Unknown": "#b39ddb",
    "Tentative": "#1e88e5",
}
_MARK_COLOURS = {"lost": "#c62828", "joined": "#1565c0", "note": "#757575"}


_LABEL_WIDTH = 0.015
"""Of a slanted line of text, as a fraction of the time axis."""


def label_positions(times: Sequence[float], width: float) -> list[float]:
    """Where the labels of marks at these ascending times begin, so that none covers another.
    `width`: the time that the axis shows."""
    found: list[float] = []
    for time in times:
        found.append(max(time, found[-1] + _LABEL_WIDTH * width) if found else time)
    return found


def draw(
    history: History, path: Path, title: str, time_axis: str = "seconds since kubectl apply"
) -> None:
    """Write the timeline to `path` (.svg or .png). `time_axis` says when the history began."""
    queries = history.queries()
    figure = Figure(figsize=(11, 1.8 + 0.7 * len(queries)))
    axes = figure.add_subplot()
    for row, query in enumerate(queries):
        changes = [c for c in history.changes if c.query == query]
        ends = [c.at_s for c in changes[1:]] + [history.ended_s]
        for change, end in zip(changes, ends, strict=True):
            colour = COLOURS.get(change.state, "#000000")
            axes.barh(row, end - change.at_s, left=change.at_s, height=0.55, color=colour)
    events = sorted(history.events, key=lambda event: event.at_s)
    labels = label_positions([event.at_s for event in events], history.ended_s)
    for event, label_at in zip(events, labels, strict=True):
        axes.axvline(event.at_s, color=_MARK_COLOURS[event.kind], linewidth=1, linestyle="--")
        axes.annotate(
            event.text, (label_at, -0.65), rotation=30, fontsize=7, va="bottom",
            color=_MARK_COLOURS[event.kind], annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(queries)), queries)
    axes.set_ylim(-0.6, len(queries) - 0.4)
    axes.invert_yaxis()
    axes.set_xlim(0, history.ended_s)
    axes.set_xlabel(time_axis)
    axes.set_title(title, pad=60, fontsize=11, loc="left")
    used = {c.state for c in history.changes}
    axes.legend(
        handles=[Patch(color=c, label=s) for s, c in COLOURS.items() if s in used],
        loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=6, frameon=False, fontsize=8,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=110)
