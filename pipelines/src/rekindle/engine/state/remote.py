"""Runs whose rows are not available yet: they are in objects of a checkpoint that are fetched in
the background (lazy restore).

A restored task processes epochs before all of its state is fetched. The number of rows of such a
run, their panes and columns are known; a thread that reads the rows waits until they arrive. The
run is immutable nevertheless: its rows are those that were saved. Does not know where they are
fetched from.

Design: docs/decisions/0048-lazy-restore.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from rekindle.engine.state.runs import Run, RunFile, RunId


class RunFetcher(Protocol):
    """Fetches the rows of some runs, all at once."""

    def fetch(self) -> None:
        """Return when the runs have arrived. Raises StoreError, StateLost, DiskFull."""
        ...

    def prioritize(self) -> None:
        """Fetch these runs before others, because they will be read soon. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run without its rows. `nbytes` may be an estimate; `pane_range`: the first
    and the last of its panes that may be read; if there is none, the first is after the last."""

    rows: int
    nbytes: int
    pane_range: tuple[int, int]
    schema: pa.Schema


class AwaitedRun:
    """Holds a run once it has arrived; before, its facts and its fetcher."""

    __slots__ = ("__weakref__", "facts", "fetcher", "run")

    def __init__(self, facts: RunFacts, fetcher: RunFetcher) -> None:
        self.facts = facts
        self.run: Run | None = None
        self.fetcher: RunFetcher | None = fetcher

    def arrive(self, run: Run) -> None:
        self.run = run
        self.fetcher = None


class RemoteRun(Run):
    """A run that waits for its rows (see the module's docstring). Several, with different columns,
    may share one `AwaitedRun`."""

    def __init__(
        self, awaited: AwaitedRun, id: RunId | None = None, names: Sequence[str] | None = None
    ) -> None:
        self.id = id or RunId()
        self._awaited = awaited
        self._names = names

    @property
    def is_available(self) -> bool:
        return self._awaited.run is not None

    @property
    def table(self) -> pa.Table:
        """Waits for the rows. Raises StoreError, StateLost, DiskFull."""
        awaited = self._awaited
        while awaited.run is None:
            if (fetcher := awaited.fetcher) is not None:
                fetcher.fetch()
        table = awaited.run.table
        return table if self._names is None else table.select(self._names)

    @property
    def file(self) -> RunFile | None:
        return self._awaited.run.file if self._awaited.run is not None else None

    @property
    def in_memory(self) -> bool:
        return self._awaited.run is not None and self._awaited.run.in_memory

    @property
    def schema(self) -> pa.Schema:
        schema = self._awaited.facts.schema
        return schema if self._names is None else pa.schema([schema.field(n) for n in self._names])

    @property
    def rows(self) -> int:
        return self._awaited.facts.rows

    @property
    def nbytes(self) -> int:
        run = self._awaited.run
        return self._awaited.facts.nbytes if run is None else run.nbytes

    @property
    def pane_range(self) -> tuple[int, int]:
        return self._awaited.facts.pane_range

    def select(self, names: Sequence[str]) -> Run:
        return RemoteRun(self._awaited, self.id, names)

    @property
    def fetcher(self) -> RunFetcher | None:
        """None once the rows have arrived."""
        return self._awaited.fetcher


def prioritize(runs: Iterable[Run]) -> None:
    """Fetch these runs first, in this order: they will be read."""
    fetchers = (run.fetcher for run in runs if isinstance(run, RemoteRun))
    distinct = dict.fromkeys(fetcher for fetcher in fetchers if fetcher is not None)
    for fetcher in reversed(distinct):  # each call puts its runs before all others
        fetcher.prioritize()
