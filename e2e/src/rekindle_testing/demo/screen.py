"""The output of the demo: progress lines, then a table that updates.

Without a terminal (CI, a pipe) a line is printed whenever a state changes.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_STYLE = {
    "Live": "green",
    "CatchingUp": "yellow",
    "Restoring": "yellow",
    "Unknown": "magenta",
    "Waiting": "red",
}


class Screen:
    """Prints progress and keeps the table of queries and nodes current."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._live: Live | None = None
        self._last: tuple[Any, ...] = ()

    def print(self, text: str) -> None:
        self.console.print(f"[bold cyan]rekindle[/] {text}")

    def begin_table(self) -> None:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4)
            self._live.start()

    def end_table(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def update(self, at_s: float, status: dict[str, Any], nodes: list[str]) -> None:
        """Show one sample of the topology's status; `at_s`: since its history began."""
        queries = status.get("queries", [])
        seen = tuple((q["name"], q.get("state")) for q in queries), tuple(nodes)
        if self._live:
            self._live.update(Group(_table(queries), _footer(at_s, status, nodes)))
        elif seen != self._last:
            states = "  ".join(f"{q['name']}={q.get('state')}" for q in queries)
            self.console.print(f"{at_s:7.1f} s  {len(nodes)} nodes  {states}", soft_wrap=True)
        self._last = seen


def _table(queries: list[dict[str, Any]]) -> Table:
    table = Table(title="queries, by priority", title_justify="left")
    for heading in ("query", "priority", "state", "stable epoch", "lag", "waiting for"):
        table.add_column(heading)
    for query in sorted(queries, key=lambda q: -q.get("priority", 0)):
        state = query.get("state", "Waiting")
        table.add_row(
            query["name"],
            str(query.get("priority", "")),
            Text(state, style=_STYLE.get(state, "white")),
            str(query.get("stableEpoch", "")),
            str(query.get("lag", "")),
            str(query.get("waitingFor", "") or ""),
        )
    return table


def _footer(at_s: float, status: dict[str, Any], nodes: list[str]) -> Text:
    plan = (status.get("recovery") or {}).get("plan") or []
    text = f"{at_s:6.1f} s   nodes: {', '.join(nodes)}"
    return Text(text + (f"   recovery plan: {' → '.join(plan)}" if plan else ""))
