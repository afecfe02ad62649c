"""Global checkpoints, restore points and restarts of the coordinator (I9).

Design: docs/design/checkpoints.md#who-commits, docs/design/coordinator.md#checkpoints.
"""

from __future__ import annotations

import pytest
from coordinator_world import World, next_polls, started

from rekindle.coordinator.model import (
    StepDown,
    WriteManifest,
)
from rekindle.identity import UNREPORTED_STREAM_PROTOCOL
from rekindle.protocol import PollRequest, RestorePoint
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment
from rekindle_testing.fixtures.simulated_task import SimulatedTask

pytestmark = pytest.mark.simulated

BOTH = Slot("both", 0, 0)


def test_a_fresh_topology_starts_empty_before_its_first_epoch() -> None:
    world = started(1)
    assert {t.restored_from for t in world.tasks.values()} == {-1}
    first = world.store[0]
    assert (first.seq, first.epoch, first.fence) == (0, -1, 1)
    assert {n: q.epoch for n, q in first.queries.items()} == {"q-left": 0, "q-both": 0}


def test_a_checkpoint_is_committed_when_every_running_partition_has_it() -> None:
    world = started(12)
    newest = world.store[-1]
    assert newest.epoch == 11
    assert {r.epoch for refs in newest.entries.values() for r in refs} == {11}
    assert [m.seq for m in world.store] == list(range(len(world.store)))


HALVES = (
    SimulatedSegment("s1"),
    SimulatedSegment("b1", ("s1",), query=True, replicas=2),
    SimulatedSegment("s2"),
    SimulatedSegment("b2", ("s2",), query=True),
)
B1 = Slot("b1", 0, 0)


def halves() -> World:
    world = World(HALVES)
    world.start_all()
    world.run_epochs(10)
    return world


def test_a_partition_without_replicas_does_not_stop_checkpoints() -> None:
    world = started(10)
    for slot in [s for s in world.tasks if s.segment == "left"]:
        world.kill(slot)
    for _ in range(24):
        world.run_epochs(1)
        assert not world.undeliverable_epochs()
    assert world.store[-1].epoch >= world.head - 4 * world.interval_epochs
    assert [r.epoch for r in world.store[-1].entries["both/0"]] == [7]
    for slot in world.generation.topology.slots():
        if slot not in world.tasks:
            world.start_task(slot)
    world.run_epochs(14)
    assert not world.undeliverable_epochs()
    assert {r.epoch for refs in world.store[-1].entries.values() for r in refs} == {
        world.store[-1].epoch
    }


def test_another_replica_saves_if_the_saver_cannot() -> None:
    world = halves()
    world.tasks[B1].store_fails = True
    world.run_epochs(60)
    assert world.store[-1].epoch >= world.head - 2 * world.interval_epochs
    assert world.store[-1].entries["b1/0"][0].epoch >= world.head - 4 * world.interval_epochs


def entries_behind(world: World) -> set[str]:
    """Partitions whose newest committed entry is more than four intervals old."""
    after = world.head - 4 * world.interval_epochs
    return {key for key, refs in world.store[-1].entries.items() if refs[0].epoch < after}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("broken", ["src", "mid", "agg"])
def test_only_a_partition_that_cannot_save_falls_behind(broken: str, replicas: int) -> None:
    """Also once a reader's entry has to be saved again."""
    parts = (
        SimulatedSegment("src", replicas=replicas),
        SimulatedSegment("mid", ("src",), replicas=replicas),
        SimulatedSegment("agg", ("mid",), query=True, replicas=replicas),
    )
    world = World(parts)
    world.start_all()
    world.run_epochs(12)
    for task in world.tasks.values():
        task.store_fails = task.slot.segment == broken
    world.run_epochs(40)
    assert entries_behind(world) == {f"{broken}/0"}
    if broken != "agg":
        lost = lose(world, "agg/0")
        world.run_epochs(20)
        assert world.store[-1].entries["agg/0"][0].object != lost
    assert entries_behind(world) == {f"{broken}/0"}


def test_a_checkpoint_that_nobody_has_is_not_committed() -> None:
    """The reader has saved epochs on which the replicas of its source do not agree yet."""
    parts = (SimulatedSegment("src", replicas=2), SimulatedSegment("agg", ("src",), query=True))
    world = World(parts, interval_epochs=1)
    world.start_all()
    world.run_epochs(12)
    world.run_while_stuck(Slot("src", 0, 1), 10)
    assert world.tasks[Slot("agg", 0, 0)].state_epoch > world.head - 2
    newest = world.store[-1]
    assert {refs[0].epoch for refs in newest.entries.values()} == {newest.epoch}
    world.poll_rounds(4 * 31)
    stalled = checkpoint_problems(world)["Stalled"]
    assert stalled == f"no checkpoint since epoch {newest.epoch}: waiting for agg/0, src/0"


def test_a_task_is_restored_although_commits_are_slow() -> None:
    world = halves()
    world.hold_writes = True
    world.kill(Slot("b2", 0, 0))
    task = world.start_task(Slot("b2", 0, 0))
    for _ in range(4):
        world.run_epochs(world.interval_epochs + 1)
        world.release_writes()
    world.run_epochs(1)
    assert task.phase != "Waiting"


def test_a_container_that_never_starts_pins_no_entries() -> None:
    world = halves()
    world.kill(B1)
    world.start_task(B1).frozen = True
    world.failed_to_start = {B1}
    world.list_pods()
    world.run_epochs(100)
    assert len(world.store[-1].entries["s1/0"]) <= 2
    assert world.tasks[Slot("s1", 0, 0)].log_base > 80


def test_a_waiting_partition_pins_its_ancestors() -> None:
    world = started(9)
    world.kill(BOTH)
    world.run_epochs(9)
    newest = world.store[-1]
    assert newest.epoch == 15
    assert [r.epoch for r in newest.entries["both/0"]] == [7]
    for key in ("src/0", "left/0", "left/1", "right/0"):
        assert [r.epoch for r in newest.entries[key]] == [15, 7], key
    world.kill(Slot("right", 0, 0))
    world.start_task(Slot("right", 0, 0))
    world.poll_rounds(3)
    assert world.tasks[Slot("right", 0, 0)].restored_from == 7, "`both` will need epoch 8"


def waiting(epochs: int) -> World:
    """`both` waits for so many epochs."""
    world = started(9)
    world.kill(BOTH)
    world.run_epochs(epochs)
    return world


RIGHT = Slot("right", 0, 0)


@pytest.mark.parametrize("epochs", [9, 60])
def test_a_restarted_task_replays_no_wait_of_a_reader_that_its_log_has(epochs: int) -> None:
    world = waiting(epochs)
    newest = world.store[-1].entries["right/0"][0].epoch
    task = world.tasks[RIGHT]
    reached = task.state_epoch
    task.reboot()
    world.poll_rounds(3)
    assert task.restored_from == newest
    assert reached - newest <= 2 * world.interval_epochs, "a normal restore"
    world.run_epochs(9)
    assert not world.undeliverable_epochs()
    both = world.start_task(BOTH)
    world.run_epochs(epochs + 20)
    assert (task.phase, both.phase) == ("Live", "Live")
    assert sorted(both.logged) == list(range(8, both.log_last + 1))
    assert all(len(refs) == 1 for refs in world.store[-1].entries.values())


def test_a_task_whose_log_is_doubted_replays_the_wait_of_a_reader() -> None:
    world = waiting(40)
    task = world.tasks[RIGHT]
    task.reports_log = False
    task.reboot()
    world.poll_rounds(3)
    assert task.restored_from == 7


def test_a_log_that_lacks_what_a_reader_needs_is_not_enough() -> None:
    world = waiting(40)
    task = world.tasks[RIGHT]
    task.log_base = 9  # epoch 8 is gone
    task.reboot()
    world.poll_rounds(3)
    assert task.restored_from == 7


def test_a_partition_that_catches_up_unpins_entries() -> None:
    world = started(9)
    world.kill(BOTH)
    world.run_epochs(9)
    world.start_task(BOTH)
    world.run_epochs(12)
    assert all(len(refs) == 1 for refs in world.store[-1].entries.values())


def test_the_lowest_live_replica_saves() -> None:
    world = started()
    assert savers(world) == {s.key for s in world.tasks if s.replica == 0}
    world.tasks[Slot("left", 1, 0)].frozen = True
    world.poll_rounds(8)
    assert "left/1/1" in savers(world)
    assert "left/1/0" not in savers(world)


def savers(world: World) -> set[str]:
    return {s.key for s, p in next_polls(world).items() if p.saver}


def test_a_new_coordinator_keeps_the_desired_state_of_tasks() -> None:
    world = started()
    before = next_polls(world)
    boots = {s: (t.incarnation, t.boot, t.restored_from) for s, t in world.tasks.items()}
    given = {s: len(t.polls) for s, t in world.tasks.items()}
    world.start_coordinator()
    world.poll_rounds(6)
    assert no_floor(next_polls(world)) == no_floor(before)
    world.run_epochs(1)
    after = next_polls(world)
    assert {s: comparable(p) for s, p in after.items()} == {
        s: comparable(p) for s, p in before.items()
    }
    for slot, task in world.tasks.items():
        assert (task.incarnation, task.boot, task.restored_from) == boots[slot]
        for poll in task.polls[given[slot] :]:
            assert poll.ask_only or no_floor({slot: poll}) == no_floor({slot: before[slot]})
    assert world.store[-1].entries == world.store[-2].entries
    assert world.store[-1].fence == 2


_OF_PROCESS = {"fence": 0, "coordinator_boot": ""}


def no_floor(polls: dict[Slot, PollRequest]) -> dict[Slot, PollRequest]:
    return {s: p.model_copy(update={**_OF_PROCESS, "floor": None}) for s, p in polls.items()}


def comparable(poll: PollRequest) -> PollRequest:
    return poll.model_copy(update=_OF_PROCESS)


def test_no_floor_before_all_readers_responded() -> None:
    world = started()
    world.tasks[BOTH].frozen = True
    world.start_coordinator()
    world.poll_rounds(20)
    given = next_polls(world)
    assert given[Slot("left", 0, 0)].floor is None
    world.tasks[BOTH].frozen = False
    world.run_epochs(2)
    assert next_polls(world)[Slot("left", 0, 0)].floor is not None


def test_discovery_ends_after_three_seconds() -> None:
    world = started()
    world.tasks[BOTH].frozen = True
    world.start_coordinator()
    world.poll_rounds(4)
    assert not world.coordinator.ready
    world.poll_rounds(10)
    assert world.coordinator.ready


def test_a_restore_point_survives_newer_checkpoints() -> None:
    world = started()
    world.kill(BOTH)
    world.start_task(BOTH)
    world.poll_rounds(2)
    given = world.tasks[BOTH].restored_from
    assert given == 7
    world.run_while_stuck(BOTH, 10)
    assert world.store[-1].epoch > given
    assert next_polls(world)[Slot("left", 0, 0)].floor == given


def test_the_first_manifest_of_a_coordinator_fences_the_older_one() -> None:
    world = started()
    world.start_coordinator(keep_old_coordinator=True)
    world.poll_rounds(2)
    zombie = world.zombie
    assert zombie is not None
    before = list(world.store)
    assert before[-1].fence == 2
    world.complete_checkpoint(zombie)
    assert world.zombie is None, "it read the higher fence and stepped down"
    assert world.store == before


def test_a_refused_fence_ends_the_coordinator() -> None:
    world = started()
    effects = world.coordinator.fence_raised("task src/0/0", world.now)
    assert any(isinstance(e, StepDown) for e in effects)


def test_a_newer_fence_of_a_task_ends_the_coordinator() -> None:
    world = started()
    task = world.tasks[BOTH]
    task.fence = 7
    world.answer(task)
    assert world.step_downs


def test_an_unreachable_store_loses_no_checkpoint() -> None:
    world = started()
    committed = world.store[-1].epoch
    world.store_up = False
    world.run_epochs(8)
    assert world.store[-1].epoch == committed
    assert checkpoint_problems(world) == {"StoreUnavailable": "checkpoint store: down"}
    world.store_up = True
    world.run_epochs(8)
    assert world.store[-1].epoch > committed + 8
    assert not world.reports[-1]["problems"]
    assert not world.reports[-1]["checkpointProblems"]


def test_no_task_is_restored_while_a_manifest_is_being_written() -> None:
    world = started(11)
    world.hold_writes = True
    world.run_epochs(2)
    assert world.held
    world.kill(BOTH)
    world.start_task(BOTH)
    world.poll_rounds(8)
    assert world.tasks[BOTH].phase == "Waiting"
    world.hold_writes = False
    world.release_writes()
    world.poll_rounds(2)
    assert world.tasks[BOTH].restored_from == 11


# --- status ---


def test_a_quiet_topology_reports_at_most_every_two_seconds() -> None:
    world = started()
    before, began = len(world.reports), world.now
    for _ in range(40):
        world.poll_round(0.25)
    assert len(world.reports) - before <= (world.now - began) / 2.0 + 1


def test_problems_of_the_shell_are_reported_until_they_end() -> None:
    world = started()
    message = "topology.json is broken"
    world.feed(lambda core, now: core.problem_changed("generation", message, now))
    assert message in world.reports[-1]["problems"]
    world.feed(lambda core, now: core.problem_changed("generation", None, now))
    assert not world.reports[-1]["problems"]


def test_the_lag_of_a_query_is_an_age() -> None:
    world = started()
    rows = {q["name"]: q for q in world.reports[-1]["queries"]}
    assert rows["q-both"]["stableEpoch"] >= 8
    world.tasks[BOTH].frozen = True
    stable = world.tasks[BOTH].state_epoch
    world.run_while_stuck(BOTH, 6)
    row = next(q for q in world.reports[-1]["queries"] if q["name"] == "q-both")
    assert row["stableEpoch"] == stable
    assert 3.0 <= row["lagSeconds"] <= 7.0


def test_a_started_task_gets_no_restore_point() -> None:
    world = started()
    assert all(p.restore is None for p in next_polls(world).values())
    world.start_task(BOTH)
    world.poll_round()
    poll = world.coordinator.poll_for(BOTH)
    assert poll is not None
    assert poll.restore == RestorePoint(epoch=7, object="both/0@7")


def test_no_first_manifest_in_an_empty_store_while_tasks_run() -> None:
    world = started()
    restored = {s: t.restored_from for s, t in world.tasks.items()}
    mounted, world.store = world.store, []  # another directory is where the store was mounted
    world.start_coordinator()
    world.poll_rounds(40)
    assert world.store == []
    problem = checkpoint_problems(world)["StoreUnavailable"]
    assert "has no manifest, but task both/0/0 has started" in problem
    world.store = mounted
    world.run_epochs(4)
    assert world.store[-1].fence == 2
    assert {s: t.restored_from for s, t in world.tasks.items()} == restored


def test_stream_protocols_that_cannot_work_together_are_reported_at_once() -> None:
    world = started()
    assert "streamConflict" not in world.reports[-1]
    assert world.reports[-1]["problems"] == []
    world.tasks[Slot("left", 0, 1)].stream_protocol = UNREPORTED_STREAM_PROTOCOL
    world.run_epochs(8)
    data_plane = world.reports[-1]
    assert data_plane["streamConflict"] == [2, 3]
    (problem,) = data_plane["problems"]
    assert "stream protocols 2 and 3" in problem
    assert "(1 tasks have an older one: left/0/1)" in problem
    assert "Set spec.suspend to true, and back once all tasks have ended" in problem


def test_results_of_different_engines_are_not_compared() -> None:
    world = started()
    other = world.tasks[Slot("left", 0, 1)]
    other.engine, other.corruption = "e2", "!"
    world.run_epochs(8)
    data_plane = world.reports[-1]
    assert (data_plane["diverged"], data_plane["inconsistent"]) == ([], [])
    assert data_plane["problems"] == [
        "left/0: its replicas run engines e1 and e2; their results are not compared until they "
        "run the same image"
    ]
    assert world.store[-1].entries["left/0"][0].epoch > world.head - 2 * world.interval_epochs
    other.engine = "e1"
    world.run_epochs(4)  # both restore from the last checkpoint, and differ again
    assert any("disagree" in message for message in world.reports[-1]["inconsistent"])


def checkpoint_problems(world: World) -> dict[str, str]:
    """The typed problems of the newest report, kind -> message; `problems` has their messages."""
    report = world.reports[-1]
    found = {p["kind"]: p["message"] for p in report["checkpointProblems"]}
    assert len(found) == len(report["checkpointProblems"])
    assert [p for p in report["problems"] if p in found.values()] == list(found.values())
    return found


def test_refused_entries_are_reported_until_the_next_commit() -> None:
    world = started(12)
    world.hold_writes = True
    while not world.held:
        world.run_epochs(1)
    world.held, world.hold_writes = [], False
    world.feed(lambda core, now: core.entries_refused((), "state object x is missing", now))
    (problem,) = world.coordinator.checkpoint_problems(world.now)
    assert problem.kind == "EntriesRefused"
    assert problem.message == "checkpoint store: state object x is missing"
    world.run_epochs(8)
    assert world.coordinator.checkpoint_problems(world.now) == ()


def test_a_garbage_collection_that_fails_is_reported_until_one_succeeds() -> None:
    world = started()
    world.feed(lambda core, now: core.garbage_collected("slow", {}, now))
    world.poll_rounds(9)
    assert checkpoint_problems(world) == {
        "CleanUpFailed": "checkpoint store: garbage collection: slow"
    }
    world.feed(lambda core, now: core.garbage_collected(None, {}, now))
    world.poll_rounds(9)
    assert checkpoint_problems(world) == {}


def test_the_partitions_that_a_checkpoint_waits_for_are_reported() -> None:
    world = started()
    for task in world.tasks.values():
        task.store_fails = True
    world.run_epochs(40)
    found = checkpoint_problems(world)
    assert found.keys() == {"Stalled"}
    assert found["Stalled"].startswith("no checkpoint since epoch 7: waiting for both/0, ")


LEFT = (Slot("left", 0, 0), Slot("left", 0, 1))


def lose(world: World, key: str) -> str:
    """Garbage collection finds that an object of the newest entry of a partition is missing."""
    name = world.store[-1].entries[key][0].object
    assert name is not None
    missing = {name: "state object x is missing"}
    world.feed(lambda core, now: core.garbage_collected(None, missing, now))
    return name


def test_an_entry_that_lacks_state_is_reported_and_replaced() -> None:
    world = started(13)
    lost = lose(world, "left/0")
    assert world.coordinator.problems(world.now) == (
        "checkpoint store: cannot be restored: the entry of left/0 at epoch 11: state object x is "
        "missing",
    )
    world.tick()
    (message,) = world.coordinator.problems(world.now)
    assert checkpoint_problems(world) == {"Unrestorable": message}
    assert [p.refused for s, p in next_polls(world).items() if s in LEFT] == [(lost,), (lost,)]
    assert all(not p.refused for s, p in next_polls(world).items() if s not in LEFT)
    before = len(world.store)
    world.run_epochs(6)
    assert len(world.store) > before
    for manifest in world.store[before:]:
        assert lost not in {r.object for refs in manifest.entries.values() for r in refs}
    assert world.coordinator.problems(world.now) == ()


def test_no_task_is_restored_from_an_entry_that_lacks_state() -> None:
    world = started(12)
    world.kill(LEFT[1])
    lost = lose(world, "left/0")
    task = world.start_task(LEFT[1])
    world.poll_rounds(4)
    assert (task.phase, task.restored_from) == ("Waiting", None)
    world.run_epochs(6)
    assert task.restored_from == 15
    assert world.store[-1].entries["left/0"][0].object != lost


def test_a_partition_that_is_gone_with_its_state_does_not_stop_checkpoints() -> None:
    world = started(12)
    for slot in LEFT:
        world.kill(slot)
    lose(world, "left/0")
    world.run_epochs(24)
    assert world.store[-1].entries["right/0"][0].epoch >= world.head - 4 * world.interval_epochs
    problem = checkpoint_problems(world)["Unrestorable"]
    assert problem.endswith("no live replica can save left/0 again")


def test_commits_wait_for_state_that_is_saved_again() -> None:
    """Both replicas fail to save for a while; the others go on."""
    world = started(12)
    lost = lose(world, "left/0")
    for slot in LEFT:
        world.tasks[slot].store_fails = True
    before = len(world.store)
    world.run_epochs(8)
    assert len(world.store) == before
    for slot in LEFT:
        world.tasks[slot].store_fails = False
    world.run_epochs(8)
    kept = world.store[-1].entries["left/0"]
    assert lost not in {r.object for r in kept}
    assert kept[0].epoch == world.store[-1].epoch


def test_an_older_entry_is_kept_in_the_place_of_one_that_lacks_state() -> None:
    """`both` waits and pins the entry of epoch 7, also of partitions that are gone by now."""
    world = started(9)
    world.kill(BOTH)
    world.run_epochs(9)
    for slot in LEFT:
        world.kill(slot)
    assert [r.epoch for r in world.store[-1].entries["left/0"]] == [15, 7]
    lose(world, "left/0")
    task = world.start_task(LEFT[0])
    world.poll_rounds(3)
    assert task.restored_from == 7
    world.run_epochs(16)
    assert world.store[-1].entries["left/0"][0].epoch == world.store[-1].epoch


def refuse_next(world: World) -> WriteManifest:
    """The next commit finds that its entries lack state."""
    world.hold_writes = True
    while not world.held:
        world.run_epochs(1)
    ((_, effect),) = world.held
    assert isinstance(effect, WriteManifest)
    world.held, world.hold_writes = [], False
    missing = "state object x is missing"
    world.feed(lambda core, now: core.entries_refused(effect.new_entries, missing, now))
    return effect


def reported(*tasks: SimulatedTask) -> set[str]:
    return {d.object or "" for t in tasks for d in t.response().checkpoints}


def test_tasks_report_refused_entries_no_more() -> None:
    world = started(12)
    refused = set(refuse_next(world).new_entries)
    assert reported(*world.tasks.values()) >= refused
    world.poll_rounds(2)
    assert not reported(*world.tasks.values()) & refused
    assert not any(p.refused for p in next_polls(world).values())
    world.run_epochs(8)
    assert world.store[-1].epoch == 23


def test_refused_entries_that_no_task_reports_are_forgotten() -> None:
    world = started(12)
    refused = set(refuse_next(world).new_entries)
    committer = world.coordinator.committer
    world.poll_rounds(2)
    assert all(map(committer.is_refused, refused))
    world.run_epochs(8)
    assert not any(map(committer.is_refused, refused))


def test_an_entry_that_a_silent_task_reports_stays_refused() -> None:
    world = started(12)
    refused = set(refuse_next(world).new_entries)
    silent, committer = world.tasks[LEFT[0]], world.coordinator.committer
    silent.frozen = True
    offered = reported(silent) & refused
    before = len(world.store)
    world.run_epochs(12)
    assert len(world.store) > before + 1
    assert offered
    assert set(filter(committer.is_refused, refused)) == offered
    silent.frozen = False
    world.run_epochs(8)
    assert not any(map(committer.is_refused, refused))


def test_a_committed_entry_stays_refused() -> None:
    """An older coordinator has committed it, and its partition cannot save another one."""
    world = started(12)
    write = refuse_next(world)
    world.store.append(write.manifest)
    for slot in LEFT:
        world.kill(slot)
    world.run_epochs(40)
    assert world.store[-1].seq > write.manifest.seq + 1
    kept = {r.object for refs in world.store[-1].entries.values() for r in refs}
    committer = world.coordinator.committer
    assert "left/0@15" in kept
    assert set(filter(committer.is_refused, write.new_entries)) == kept & set(write.new_entries)
