"""Progress and results of `rekindle run`.

On a terminal, a progress bar; otherwise a line from time to time, for logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO, assert_never

import pyarrow as pa
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import (
    Progress as Bar,
)
from rich.table import Table

from rekindle.cli.formatting import readable_duration
from rekindle.cli.run_input import describe_input
from rekindle.connectors.json_writer import encode_lines
from rekindle.errors import RekindleError
from rekindle.reference import ReferenceResult, RunEvent, RunProgress, SourcesOpened, SparkStarting

_LINE_EVERY_S = 5.0
_UNWRAPPED_CHARS = 10_000
"""Width if the output is not a terminal: lines are not wrapped, so that grep and cut work."""


class Display(Protocol):
    def report(self, event: RunEvent) -> None: ...


@contextmanager
def open_display(stream: TextIO, topology: str, log: Path) -> Iterator[Display]:
    """`log`: where Spark's log will be."""
    if not stream.isatty():
        yield Lines(stream, topology, log)
        return
    console = _console(stream)
    with Bars(console, topology, log) as bars:
        yield bars


def _console(stream: TextIO, width: int | None = None) -> Console:
    """Plain text: paths and URLs may have `[...]` in them."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def describe_start(event: SourcesOpened | SparkStarting, topology: str, log: Path) -> list[str]:
    """The lines about a step of the start."""
    match event:
        case SourcesOpened():
            return [f"{topology}: {line}" for line in describe_input(event)]
        case SparkStarting():
            # `event.archive`: an archive of Spark's classes halves the start time.
            hint = "" if event.archive else "; run `rekindle warm-up` once to make this faster"
            return [f"{topology}: starting Spark, log in {log}{hint}"]
        case _:
            assert_never(event)


def time_left_s(progress: RunProgress) -> float | None:
    """Estimated from the epochs done; None before the first."""
    done, left = progress.epoch + 1, progress.last_epoch - progress.epoch
    return progress.seconds * left / done if done > 0 and progress.seconds > 0 else None


class Lines:
    """Prints a line at most every five seconds, and the last one."""

    def __init__(self, stream: TextIO, topology: str, log: Path) -> None:
        self._stream, self._topology, self._log = stream, topology, log
        self._printed_s = -_LINE_EVERY_S

    def report(self, event: RunEvent) -> None:
        if not isinstance(event, RunProgress):
            for line in describe_start(event, self._topology, self._log):
                self._print(line)
            return
        is_last = event.epoch == event.last_epoch
        if not is_last and event.seconds - self._printed_s < _LINE_EVERY_S:
            return
        self._printed_s = event.seconds
        left = time_left_s(event)
        rest = f", about {readable_duration(left)} left" if left and not is_last else ""
        self._print(
            f"{self._topology}: epoch {event.epoch} of {event.last_epoch}, {event.rows:,} rows "
            f"read in {readable_duration(event.seconds)}{rest}"
        )

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Bars:
    """A bar below the messages that disappears when the run ends."""

    def __init__(self, console: Console, topology: str, log: Path) -> None:
        self._topology, self._log = topology, log
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("epoch"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rows]:,} rows"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, event: RunEvent) -> None:
        if isinstance(event, RunProgress):
            left_s = time_left_s(event)
            left = f"about {readable_duration(left_s)} left" if left_s else ""
            if self._task is not None:
                self._bar.update(self._task, completed=event.epoch + 1, rows=event.rows, left=left)
            return
        for line in describe_start(event, self._topology, self._log):
            self._bar.console.print(line)
        if isinstance(event, SourcesOpened):
            total = event.last_epoch + 1
            self._task = self._bar.add_task(self._topology, total=total, rows=0, left="")


class FirstRows:
    """The first `number` rows of a query, as they are written."""

    def __init__(self, query: str, number: int) -> None:
        self.query = query
        self._number = number
        self._kept: list[tuple[int, pa.Table]] = []

    def check(self, queries: Iterable[str]) -> None:
        """Raises RekindleError if there is no such query."""
        if self.query not in queries:
            known = ", ".join(sorted(queries))
            raise RekindleError(f"--show: no query {self.query}; the topology has {known}")

    def take(self, query: str, epoch: int, rows: pa.Table) -> None:
        left = self._number - sum(kept.num_rows for _, kept in self._kept)
        if query == self.query and left > 0:
            self._kept.append((epoch, rows.slice(0, left)))

    def print(self, stream: TextIO, total: int) -> None:
        shown = sum(kept.num_rows for _, kept in self._kept)
        print(f"\n{self.query}: the first {shown:,} of {total:,} rows, by epoch", file=stream)
        for epoch, rows in self._kept:
            for line in encode_lines(rows).decode().rstrip("\n").split("\n"):
                print(f"{epoch:>8}  {line}", file=stream)


def print_result(stream: TextIO, topology: str, result: ReferenceResult) -> None:
    """Print rows and output URL of each query, and the rows that windows dropped."""
    console = _console(stream, None if stream.isatty() else _UNWRAPPED_CHARS)
    title = f"{topology}: {result.epochs:,} epochs in {readable_duration(result.seconds)}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("query")
    table.add_column("rows", justify="right")
    table.add_column("epochs with rows", justify="right")
    table.add_column("output", overflow="fold")
    for query, rows in result.rows.items():
        epochs = result.epochs_with_rows[query]
        url = result.urls.get(query, "not stored: give --output")
        table.add_row(query, f"{rows:,}", f"{epochs:,}", url)
    console.print(table)
    if result.ends_early and result.dropped:
        console.print(
            f"the run ended with epoch {result.epochs - 1}, before the end of the input: windows "
            "that were open then are not written"
        )
    for operator, dropped in result.dropped.items():
        if dropped.late or dropped.null_event_time:
            console.print(
                f"operator {operator} dropped {dropped.late:,} late rows, and "
                f"{dropped.null_event_time:,} without event time"
            )
