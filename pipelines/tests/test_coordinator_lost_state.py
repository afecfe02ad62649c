"""Somebody deletes what entries need: no such entry is committed once that is known, and all
recovers as long as each partition has a replica.

Random histories of losses and garbage collections, of replicas that die, freeze and come back, of
slow sinks, and of coordinators that are replaced. Replica 0 of each partition may freeze, but does
not end: what no replica has any more cannot be recovered.

Design: docs/design/checkpoints.md#what-others-delete.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
from coordinator_world import World
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.model import (
    CollectGarbage,
    Effect,
    WriteManifest,
)
from rekindle.protocol import EntryRef, TaskPhase
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build
from rekindle_testing.fixtures.simulated_task import SimulatedTask

pytestmark = pytest.mark.simulated

PARTS = (
    SimulatedSegment("src", replicas=2),
    SimulatedSegment("mid", ("src",), replicas=2, query=True),
    SimulatedSegment("end", ("mid",), replicas=2, query=True),
)


class LossyWorld(World):
    """An entry needs its own object and those of the entry that its save has reused. `lost`: the
    entries whose own objects are gone; garbage collection, and a commit, find what needs them.
    `known`: what the newest garbage collection has found. `reused`: entry -> the one reused."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.known: set[str] = set()
        self.full_scans: list[bool] = []
        self.in_use: list[frozenset[str]] = []
        self.reported_lost: list[frozenset[str]] = []
        self.reused: dict[str, str | None] = {}
        super().__init__(PARTS)

    def start_task(self, slot: Slot) -> SimulatedTask:
        self.incarnations[slot] = self.incarnations.get(slot, 0) + 1
        task = self.tasks[slot] = SimulatedTask(
            slot,
            self.incarnations[slot],
            self.entries,
            self.interval_epochs,
            save=partial(self.save, slot),
        )
        task.is_lost, task.reused = self.is_lost, self.reused
        self.list_pods()
        return task

    def save(self, slot: Slot, state: TaskState) -> EntryRef:
        name = f"{slot.key}@{state.epoch}-{len(self.entries)}"
        self.entries[name] = ("", state.chained_digest)
        return EntryRef(epoch=state.epoch, object=name, digest=f"s{state.epoch}", bytes=1)

    def is_lost(self, entry: str) -> bool:
        needed: str | None = entry
        while needed is not None and needed not in self.lost:
            needed = self.reused.get(needed)
        return needed is not None

    def start_coordinator(self, keep_old_coordinator: bool = False) -> None:
        self.known = set()
        super().start_coordinator(keep_old_coordinator)

    def perform(self, who: Coordinator, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case WriteManifest(new_entries=new) if refused := tuple(filter(self.is_lost, new)):
                    self.perform(who, who.entries_refused(refused, "state is missing", self.now))
                case CollectGarbage(
                    full_scan=full_scan, in_use=in_use, reported_lost=reported_lost
                ):
                    self.full_scans.append(full_scan)
                    self.in_use.append(in_use)
                    self.reported_lost.append(reported_lost)
                    self.collect_garbage()
                case _:
                    super().perform(who, [effect])

    def write(self, who: Coordinator, manifest: Manifest) -> None:
        before = self.store[-1].entries if self.store else {}
        for key, refs in manifest.entries.items():
            if refs == before.get(key) and manifest.fence != self.store[-1].fence:
                continue  # the first manifest of a coordinator takes over what there is
            if broken := {r.object for r in refs} & self.known:
                assert {r.object for r in before[key]} <= self.known, (key, broken)
        super().write(who, manifest)

    def collect_garbage(self) -> None:
        self.known = set(filter(self.is_lost, self.needed()))
        known = dict.fromkeys(self.known, "state is missing")
        self.feed(lambda core, now: core.garbage_collected(None, known, now))

    def needed(self) -> set[str]:
        """Entries of the newest manifest, and those that may be committed."""
        refs = [r for refs in self.store[-1].entries.values() for r in refs]
        saved = [d.object or "" for t in self.tasks.values() for d in t.response().checkpoints]
        return {r.object for r in refs if r.object} | set(saved)

    def lose(self, number: int) -> None:
        names = {*self.needed(), *(self.reused.get(name) for name in self.needed())}
        if left := sorted(name for name in names - self.lost if name is not None):
            self.lost.add(left[number % len(left)])

    def lose_all(self) -> None:
        self.lost |= self.needed()


@copy_of_one_build
def started() -> LossyWorld:
    world = LossyWorld()
    world.start_all()
    world.run_epochs(9)
    return world


ACTIONS = st.sampled_from(
    ["run"] * 6
    + ["lose", "lose", "lose", "lose_all", "collect_garbage", "collect_garbage", "round"]
    + ["kill", "start", "start", "reboot", "freeze", "thaw", "lag", "coordinator"]
)


def act(world: LossyWorld, action: str, number: int) -> None:
    slots = list(world.generation.topology.slots())
    slot = slots[number % len(slots)]
    task = world.tasks.get(slot)
    match action:
        case "run":
            world.run_epochs(1 + number % 3)
        case "round":
            world.poll_round()
        case "lose":
            world.lose(number)
        case "lose_all":
            world.lose_all()
        case "collect_garbage":
            world.collect_garbage()
        case "kill" if slot.replica:
            world.kill(slot)
        case "start" if task is None:
            world.start_task(slot)
        case "reboot" if task and slot.replica:
            task.reboot()
        case "freeze" if task:
            task.frozen = True
        case "thaw" if task:
            task.frozen = False
        case "lag" if task:
            task.sink_lag = number % 20
        case "coordinator":
            world.start_coordinator()


# Slots 4 and 5 are the replicas of `end`.
ENTRIES_OF_INPUTS_LOST = [
    ("run", 1),
    ("lose_all", 0),
    *[("run", 0)] * 4,
    *[("kill", 5), ("freeze", 4)],
    *[("run", 0)] * 5,
    ("coordinator", 0),
]
ENTRIES_TAKEN_OVER = [
    ("run", 1),
    *[("lose_all", 0), ("run", 0), ("freeze", 4), ("kill", 5)],
    *[("run", 0)] * 7,
    ("coordinator", 0),
]


@example(ENTRIES_OF_INPUTS_LOST)
@example(ENTRIES_TAKEN_OVER)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 1000)), min_size=5, max_size=14))
def test_lost_state_is_saved_again_after_any_history(history: list[tuple[str, int]]) -> None:
    world = started()
    for action, number in history:
        act(world, action, number)
    for slot in world.generation.topology.slots():
        task = world.tasks.get(slot) or world.start_task(slot)
        task.frozen, task.sink_lag = False, 0
    world.list_pods()
    world.collect_garbage()
    world.run_epochs(12)
    newest = world.store[-1]
    assert newest.epoch >= world.head - 2 * world.interval_epochs
    assert not list(filter(world.is_lost, world.needed()))
    assert {t.phase for t in world.tasks.values()} == {"Live"}
    assert world.coordinator.problems(world.now) == ()


def test_a_restore_that_fails_makes_the_next_collection_look_for_the_cause() -> None:
    world = started()
    slot = Slot("mid", 0, 1)
    world.kill(slot)
    world.lose_all()
    task = world.start_task(slot)
    while task.phase != "Failed":
        world.poll(slot)
    world.answer(task)
    assert not any(world.full_scans)
    world.run_epochs(15)
    assert world.full_scans.count(True) == 1
    assert world.tasks[slot].phase == "Live"


def test_entries_that_tasks_still_read_are_not_deleted() -> None:
    world = started()
    world.tasks[Slot("mid", 0, 1)].core.status.restoring = "entry"
    world.run_epochs(2)
    world.in_use.clear()
    world.run_epochs(15)
    assert set(world.in_use) == {frozenset({"entry"})}


def test_a_complete_replica_saves_while_another_one_still_reads() -> None:
    world = started()
    slot, partner = Slot("mid", 0, 0), Slot("mid", 0, 1)
    world.kill(slot)
    world.run_epochs(5)
    world.start_task(slot).state_reads_hang = True
    world.run_epochs(16)
    assert world.tasks[slot].core.status.restoring is not None
    assert world.tasks[slot].state_epoch >= world.head - 2
    assert (world.tasks[slot].phase, world.tasks[partner].phase) == ("CatchingUp", "Live")
    assert world.store[-1].epoch >= world.head - 2 * world.interval_epochs


def test_a_replica_that_catches_up_saves_rather_than_one_that_still_reads() -> None:
    world = started()
    slots = [Slot("mid", 0, replica) for replica in (0, 1)]
    for slot in slots:
        world.kill(slot)
    for slot in slots:
        world.start_task(slot).state_reads_hang = slot.replica == 0
    world.release_epochs(50)
    for other in set(world.tasks) - set(slots):
        world.work(other, 50)
    for _ in range(8):
        for slot in slots:
            world.work(slot, 1)
        world.poll_round()
    assert {world.tasks[slot].phase for slot in slots} == {"CatchingUp"}
    assert [bool((p := world.coordinator.poll_for(s)) and p.saver) for s in slots] == [False, True]


def finds_lost(world: LossyWorld, slot: Slot, name: str) -> None:
    """A task finds a state object of its restore point damaged."""
    task = next(t for t in world.coordinator.membership if t.slot == slot)
    assert task.response is not None
    update = {"restoring": "entry", "phase": TaskPhase.FAILED, "lost": name}
    failed = task.response.model_copy(update=update)
    incarnation = task.pod.incarnation
    for _ in range(3):
        world.feed(lambda core, now: core.poll_answered(slot, incarnation, failed, now))


def test_a_collection_checks_objects_that_tasks_found_lost() -> None:
    """Once, and soon: the task's next boot would be given the same restore point."""
    world, slot = started(), Slot("mid", 0, 1)
    world.run_epochs(12)
    world.reported_lost.clear()
    finds_lost(world, slot, "state/x")
    asked_at = world.now
    while not world.reported_lost:
        world.run_epochs(1)
    assert world.now - asked_at <= 12
    finds_lost(world, slot, "state/x")
    world.run_epochs(30)  # three intervals of garbage collections
    assert [s for s in world.reported_lost if s] == [frozenset({"state/x"})]
    assert not any(world.full_scans)


def test_without_another_entry_a_task_waits_and_the_report_names_what_is_lost() -> None:
    world = started()
    slots = [Slot("mid", 0, replica) for replica in (0, 1)]
    for slot in slots:
        world.kill(slot)
    world.lose_all()
    world.collect_garbage()
    task = world.start_task(slots[0])
    world.run_epochs(8)
    assert task.phase == "Waiting"
    (problem,) = world.coordinator.checkpoint_problems(world.now)
    assert "the entry of" in problem.message
    assert "no live replica can save mid/0 again" in problem.message
