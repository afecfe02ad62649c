"""`rekindle status TOPOLOGY`: state of its queries and tasks, and the recovery plan."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rekindle.cli.kubernetes_api import (
    ApiUnavailable,
    ClusterReader,
    add_cluster_arguments,
    open_cluster,
)
from rekindle.cli.option_types import seconds_from
from rekindle.errors import InvalidTopology
from rekindle.termination import Terminated

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rekindle.cli.status_view import StatusView
    from rekindle.topology.model import Topology

EXAMPLES = """\
  rekindle status flights
  rekindle status flights -n streams --context production
  rekindle status flights --watch            # until Ctrl-C
  rekindle status flights --watch > log.txt  # not a terminal: prints each change
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="refresh until Ctrl-C")
    parser.add_argument(
        "--interval",
        type=seconds_from(0.1, 86_400),
        default=1.0,
        metavar="SECONDS",
        help="refresh interval with --watch (default: %(default)s)",
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="show every task, even if many are Live"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    reader = _Reader(open_cluster(args), args.topology)
    if not args.watch:
        console.print(_draw(reader.read(), console, args.all))
        return 0
    try:
        _watch(console, reader, args.interval, args.all)
    except Terminated as end:
        if end.number != signal.SIGINT:
            raise
    return 0


def _draw(view: StatusView, console: Console, all_tasks: bool, fit: bool = False) -> RenderableType:
    """`fit`: omit Live tasks if the output does not fit on the screen."""
    from rekindle.cli.status_tree import MAX_LIVE_TASKS, render_status

    now = datetime.now(UTC)
    drawn = render_status(view, now, max_live_tasks=sys.maxsize if all_tasks else MAX_LIVE_TASKS)
    if fit and not all_tasks and len(console.render_lines(drawn, pad=False)) > console.height:
        return render_status(view, now, max_live_tasks=0)
    return drawn


class _Reader:
    """Reads the status; compiles the spec only when it changes."""

    def __init__(self, cluster: ClusterReader, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._compiled: tuple[Any, Topology | None] | None = None

    def read(self) -> StatusView:
        from rekindle.cli.status_view import read_status

        document = self._cluster.topology(self._name)
        return read_status(
            document,
            self._topology(document),
            self._cluster.task_pods(document),
            self._cluster.events(document),
        )

    def _topology(self, document: dict[str, Any]) -> Topology | None:
        """None if the spec is invalid, or needs a newer release than this one."""
        spec = document.get("spec")
        if self._compiled is None or self._compiled[0] != spec:
            self._compiled = spec, _compile(document)
        return self._compiled[1]


def _compile(document: dict[str, Any]) -> Topology | None:
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec

    with contextlib.suppress(InvalidTopology):
        return compile_topology(
            load_spec(document.get("spec")), document["metadata"]["name"], accepted=True
        )
    return None


def _watch(console: Console, reader: _Reader, interval_s: float, all_tasks: bool) -> None:
    """Prints or redraws the status until a signal. While the API server does not respond, shows the
    last status with the error."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    shown = reader.read()  # with a wrong name or address the command fails
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else None
    with live or contextlib.nullcontext():
        failure = ""
        while True:
            picture = _draw(shown, console, all_tasks, fit=live is not None)
            if failure:
                picture = Group(
                    Text(f"{failure}; the status below is out of date", "magenta"), "", picture
                )
            if live is not None:
                live.update(picture, refresh=True)
            else:
                console.print(picture, "")
            before = shown, failure
            while (shown, failure) == before:
                time.sleep(interval_s)
                try:
                    shown, failure = reader.read(), ""
                except ApiUnavailable as error:
                    failure = str(error)
                if live is not None:
                    break  # draw again: the displayed ages have changed
