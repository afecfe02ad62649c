"""Holds and floors: which epochs streams may drop, and what a manifest must keep (I5).

A consumer's *hold* is the epoch after which it may still need its inputs: the oldest entry that the
newest manifest keeps for it, or the position of one of its incarnations, if that is further back. A
stream's *floor* is the minimum of its consumers' holds. Besides the newest entry of a partition, a
manifest keeps for every hold of a consumer the newest entry at or before the hold: from that entry
the partition can compute again what the consumer needs. Pure.

Design: docs/design/coordinator.md#retention.
Paper: Progressive recovery (Su and Zhou 2017), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.membership import Task
from rekindle.protocol import EntryRef, TaskPhase
from rekindle.topology.model import Partition

Refs = tuple[EntryRef, ...]
"""Of one partition, newest first."""


@dataclass(frozen=True, slots=True)
class Progress:
    """For each partition: positions of its incarnations, epochs of entries that they load, those
    through which their logs are in the store, and whether one may run with unknown progress."""

    positions: Mapping[Partition, tuple[int, ...]] = field(default_factory=dict)
    restoring: Mapping[Partition, tuple[int, ...]] = field(default_factory=dict)
    shipped: Mapping[Partition, tuple[int, ...]] = field(default_factory=dict)
    unknown: frozenset[Partition] = frozenset()

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Self:
        positions: dict[Partition, tuple[int, ...]] = {}
        restoring: dict[Partition, tuple[int, ...]] = {}
        shipped: dict[Partition, tuple[int, ...]] = {}
        unknown: set[Partition] = set()
        for task in tasks:
            partition = task.partition
            if task.unknown:  # it may run, and has not responded
                unknown.add(partition)
            elif task.position is not None:
                positions[partition] = (*positions.get(partition, ()), task.position)
                of_task = task.response.log_shipped if task.response is not None else ()
                shipped[partition] = (*shipped.get(partition, ()), *of_task)
                # Before it has started, its position is its restore point.
                starts = task.phase in (TaskPhase.WAITING, TaskPhase.RESTORING)
                if starts and task.lent_from is None:
                    restoring[partition] = (*restoring.get(partition, ()), task.position)
        return cls(positions, restoring, shipped, frozenset(unknown))


def oldest(refs: Refs) -> EntryRef:
    return refs[-1]


def restore_entry(refs: Refs, held_log: tuple[int, int] | None) -> EntryRef:
    """The entry from which a task computes again all that its readers may need: the oldest one. If
    its log has that (`held_log`: the first and the last epoch), the newest one that the log
    reaches: the log serves those who are behind."""
    if held_log is None or held_log[0] > oldest(refs).epoch + 1:
        return oldest(refs)
    return next((ref for ref in refs if ref.epoch <= held_log[1]), oldest(refs))


def hold(partition: Partition, manifest: Manifest, progress: Progress) -> int | None:
    """The epoch, or None if it is unknown: then its inputs have to keep everything."""
    refs = manifest.entries.get(partition.key)
    if not refs or partition in progress.unknown:
        return None
    return min((oldest(refs).epoch, *progress.positions.get(partition, ())))


def floors(graph: Graph, manifest: Manifest, progress: Progress) -> dict[Partition, int]:
    """The floor of each partition's stream; absent if everything must be kept."""
    holds = {p: hold(p, manifest, progress) for p in graph.partitions}
    found: dict[Partition, int] = {}
    for partition in graph.partitions:
        # If only sinks read a stream, its own entry is the hold: sinks have all epochs up to it.
        wanted = [holds[c] for c in graph.consumers[partition]] or [holds[partition]]
        known = [h for h in wanted if h is not None]
        if len(known) == len(wanted):
            found[partition] = min(known)
    return found


def keep_entries(
    graph: Graph,
    available: Mapping[Partition, Refs],
    previous: Mapping[str, Refs],
    progress: Progress,
) -> dict[str, Refs]:
    """Choose the entries of the next manifest from `available` (newest first, with `previous`).

    Consumers are processed first, so that their entries pin entries of their inputs, up to the
    sources. If an incarnation of a consumer may run with unknown progress, its inputs keep all
    their entries.
    """
    kept: dict[str, Refs] = {}
    for partition in reversed(graph.partitions):
        refs = available[partition]
        wanted = {refs[0]}
        wanted |= {_at_or_before(refs, e) for e in progress.restoring.get(partition, ())}
        for consumer in graph.consumers[partition]:
            epochs = {ref.epoch for ref in kept[consumer.key]}
            # What a position at or beyond the newest entry needs is kept for that entry.
            epochs |= {p for p in progress.positions.get(consumer, ()) if p < max(epochs)}
            wanted |= {_at_or_before(refs, e) for e in epochs}
            if consumer in progress.unknown:
                wanted |= {r for r in previous.get(partition.key, ()) if r in refs}
        # Logs that are in the store reach to these, so they spare a replay from the oldest one.
        spared = {_at_or_before(refs, e) for e in progress.shipped.get(partition, ())}
        if partition not in progress.positions:  # its successor may need them
            spared |= {r for r in previous.get(partition.key, ()) if r in refs}
        wanted |= {r for r in spared if r.epoch > min(w.epoch for w in wanted)}
        kept[partition.key] = tuple(sorted(wanted, key=lambda r: -r.epoch))
    return kept


def _at_or_before(refs: Refs, epoch: int) -> EntryRef:
    return next((ref for ref in refs if ref.epoch <= epoch), refs[-1])
