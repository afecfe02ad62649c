"""Which checkpoint epochs are used. Pure.

The checkpoint epochs are those that end a multiple of `checkpoint.interval`: every task knows them.
Without a `replayTarget` all of them are used. With one, a checkpoint epoch is left out as long as
no partition would have to replay for longer than its target if it restarted before the next one. So
state is saved as rarely as the targets allow.

All partitions save at the same epochs, also if only one of them needs it: a partition is restored
from an entry at or before the oldest one of its consumers, so saving at different epochs would make
the replays of its inputs longer. One that is behind the others also saves when it alone would need
it.

Paper: CEC (Sebepou and Magoutis 2011), section III-A: the target U of what is replayed; a part of
the state is all of it.
Design: docs/design/checkpoints.md#how-often.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.checkpoints.new_generation import checkpoint_epoch_at_or_after
from rekindle.coordinator.model import Generation
from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.lending import may_be_live
from rekindle.coordinator.tasks.membership import Task
from rekindle.protocol import MAX_INTERVALS
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Segment, Topology

LOG_SHARE = 0.5
"""A checkpoint is due if the log of a task has more than this share of its budget: beyond the
budget, epochs would be written to the store, or have to be computed again."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a partition that runs would compute again if it restarted: the epochs after `entry`, its
    newest saved one, each in `epoch_s` (None: not known). `target_s`: how long that may take
    (infinite: any time; None: no operator of the topology has a target)."""

    entry: int
    epoch_s: float | None
    target_s: float | None


def next_checkpoint(
    replays: Collection[Replay], interval_epochs: int, *, wanted: bool = False
) -> int:
    """The first checkpoint epoch at which all partitions save. `wanted`: something else than a
    replay needs the next one."""
    if not replays:
        return NO_EPOCH
    oldest = min(replay.entry for replay in replays)
    first = checkpoint_epoch_at_or_after(oldest + 1, interval_epochs)
    if wanted:
        return first
    last = min(replay.entry + _max_epochs(replay, interval_epochs) for replay in replays)
    return max(first, (last + 1) // interval_epochs * interval_epochs - 1)


def _max_epochs(replay: Replay, interval_epochs: int) -> int:
    limit = MAX_INTERVALS * interval_epochs
    if replay.target_s is None:
        return 0
    if replay.target_s == math.inf:
        return limit
    if replay.epoch_s is None:
        return 0
    return int(min(limit, replay.target_s / max(replay.epoch_s, 1e-9)))


def replay_target_s(topology: Topology, segment: Segment) -> float | None:
    """The shortest target of the segment's operators, or else that of the topology."""
    targets = [
        operator.checkpoint.replay_target
        for operator in topology.spec.operators
        if operator.name in segment.nodes and operator.checkpoint.replay_target is not None
    ]
    target = min(targets, default=topology.spec.checkpoint.replay_target)
    return target / 1e6 if target is not None else None


def replays_of(
    generation: Generation,
    replicas: Mapping[Partition, list[Task]],
    entries: Mapping[Partition, int],
) -> dict[Partition, Replay]:
    """Of the partitions in `entries`, which has the epochs of their newest saved entries. A
    partition replays as fast as its slowest replica."""
    topology = generation.topology
    targets = {s.id: replay_target_s(topology, s) for s in topology.segments}
    without = None if all(target is None for target in targets.values()) else math.inf
    found = {}
    for partition, entry in entries.items():
        tasks, target = replicas.get(partition, ()), targets.get(partition.segment)
        epoch_s = [t.response.epoch_mean_s for t in tasks if t.response is not None]
        known = bool(epoch_s) and min(epoch_s) > 0
        target_s = without if target is None else target
        found[partition] = Replay(entry, max(epoch_s) if known else None, target_s)
    return found


def with_consumers(replays: Mapping[Partition, Replay], graph: Graph) -> Mapping[Partition, Replay]:
    """What the partitions in `replays` compute again, if consumers among them have older entries: a
    partition is restored from an entry at or before that of each of its consumers. So once some
    partitions have saved a checkpoint epoch, it stays due until their consumers have."""
    found: dict[Partition, Replay] = {}
    for partition in reversed(graph.partitions):
        if (replay := replays.get(partition)) is None:
            continue
        consumers = [found[c].entry for c in graph.consumers[partition] if c in found]
        found[partition] = replace(replay, entry=min([replay.entry, *consumers]))
    return found


def wants_checkpoint(tasks: Iterable[Task], generation: Generation, manifest: Manifest) -> bool:
    """Whether something needs the next checkpoint epoch: a replica that began with a lent state,
    and is not Live before its partition has a newer entry; a log that would exceed its budget."""
    limit = LOG_SHARE * generation.topology.spec.log_budget
    return any(
        (task.response is not None and task.response.log_bytes > limit)
        or not may_be_live(task, manifest)
        for task in tasks
    )
