"""The first manifest of a generation: where its new partitions and queries start. Pure.

It is committed before any task gets its restore point, so that all replicas and all later
coordinators use the same one. Operators with the same id keep their state, even if they are fused
into other segments; new ones start empty at a checkpoint epoch that no task has reached.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rekindle.checkpoints.manifest import Gap, Manifest, QueryStart
from rekindle.coordinator.checkpoints.retention import Refs, oldest
from rekindle.coordinator.model import Generation, StateMigration
from rekindle.coordinator.tasks.graph import Graph
from rekindle.objects import to_json
from rekindle.protocol import EntryRef
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Segment
from rekindle.topology.spec import QuerySpec

EMPTY_DIGEST = ""
_LEAD_TIME_S = 2.0
"""Time to write the first manifest and to poll the tasks that continue."""
_MAX_GAPS = 8  # of each query; older ones are forgotten

Written = Mapping[tuple[str, str], Mapping[str, int]]
"""By query and definition: for each partition, by its key, the newest epoch that its sink was seen
to have."""


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """`entries`: of each partition, newest first. `begun`: see `Manifest`."""

    entries: Mapping[str, Refs]
    queries: Mapping[str, QueryStart]
    migrations: tuple[StateMigration, ...]
    problems: tuple[str, ...]
    begun: Mapping[str, int] = field(default_factory=dict)


def checkpoint_epoch_at_or_after(epoch: int, interval_epochs: int) -> int:
    """The first checkpoint epoch that is not before `epoch`."""
    return -(-(epoch + 1) // interval_epochs) * interval_epochs - 1


def empty_entry(epoch: int) -> EntryRef:
    """The entry of empty state after `epoch`."""
    return EntryRef(epoch=epoch, object=None, digest=EMPTY_DIGEST)


def definition_of(query: QuerySpec, segment: Segment) -> str:
    """A hash that changes if the query computes, reads or writes something else."""
    return _definition(query.input_and_sink, segment.stream)


def _definition(identity: str, stream: str) -> str:
    return hashlib.blake2b(to_json([identity, stream]), digest_size=8).hexdigest()


def query_start(query: QuerySpec, generation: Generation, epoch: int) -> QueryStart:
    definition = definition_of(query, generation.topology.queried_segment(query))
    return QueryStart(epoch, query.input_and_sink, definition, generation.number)


def start_generation(
    previous: Manifest | None,
    generation: Generation,
    graph: Graph,
    head_epoch: int,
    written: Written | None = None,
) -> GenerationStart:
    """`head_epoch`: the newest epoch that any task knows."""
    if previous is None:
        return GenerationStart(
            entries={p.key: (empty_entry(NO_EPOCH),) for p in graph.partitions},
            queries={
                q.name: query_start(q, generation, NO_EPOCH + 1)
                for q in generation.topology.spec.queries
            },
            migrations=(),
            problems=(),
        )
    # Ahead of all tasks, so that a sink that is taken from a task has not written beyond it.
    ahead = max(head_epoch, previous.epoch) + math.ceil(_LEAD_TIME_S / generation.interval_s)
    start = checkpoint_epoch_at_or_after(ahead, generation.checkpoint_interval_epochs)
    return _Starter(previous, generation, graph, start, written or {}).run()


class _Starter:
    def __init__(
        self,
        previous: Manifest,
        generation: Generation,
        graph: Graph,
        start: int,
        written: Written,
    ) -> None:
        self._previous = previous
        self._generation = generation
        self._graph = graph
        self._start = start
        self._written = written
        self._entries: dict[str, Refs] = {}
        self._begun: dict[str, int] = {}
        self._migrations: list[StateMigration] = []
        self._problems: list[str] = []

    def run(self) -> GenerationStart:
        for partition in self._graph.partitions:
            refs = self._previous.entries.get(partition.key)
            self._entries[partition.key] = self._readable_entries(
                partition, refs or self._first_entries(partition)
            )
        return GenerationStart(
            entries=self._entries,
            queries=self._query_starts(),
            migrations=tuple(m for m in self._migrations if self._keeps(m)),
            problems=tuple(dict.fromkeys(self._problems)),  # once for all partitions of a source
            begun=self._all_begun(),
        )

    def _all_begun(self) -> dict[str, int]:
        """Of all operators of this generation, also those that began with an earlier one."""
        segments = self._generation.topology.segments
        ids = {o for s in segments for o in self._generation.operator_ids.get(s.id, ())}
        begun = {**self._previous.begun, **self._begun}
        return {operator: epoch for operator, epoch in begun.items() if operator in ids}

    def _begin(self, operators: Iterable[str], epoch: int) -> None:
        """These operators have no state of the epochs through this one."""
        for operator in operators:
            if epoch != NO_EPOCH:
                self._begun[operator] = max(epoch, self._begun.get(operator, epoch))

    def _keeps(self, migration: StateMigration) -> bool:
        return any(r.epoch == migration.epoch for r in self._entries[migration.partition.key])

    def _first_entries(self, partition: Partition) -> Refs:
        predecessors = self._predecessors(partition)
        operators = self._generation.operator_ids[partition.segment]
        if predecessors:
            refs = self._migrate(partition, predecessors)
            if refs:
                kept = {o for key in predecessors for o in self._operators_of(key)}
                self._begin((o for o in operators if o not in kept), refs[0].epoch)
                return refs
            names = ", ".join(predecessors)
            self._problems.append(
                f"{partition.key} starts empty at epoch {self._start + 1}: {names}, which have the "
                "state of its operators, have no checkpoint epoch in common"
            )
        elif not self._graph.inputs[partition]:
            source = self._generation.topology.segment(partition.segment).nodes[0]
            self._problems.append(
                f"source {source} begins with epoch {self._start + 1}; rows of its earlier epochs "
                "are not read"
            )
        input_epochs = [self._entries[i.key][0].epoch for i in self._graph.inputs[partition]]
        epoch = max(self._start, *input_epochs) if input_epochs else self._start
        self._begin(operators, epoch)
        return (empty_entry(epoch),)

    def _readable_entries(self, partition: Partition, refs: Refs) -> Refs:
        """Those of the entries from which the partition can still read its inputs, even if the
        operators of its inputs are fused into other segments. An input whose entries did not change
        has all that is needed in its log, even if older entries were lost before."""
        changed = [
            self._entries[i.key]
            for i in self._graph.inputs[partition]
            if self._entries[i.key] != self._previous.entries.get(i.key)
        ]
        readable_after = max((oldest(refs).epoch for refs in changed), default=NO_EPOCH)
        kept = tuple(ref for ref in refs if ref.epoch >= readable_after)
        if kept:
            return kept
        self._problems.append(
            f"{partition.key} loses its state and starts empty at epoch {readable_after + 1}: the "
            "operators of its inputs are fused into other segments, which do not have the epochs "
            f"after {refs[0].epoch}; if it stalls, delete its pods"
        )
        self._begin(self._generation.operator_ids[partition.segment], readable_after)
        return (empty_entry(readable_after),)

    def _operators_of(self, key: str) -> tuple[str, ...]:
        """Of the segment of a partition."""
        return self._generation.operator_ids.get(key.rpartition("/")[0], ())

    def _predecessors(self, partition: Partition) -> dict[str, Refs]:
        """Entries of partitions of older segments that had some of its operators."""
        operator_ids = self._generation.operator_ids
        mine = set(operator_ids.get(partition.segment, ()))
        found: dict[str, Refs] = {}
        for key, refs in self._previous.entries.items():
            segment, _, index = key.rpartition("/")
            if int(index) == partition.index and mine & set(operator_ids.get(segment, ())):
                found[key] = refs
        return found

    def _migrate(self, partition: Partition, predecessors: Mapping[str, Refs]) -> Refs:
        operators = self._generation.operator_ids[partition.segment]
        # A predecessor that has never started has no state at any epoch.
        with_state = [refs for refs in predecessors.values() if any(ref.object for ref in refs)]
        by_epoch = [
            {ref.epoch: ref for ref in refs} for refs in with_state or predecessors.values()
        ]
        common = set.intersection(*(set(refs) for refs in by_epoch))
        for refs in predecessors.values():
            if refs not in with_state:  # empty up to its start; later epochs are not computed yet
                common = {epoch for epoch in common if epoch <= refs[0].epoch}
        kept: list[EntryRef] = []
        for epoch in sorted(common, reverse=True):
            objects = [refs[epoch].object for refs in by_epoch]
            existing = tuple(o for o in objects if o is not None)
            if existing:
                self._migrations.append(StateMigration(partition, epoch, operators, existing))
            kept.append(empty_entry(epoch))
        return tuple(kept)

    def _query_starts(self) -> dict[str, QueryStart]:
        topology = self._generation.topology
        return {
            q.name: self._with_gap(
                self._previous.queries.get(q.name),
                self._query_start(q, topology.queried_segment(q)),
                q.name,
            )
            for q in topology.spec.queries
        }

    def _with_gap(self, known: QueryStart | None, start: QueryStart, name: str) -> QueryStart:
        """The start with the epochs between what the earlier definition certainly wrote and it. If
        that one wrote nothing, the gap before it goes on."""
        if known is None or (known.epoch, known.definition or start.definition) == (
            start.epoch,
            start.definition,
        ):
            return start
        after, gaps = max(self._written_through(name, known), known.epoch - 1), known.gaps
        if after < known.epoch and gaps:
            after, gaps = gaps[-1].after, gaps[:-1]
        gap = Gap(after, start.epoch, self._generation.number)
        return replace(start, gaps=(*gaps, gap)[-_MAX_GAPS:])

    def _written_through(self, name: str, known: QueryStart) -> int:
        """The newest epoch that all partitions of an earlier definition have certainly written:
        that of a checkpoint, or one that a task has reported."""
        seen = self._written.get((name, known.definition), {})
        through = [
            max(refs[0].epoch, seen.get(key, NO_EPOCH))
            for key, refs in self._previous.entries.items()
            if (operators := self._operators_of(key))
            and _definition(known.identity, operators[-1]) == known.definition
        ]
        return min(through, default=NO_EPOCH)

    def _query_start(self, query: QuerySpec, segment: Segment) -> QueryStart:
        partitions = [Partition(segment.id, i) for i in range(segment.partitions)]
        new_partitions = [p for p in partitions if p.key not in self._previous.entries]
        state_is_migrated = all(self._predecessors(p) for p in new_partitions)
        known = self._previous.queries.get(query.name)
        definition = definition_of(query, segment)
        if known is not None and known.identity == query.input_and_sink and state_is_migrated:
            if known.definition == definition:
                return known
            if not known.definition:  # written by a release without definitions
                return replace(known, definition=definition)
        if new_partitions and not state_is_migrated:
            first = max(self._entries[p.key][0].epoch for p in partitions) + 1
            return query_start(query, self._generation, first)
        return query_start(query, self._generation, self._start + 1)
