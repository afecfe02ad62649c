"""A simulation for the coordinator's core: tasks' cores, a store in memory, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.checkpoints.sinks import assigned_sinks
from rekindle.coordinator.core.state_machine import Coordinator, Event
from rekindle.coordinator.model import (
    ApplyStatus,
    CollectGarbage,
    Effect,
    Generation,
    Pod,
    PollNow,
    ReadNewestManifest,
    ReportRestorePoint,
    StateMigration,
    StepDown,
    WriteManifest,
)
from rekindle.coordinator.tasks.graph import Graph, build_graph
from rekindle.protocol import EntryRef, PollRequest, SinkAssignment
from rekindle.report import report_json
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Slot, partition_of
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_generation
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build
from rekindle_testing.fixtures.simulated_task import SimulatedTask


class World:
    """Tasks, a store and one current coordinator (older ones may still run)."""

    def __init__(
        self,
        parts: Sequence[SimulatedSegment],
        interval_epochs: int = 4,
        lends: bool = False,
        replay_target: str | None = None,
    ) -> None:
        self.lends = lends  # whether tasks lend and borrow states
        self.generation = make_generation(
            parts, interval_epochs=interval_epochs, replay_target=replay_target
        )
        self.graph: Graph = build_graph(self.generation.topology)
        self.inputs = dict(self.graph.inputs)  # of older generations too
        self.interval_epochs = interval_epochs
        self.now = 100.0
        self.head = -1
        self.store: list[Manifest] = []
        # What is wrong with the state of each ("": nothing), and its chained digest.
        self.entries: dict[str, tuple[str, str]] = {}
        self.store_up = True
        self.tasks: dict[Slot, SimulatedTask] = {}
        self.incarnations: dict[Slot, int] = {}
        self.nodes: dict[Slot, str] = {}  # of slots whose pods' nodes are known
        self.fence = 0
        self.boots = 0  # of coordinators
        self.step_downs: list[str] = []
        self.reports: list[dict[str, Any]] = []  # as written to `status.dataPlane`
        self.zombie: Coordinator | None = None
        self.held: list[tuple[Coordinator, Effect]] = []
        self.hold_writes = False
        self.allow_migrations = False
        self.migrations: list[StateMigration] = []
        self.failed_to_start: set[Slot] = set()
        self.written: dict[tuple[Partition, SinkAssignment], int] = {}
        self.start_coordinator()

    # --- the cluster ---

    def start_task(self, slot: Slot) -> SimulatedTask:
        self.incarnations[slot] = self.incarnations.get(slot, 0) + 1
        self.tasks[slot] = SimulatedTask(
            slot, self.incarnations[slot], self.entries, self.interval_epochs
        )
        self.tasks[slot].can_lend = self.lends
        replicas = {s.id: s.replicas for s in self.generation.topology.segments}
        self.tasks[slot].reports_log = replicas.get(slot.segment) == 1
        self.list_pods()
        return self.tasks[slot]

    def start_all(self) -> None:
        for slot in self.generation.topology.slots():
            self.start_task(slot)

    def kill(self, slot: Slot) -> None:
        self.tasks.pop(slot, None)
        self.list_pods()

    def pods(self) -> tuple[Pod, ...]:
        return tuple(
            Pod(
                f"{s.key}-{t.incarnation}",
                s,
                t.incarnation,
                address(s),
                may_be_running=True,
                was_ready=s not in self.failed_to_start,
                node=self.nodes.get(s),
            )
            for s, t in self.tasks.items()
        )

    def list_pods(self) -> None:
        self.feed(lambda core, now: core.pods_listed(self.pods(), now))

    def restart_coordinator(self) -> None:
        """Kill -9 the coordinator's container; it starts again, with the same incarnation."""
        self.fence -= 1
        self.start_coordinator()

    def start_coordinator(self, keep_old_coordinator: bool = False) -> None:
        """Kill -9 the coordinator and start its next incarnation; the old one may still run."""
        if self.fence:
            self.zombie = self.coordinator if keep_old_coordinator else None
            if not keep_old_coordinator:
                self.held = []
        self.fence += 1
        self.boots += 1
        self.coordinator: Coordinator = Coordinator(self.fence, wall_s=0.0, started_ms=self.boots)
        self.feed(lambda core, now: core.generation_seen(self.generation, now))
        self.list_pods()

    # --- the coordinator's shell ---

    def feed(self, event: Event) -> None:
        self.perform(self.coordinator, event(self.coordinator, self.now))

    def perform(self, who: Coordinator, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case WriteManifest() if self.hold_writes:
                    self.held.append((who, effect))
                case WriteManifest(manifest=manifest, migrations=migrations):
                    assert self.allow_migrations or not migrations
                    self.migrations += migrations
                    self.write(who, manifest)
                case ReadNewestManifest():
                    self.read_manifest(who)
                case ApplyStatus() if who is self.coordinator:
                    self.reports.append(report_json(effect.report))
                case StepDown(reason=reason):
                    if who is self.zombie:
                        self.zombie = None
                    else:
                        self.step_downs.append(reason)
                case CollectGarbage() | PollNow() | ApplyStatus() | ReportRestorePoint():
                    pass

    def read_manifest(self, who: Coordinator) -> None:
        newest = self.store[-1] if self.store else None
        if self.store_up:
            self.perform(who, who.manifest_read(newest, self.now))
        else:
            self.perform(who, who.store_failed("down", self.now))

    def write(self, who: Coordinator, manifest: Manifest) -> None:
        if not self.store_up:
            self.perform(who, who.store_failed("down", self.now))
        elif manifest.seq != len(self.store):
            self.perform(who, who.manifest_race_lost(self.now))
        else:
            self.store.append(manifest)
            assert not self.unwritten()
            self.perform(who, who.manifest_written(manifest, self.now))

    def release_writes(self) -> None:
        held, self.held = self.held, []
        for who, effect in held:
            assert isinstance(effect, WriteManifest)
            self.write(who, effect.manifest)

    def poll(self, slot: Slot, who: Coordinator | None = None) -> None:
        who = who or self.coordinator
        poll, task = who.poll_for(slot), self.tasks.get(slot)
        if poll is None:
            return
        response = None
        if task is not None and not task.frozen:
            task.now = self.now
            response = task.poll(poll)
        incarnation = poll.task.incarnation
        if response is None:
            self.perform(who, who.poll_failed(slot, incarnation, "silence", self.now))
        else:
            for sink in response.sinks:
                key = (partition_of(slot), sink.assigned)
                self.written[key] = max(sink.durable, self.written.get(key, NO_EPOCH))
            self.perform(who, who.poll_answered(slot, incarnation, response, self.now))

    def poll_round(self, seconds: float = 0.25) -> None:
        """One polling interval."""
        self.now += seconds
        for slot in list(self.tasks):
            self.poll(slot)
        self.tick()

    def tick(self) -> None:
        self.feed(Coordinator.woken)

    def answer(self, task: SimulatedTask) -> None:
        """The coordinator gets the response of a task that it has not polled."""
        response = task.response()
        self.feed(lambda core, now: core.poll_answered(task.slot, task.incarnation, response, now))

    def change_generation(self, generation: Generation, keep_old_pods: bool = False) -> None:
        """A new ConfigMap; pods of removed segments are deleted, unless `keep_old_pods`."""
        self.generation = generation
        self.graph = build_graph(generation.topology)
        self.inputs |= self.graph.inputs
        slots = set(generation.topology.slots())
        self.tasks = {s: t for s, t in self.tasks.items() if keep_old_pods or s in slots}
        self.list_pods()
        self.feed(lambda core, now: core.generation_seen(generation, now))

    def complete_checkpoint(self, who: Coordinator) -> None:
        """Report a fake checkpoint of all tasks to the coordinator `who`."""
        for task in self.tasks.values():
            done = EntryRef(
                epoch=task.state_epoch, object=f"made-up-{task.slot.key}", digest="f", bytes=1
            )
            who.committer.entries_saved(task.slot, [done], done.epoch)
        self.perform(who, who.woken(self.now))

    def poll_rounds(self, count: int) -> None:
        for _ in range(count):
            self.poll_round()

    # --- the data plane ---

    def release_epochs(self, count: int = 1) -> None:
        self.head += count

    def work(self, slot: Slot, epochs: int) -> None:
        """Let a task process at most so many epochs of its inputs."""
        task = self.tasks[slot]
        if task.frozen:
            return
        task.now = self.now
        task.engine_started()
        task.head_advanced(self.released_to(task))
        task.wake()
        for _ in range(epochs):
            if not task.waits_for_epochs or not self.can_take(task, task.state_epoch + 1):
                return
            task.take(self.read(task, task.state_epoch + 1))

    def released_to(self, task: SimulatedTask) -> int:
        """The newest epoch that time, or its upstreams, have released to a task."""
        inputs = self.inputs[partition_of(task.slot)]
        newest = [max((t.log_last for t in self.serving(i)), default=-1) for i in inputs]
        return min([self.head, *newest])

    def can_take(self, task: SimulatedTask, epoch: int) -> bool:
        inputs = self.inputs[partition_of(task.slot)]
        if not inputs:
            return epoch <= self.head
        return all(self.readers_choice(task, source, epoch) is not None for source in inputs)

    def read(self, task: SimulatedTask, epoch: int) -> list[str]:
        """The digests of an epoch of a task's inputs, from the replicas that it reads."""
        inputs = self.inputs[partition_of(task.slot)]
        chosen = [self.readers_choice(task, source, epoch) for source in inputs]
        return [peer.logged.get(epoch, f"d{epoch}") for peer in chosen if peer is not None]

    def readers_choice(
        self, task: SimulatedTask, source: Partition, epoch: int
    ) -> SimulatedTask | None:
        """The replica that a task reads: the first of its routes that has the epoch. It reads
        nothing without a route for this stream."""
        having = [t for t in self.serving(source) if t.log_base <= epoch <= t.log_last]
        given = task.last_poll.upstreams if task.last_poll is not None else ()
        name = self.graph.streams.get(source.segment)
        routes = [u for u in given if (u.stream, u.partition) == (name, source.index)]
        if not routes:
            return next(iter(having), None)
        order = [e.address.rpartition(":")[0] for u in routes for e in u.endpoints]
        having = [t for t in having if address(t.slot) in order]
        return min(having, key=lambda t: order.index(address(t.slot)), default=None)

    def serving(self, partition: Partition) -> list[SimulatedTask]:
        return [
            t
            for t in self.tasks.values()
            if partition_of(t.slot) == partition and t.phase in ("Restoring", "CatchingUp", "Live")
        ]

    def run_epochs(self, epochs: int) -> None:
        """Run without failures: each epoch takes two polling intervals."""
        self.run_while_stuck(None, epochs)

    def run_while_stuck(self, stuck: Slot | None, epochs: int) -> None:
        """Like `run_epochs`, while one task responds but does nothing."""
        segments = list(dict.fromkeys(p.segment for p in self.inputs))
        for _ in range(epochs):
            self.release_epochs()
            for _ in range(2):
                for slot in sorted(self.tasks, key=lambda s: segments.index(s.segment)):
                    if slot != stuck:
                        self.work(slot, 8)
                self.poll_round(0.5)

    # --- I5 ---

    def undeliverable_epochs(self) -> list[str]:
        """Epochs that a consumer may still need and that no task can deliver any more."""
        found: list[str] = []
        newest = self.store[-1] if self.store else None
        if newest is None:
            return found
        for partition in self.graph.partitions:
            positions = [oldest_epoch(newest.entries[partition.key])]
            positions += [t.state_epoch for t in self.serving(partition)]
            for source in self.graph.inputs[partition]:
                # Others leave to these what is not in their logs.
                complete = [t for t in self.serving(source) if t.core.status.may_be_live]
                bases = [t.log_base - 1 for t in complete]
                bases.append(oldest_epoch(newest.entries[source.key]))
                if max(bases) > min(positions):
                    found.append(
                        f"{partition.key} at {positions} cannot read {source.key}: {bases}"
                    )
        return found

    # --- I2: a task restored from an entry does not write its epochs again ---

    def unwritten(self) -> list[str]:
        """Sinks without epochs that are written according to the newest manifest."""
        newest = self.store[-1]
        if newest.generation != self.generation.number:
            return []
        return [
            f"{partition.key} is committed at {newest.entries[partition.key][0].epoch}: {sink}"
            for partition in self.graph.partitions
            for sink in assigned_sinks(self.graph, newest, partition.segment)
            if self._written_by(partition, sink) < newest.entries[partition.key][0].epoch
        ]

    def _written_by(self, partition: Partition, sink: SinkAssignment) -> int:
        found = (
            e
            for (p, s), e in self.written.items()
            if p == partition and s.writes_same_output_as(sink)
        )
        return max(found, default=sink.from_epoch - 1)


def oldest_epoch(refs: tuple[EntryRef, ...]) -> int:
    return refs[-1].epoch


def address(slot: Slot) -> str:
    return f"{slot.segment}.{slot.partition}.{slot.replica}"


DIAMOND = (
    SimulatedSegment("src", replicas=2),
    SimulatedSegment("left", ("src",), partitions=2, replicas=2, query=True),
    SimulatedSegment("right", ("src",)),
    SimulatedSegment("both", ("left", "right"), query=True),
)


@copy_of_one_build
def started(epochs: int = 10, lends: bool = False) -> World:
    world = World(DIAMOND, lends=lends)
    world.start_all()
    world.run_epochs(epochs)
    return world


def next_polls(world: World) -> dict[Slot, PollRequest]:
    found = {s: world.coordinator.poll_for(s) for s in world.tasks}
    return {s: p for s, p in found.items() if p is not None}
