"""What operators and queries lack that begin later than their topology, in event time. Pure.

The manifest has the epochs: after which one an operator began, and which ones no definition of a
query has written. Sources say how far their event times were then, which is a pure function of
their rows, so nothing of it is stored, and every coordinator finds the same.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from rekindle.checkpoints.manifest import Gap, Manifest, QueryStart
from rekindle.coordinator.model import Generation
from rekindle.protocol import BegunWindow
from rekindle.report import MissingResults
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK
from rekindle.topology.missed_rows import MissedRows, missed_rows
from rekindle.topology.model import Segment, Topology
from rekindle.topology.operators.kind import TimedResults
from rekindle.topology.operators.registry import kind_of
from rekindle.topology.spec import QuerySpec, SourceSpec

EventTimes = tuple[int, int]
"""The newest event time through an epoch, and the watermark after it."""


class Unanswered(Exception):
    """A source has yet to say how far its event times were."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


class Beginnings:
    """Of one topology. Event times are kept by operator id of their source."""

    def __init__(self) -> None:
        self._topology: Topology | None = None
        self._begun: Mapping[str, int] = {}
        self._queries: Mapping[str, QueryStart] = {}
        self._missed: Mapping[str, frozenset[MissedRows]] = {}
        self._sources: dict[str, frozenset[str]] = {}
        # The operator whose results a stream has, as they are or row by row; None: of none, or
        # of more.
        self._last_results: dict[str, tuple[str, TimedResults] | None] = {}
        self._epochs: frozenset[int] = frozenset()
        self._times: dict[str, dict[int, EventTimes]] = {}
        self._cannot_answer: set[str] = set()

    def update(self, generation: Generation, manifest: Manifest) -> None:
        """`manifest`: of this generation."""
        known = self._topology, self._begun, self._queries
        if known == (generation.topology, manifest.begun, manifest.queries):
            return
        self._topology, self._begun = generation.topology, manifest.begun
        self._queries = manifest.queries
        self._missed = missed_rows(generation.topology, manifest.begun)
        self._sources, self._last_results = {}, {}
        for name, node in generation.topology.nodes.items():  # in topological order
            if isinstance(node.spec, SourceSpec):
                self._sources[name], self._last_results[name] = frozenset({name}), None
                continue
            self._sources[name] = frozenset().union(*(self._sources[i] for i in node.inputs))
            above = {self._last_results[i] for i in node.inputs}
            kind = kind_of(node.spec)
            own = kind.results() if kind is not None else None
            inherited = above.pop() if len(above) == 1 else None
            self._last_results[name] = inherited if own is None else (name, own)
        gaps = [gap for start in manifest.queries.values() for gap in start.gaps]
        self._epochs = frozenset(
            {m.epoch for found in self._missed.values() for m in found}
            | {epoch for gap in gaps for epoch in (gap.after, gap.before - 1)}
        )

    def epochs_to_ask(self, segment: Segment) -> tuple[int, ...]:
        """The epochs for which the source of a segment has yet to say its event times."""
        source = self._source_of(segment)
        if source is None:
            return ()
        return tuple(sorted(self._epochs.difference(self._times.get(source, ()))))

    def answered(self, segment: Segment, times: Mapping[int, EventTimes] | None) -> None:
        """A task of the segment has responded. `times`: None if its release does not know."""
        source = self._source_of(segment)
        if source is None:
            return
        if times is None:
            self._cannot_answer.add(source)
        else:
            self._cannot_answer.discard(source)
            self._times.setdefault(source, {}).update(times)

    def begun_windows(self, segment: Segment, epoch: int) -> tuple[BegunWindow, ...]:
        """The windows of a segment that a checkpoint of `epoch` does not have. Raises
        Unanswered."""
        topology = self._topology
        nodes = topology.nodes if topology is not None else {}
        own = segment.nodes[0] if segment.is_source else None
        found = []
        for name in segment.nodes:
            node = nodes.get(name)
            if node is None or self._begun.get(node.id, NO_EPOCH) < max(epoch, 0):
                continue
            kind = kind_of(node.spec)
            if kind is None or not kind.needs_all_rows:
                continue
            missed = self._missed[name]
            after_us = self._bound(m for m in missed if m.source != own)
            of_own = tuple(sorted((m.epoch, m.added_us) for m in missed if m.source == own))
            found.append(BegunWindow(operator=node.id, after_us=after_us, own=of_own))
        return tuple(found)

    def missing(self, query: QuerySpec) -> tuple[MissingResults, ...]:
        """What no definition of a query writes, as far as sources have said."""
        start = self._queries.get(query.name)
        if start is None or self._topology is None or query.from_ not in self._topology.nodes:
            return ()
        found = []
        for gap in start.gaps:
            try:
                missing = self._missing(query.from_, gap, is_newest=gap == start.gaps[-1])
            except Unanswered:
                continue
            if missing is not None:
                found.append(missing)
        return tuple(found)

    def _missing(self, name: str, gap: Gap, is_newest: bool) -> MissingResults | None:
        sources = self._sources[name]
        before = [self._event_times(s, gap.after) for s in sources]
        at = [self._event_times(s, gap.before - 1) for s in sources]
        written_us = min((watermark for _, watermark in before), default=NO_WATERMARK)
        begun_us = min((watermark for _, watermark in at), default=NO_WATERMARK)
        newest_us = max((newest for newest, _ in at), default=NO_WATERMARK)
        if written_us == END_OF_INPUT:
            return None  # all was written
        results = self._last_results[name]
        if results is None:
            if gap.before - gap.after <= 1:
                return None
            return _missing_results(gap, written_us, newest_us)
        operator, of_operator = results
        lacks_us = self._bound(self._missed[operator]) if is_newest else newest_us
        first_us = of_operator.first_open(written_us)
        complete_us = of_operator.first_complete(lacks_us)
        if begun_us == END_OF_INPUT:  # nothing is written any more
            complete_us = max(complete_us, of_operator.first_complete(newest_us))
        else:
            complete_us = max(complete_us, of_operator.first_open(begun_us))
        if newest_us == NO_WATERMARK:
            return _missing_results(gap, NO_WATERMARK, NO_WATERMARK)
        return _missing_results(gap, first_us, complete_us) if first_us < complete_us else None

    def _bound(self, missed: Iterable[MissedRows]) -> int:
        found = ((m, self._event_times(m.source, m.epoch)[0]) for m in missed)
        bounds = (newest + m.added_us for m, newest in found if newest != NO_WATERMARK)
        return max(bounds, default=NO_WATERMARK)

    def _event_times(self, source: str, epoch: int) -> EventTimes:
        """Raises Unanswered. Those of a source of an older release are not known."""
        assert self._topology is not None
        node_id = self._topology.nodes[source].id
        found = self._times.get(node_id, {}).get(epoch)
        if found is None and node_id not in self._cannot_answer:
            raise Unanswered(source)
        return found or (NO_WATERMARK, NO_WATERMARK)

    def _source_of(self, segment: Segment) -> str | None:
        node = self._topology.nodes.get(segment.nodes[0]) if self._topology is not None else None
        return node.id if node is not None and segment.is_source else None


def _missing_results(gap: Gap, from_us: int, to_us: int) -> MissingResults:
    return MissingResults(
        from_epoch=gap.after + 1,
        to_epoch=gap.before - 1,
        since_generation=gap.generation,
        from_time=_time(from_us),
        to_time=_time(to_us),
    )


def _time(us: int) -> str:
    """RFC 3339; empty if it is no time of the calendar, as before the first row."""
    try:
        text = datetime.fromtimestamp(us // 1_000_000, UTC).replace(microsecond=us % 1_000_000)
    except (ValueError, OverflowError, OSError):
        return ""
    return text.isoformat().replace("+00:00", "Z")
