"""The desired state that a poll carries: complete, level-triggered (rekindle.protocol). Pure.

Design: docs/design/task.md#passive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.agreement.containment import Containment
from rekindle.coordinator.checkpoints.new_generation import checkpoint_epoch_at_or_after
from rekindle.coordinator.checkpoints.sinks import assigned_sinks, durable_epoch
from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.lending import may_be_live
from rekindle.coordinator.tasks.membership import Task, TaskPredicate
from rekindle.coordinator.tasks.routes import partner, saver, upstreams
from rekindle.protocol import Partner, PollRequest, RestorePoint, TaskPhase, TaskRef
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition


def ask_only(topology: str, fence: int, boot: str, generation: int, task: Task) -> PollRequest:
    """A poll without desired state: it only requests the task's progress."""
    ref = TaskRef.of(task.slot, task.pod.incarnation)
    return PollRequest(
        topology=topology,
        fence=fence,
        coordinator_boot=boot,
        generation=generation,
        task=ref,
        task_boot=task.response.boot_id if task.response is not None else "",
        ask_only=True,
    )


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Inputs of the desired state of all tasks: this coordinator's newest manifest, the serving
    replicas, the floors of streams, the containment, and which entries must not be committed,
    referred to or restored (`is_refused`). `lacks_entries`: whether a task's partition has had no
    new entry for too long, so that all its replicas save. `newest_entry`: the epoch of the newest
    entry of the polled task's partition; `next_checkpoint`: the checkpoint epoch from which on that
    saves the next one."""

    graph: Graph
    manifest: Manifest
    replicas: dict[Partition, list[Task]]
    floors: Mapping[Partition, int]
    is_suspected: TaskPredicate
    lacks_entries: Callable[[Task], bool]
    containment: Containment
    is_refused: Callable[[str | None], bool]
    stabilizes_in_turn: bool  # one replica after another
    checkpoint_interval_epochs: int
    newest_entry: int
    next_checkpoint: int

    def fields_of(self, task: Task) -> dict[str, object]:
        """The fields of `PollRequest` for a task, except those that `ask_only` sets."""
        committed = self.manifest.entries[task.partition.key][0]
        replicas = self.replicas.get(task.partition, [])
        waits = task.phase == TaskPhase.WAITING
        # Others lack epochs that may be needed: they take over nothing yet.
        complete = may_be_live(task, self.manifest)
        savers = [replica for replica in replicas if may_be_live(replica, self.manifest)]
        sinks = assigned_sinks(self.graph, self.manifest, task.partition.segment)
        return {
            "ask_only": False,
            # Only while it waits: its next boot may take it, if its release ignores `task_boot`.
            "restore": task.assigned if waits else None,
            "upstreams": upstreams(task.slot, self.graph, self.replicas, self.is_suspected),
            "sinks": sinks if complete else (),
            "floor": self._floor(task),
            # Without a serving replica all save, from the first checkpoint epoch on.
            "saver": complete
            and self._checkpoint_is_due(task)
            and (saver(savers, self.is_suspected) in (task.slot, None) or self.lacks_entries(task)),
            "may_be_live": complete,
            "committed": RestorePoint(epoch=committed.epoch, object=committed.object),
            "refused": self._refused(task, committed.object),
            "sinks_through": self.containment.sinks_through(task.slot),
            "digests_of": self.containment.disputed_epochs(task.partition),
            "disputed_digest": self.containment.disputed_digest(task.partition),
            "partner": self._partner(task, replicas),
            "recompute": self.containment.boot_to_restart(task.slot),
            "discard_log": waits and self.containment.discards_log(task.slot),
            "compare_files": waits
            and self.containment.may_have_wrong_files(task.partition, self.graph),
        }

    def _checkpoint_is_due(self, task: Task) -> bool:
        """Whether the task's next checkpoint epoch is one that partitions save. A task that is
        behind saves what its partition has: whether that is the same shows whether it is right."""
        reached = task.response.stable_epoch if task.response is not None else NO_EPOCH
        following = checkpoint_epoch_at_or_after(reached + 1, self.checkpoint_interval_epochs)
        return following <= self.newest_entry or following >= self.next_checkpoint

    def _partner(self, task: Task, replicas: list[Task]) -> Partner | None:
        return partner(task.slot, replicas, self.is_suspected) if self.stabilizes_in_turn else None

    def _refused(self, task: Task, committed: str | None) -> tuple[str, ...]:
        saved = task.response.checkpoints if task.response is not None else ()
        known = (committed, *(done.object for done in saved))
        return tuple(name for name in known if name is not None and self.is_refused(name))

    def _floor(self, task: Task) -> int | None:
        """The stream's floor, but not above the epochs that this task's own sinks have written."""
        floor = self.floors.get(task.partition)
        if floor is None or task.response is None:
            return None
        for assigned in assigned_sinks(self.graph, self.manifest, task.partition.segment):
            floor = min(floor, durable_epoch(task.response, assigned))
        return floor if floor >= 0 else None
