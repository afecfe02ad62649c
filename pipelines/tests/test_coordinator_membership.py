"""Heartbeats, suspicion, and a coordinator whose own network is faulty.

Design: docs/design/coordinator.md#suspicion.
"""

from __future__ import annotations

import pytest
from coordinator_world import DIAMOND, World, address

from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.model import Pod
from rekindle.coordinator.tasks.membership import MIN_SILENCE_S, Membership
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build

SRC = Slot("src", 0, 0)
LEFT = Slot("left", 0, 0)


@copy_of_one_build
def started(epochs: int = 6) -> World:
    world = World(DIAMOND)
    world.start_all()
    world.run_epochs(epochs)
    return world


def with_next_coordinator() -> World:
    """A new coordinator has taken over: it knows the pods, and has no generation yet."""
    world = started()
    world.reports.clear()
    world.fence += 1
    world.coordinator = Coordinator(world.fence, wall_s=0.0)
    world.list_pods()
    return world


def suspected(world: World) -> set[Slot]:
    return {t.slot for t in world.coordinator.membership if world.coordinator.is_suspected(t)}


def test_a_frozen_task_is_suspected_within_two_seconds() -> None:
    world = started()
    world.tasks[LEFT].frozen = True
    frozen_at = world.now
    while LEFT not in suspected(world):
        world.poll_round(0.1)
    assert MIN_SILENCE_S < world.now - frozen_at < 2.0
    assert suspected(world) == {LEFT}
    world.tasks[LEFT].frozen = False
    world.poll_round()
    assert not suspected(world)


def test_suspicion_is_reported_at_once() -> None:
    world = started()
    world.tasks[LEFT].frozen = True
    for frozen in (True, False):
        world.tasks[LEFT].frozen = frozen
        while (LEFT in suspected(world)) != frozen:
            world.poll_round(0.1)
        row = next(t for t in world.reports[-1]["tasks"] if t["slot"] == LEFT.key)
        assert row["suspected"] is frozen
        assert ("suspectedSince" in row) is frozen
        assert row.get("silentSeconds", 0) >= (1.5 if frozen else 0)


def test_readers_of_a_suspected_task_get_it_last() -> None:
    world = started()
    reader = Slot("both", 0, 0)
    before = first_endpoints(world, reader)
    assert before["op-left", 0] == address(LEFT)
    world.tasks[LEFT].frozen = True
    world.poll_rounds(8)
    after = first_endpoints(world, reader)
    assert after["op-left", 0] == address(Slot("left", 0, 1))
    assert {k: v for k, v in after.items() if k != ("op-left", 0)} == {
        k: v for k, v in before.items() if k != ("op-left", 0)
    }


def test_readers_stay_with_a_replica_that_has_moved_to_its_other_number() -> None:
    world = started()
    reader = Slot("both", 0, 0)
    assert first_endpoints(world, reader)["op-left", 0] == address(LEFT)
    world.start_task(LEFT.alternate)
    world.run_epochs(6)
    world.kill(LEFT)
    world.run_epochs(2)
    assert first_endpoints(world, reader)["op-left", 0] == address(LEFT.alternate)


def first_endpoints(world: World, slot: Slot) -> dict[tuple[str, int], str]:
    poll = world.coordinator.poll_for(slot)
    assert poll is not None
    return {
        (u.stream, u.partition): u.endpoints[0].address.partition(":")[0] for u in poll.upstreams
    }


def test_the_coordinators_own_pause_is_not_the_tasks_silence() -> None:
    world = started()
    world.now += 30.0
    world.poll_round()
    assert not suspected(world)


@pytest.mark.parametrize("gap_s", [0.5, 0.55, 1.0, 3.0])
def test_a_coordinator_that_is_always_late_suspects_a_silent_task(gap_s: float) -> None:
    world = started()
    world.tasks[LEFT].frozen = True
    for _ in range(12):
        world.poll_round(gap_s)
    assert suspected(world) == {LEFT}


def test_an_irregular_history_makes_suspicion_slower_but_bounded() -> None:
    world = started()
    for _ in range(20):
        world.tasks[LEFT].frozen = True
        for _ in range(5):
            world.poll_round(0.25)
        world.tasks[LEFT].frozen = False
        world.poll_round(0.25)
    task = world.coordinator.membership.get(LEFT)
    assert task is not None
    assert MIN_SILENCE_S < task.tolerated_silence_s() <= 5.0


def test_an_isolated_coordinator_suspects_nobody() -> None:
    world = started()
    reader = Slot("both", 0, 0)
    before = world.coordinator.poll_for(reader)
    responding = {reader, Slot("right", 0, 0)}
    for _ in range(16):
        world.release_epochs()
        for slot in sorted(
            world.tasks, key=lambda s: ["src", "left", "right", "both"].index(s.segment)
        ):
            world.work(slot, 4)
        world.now += 0.25
        for slot in responding:
            world.poll(slot)
        world.tick()
    after = world.coordinator.poll_for(reader)
    assert not suspected(world)
    assert before is not None
    assert after is not None
    assert [e.address for u in after.upstreams for e in u.endpoints] == [
        e.address for u in before.upstreams for e in u.endpoints
    ]
    assert any("its own network" in p for p in world.reports[-1]["problems"])


def test_many_dead_tasks_are_suspected_when_no_peer_reads_them() -> None:
    world = started()
    for slot, task in world.tasks.items():
        task.frozen = slot.segment != "both"
    for _ in range(10):
        world.release_epochs()
        world.work(Slot("both", 0, 0), 4)
        world.poll_round(0.2)
    assert suspected(world) == {s for s in world.tasks if s.segment != "both"}


def with_a_dead_source(phase_at_death: str) -> tuple[World, set[Slot]]:
    """One source, read by two replicas: the source and one reader are lost; the source's next
    incarnation responds once, and is lost too."""
    world = World((SimulatedSegment("src"), SimulatedSegment("left", ("src",), replicas=2)))
    world.start_all()
    world.run_epochs(10)
    dead = {SRC, Slot("left", 0, 1)}
    world.tasks[Slot("left", 0, 1)].frozen = True
    source = world.start_task(SRC)
    world.release_epochs(8)
    for _ in range(3):
        world.poll_round()
        if source.phase == phase_at_death:
            break
        world.work(SRC, 1)
    assert source.phase == phase_at_death
    source.frozen = True
    return world, dead


@pytest.mark.parametrize("phase", ["Waiting", "Restoring", "CatchingUp"])
def test_a_task_that_died_behind_its_readers_is_suspected(phase: str) -> None:
    """Its reader has read an earlier incarnation, so being ahead of it proves nothing."""
    world, dead = with_a_dead_source(phase)
    for _ in range(40):
        world.release_epochs()
        world.work(LEFT, 4)
        world.poll_round()
    assert suspected(world) == dead
    row = next(t for t in world.reports[-1]["tasks"] if t["slot"] == SRC.key)
    assert row["suspected"]
    assert not any("its own network" in p for p in world.reports[-1]["problems"])


def test_dead_replicas_are_suspected_though_their_partners_are_read() -> None:
    """Readers continue with the partner, which proves nothing about the coordinator's network."""
    world = World(
        (SimulatedSegment("src", replicas=3), SimulatedSegment("left", ("src",), replicas=3))
    )
    world.start_all()
    world.run_epochs(6)
    dead = {slot for slot in world.tasks if slot.replica > 0}
    for slot in dead:
        world.tasks[slot].frozen = True
    for _ in range(16):
        world.release_epochs()
        for slot in (Slot("src", 0, 0), Slot("left", 0, 0)):
            world.work(slot, 4)
        world.poll_round(0.25)
    assert suspected(world) == dead


def test_a_pod_older_than_one_seen_before_counts_as_ended() -> None:
    membership = Membership()
    old, new = (
        Pod(f"p{i}", SRC, i, "10.0.0.1", may_be_running=True, was_ready=True) for i in (1, 2)
    )
    membership.pods_listed([new, old], 0.0)
    assert membership.find(SRC, 2) is not None
    membership.pods_listed([old], 1.0)
    task = membership.get(SRC)
    assert task is not None
    assert task.pod.incarnation == 1
    assert not task.pod.may_be_running, "it was replaced, whatever its pod reports"


def test_responses_of_a_replaced_incarnation_do_not_count() -> None:
    world = started()
    stale = world.tasks[LEFT]
    world.start_task(LEFT)
    world.answer(stale)
    task = world.coordinator.membership.get(LEFT)
    assert task is not None
    assert task.response is None


def test_a_task_that_starts_is_not_suspected_before_it_was_ready() -> None:
    world = started()
    pod = Pod("left-new", LEFT, 9, address(LEFT), may_be_running=True, was_ready=False)
    pods = [*(p for p in world.pods() if p.slot != LEFT), pod]
    world.feed(lambda core, now: core.pods_listed(pods, now))
    del world.tasks[LEFT]
    world.poll_rounds(20)
    assert LEFT not in suspected(world)


def test_silence_counts_from_the_first_poll() -> None:
    """A busy machine takes seconds to compile the generation, and until then no task is polled."""
    world = with_next_coordinator()
    for _ in range(40):
        world.poll_round()
    assert not suspected(world)
    world.feed(lambda core, now: core.generation_seen(world.generation, now))
    world.tick()
    assert not world.reports, "no task has responded: nothing to report"
    world.poll_round()
    assert {t["phase"] for t in world.reports[-1]["tasks"]} == {"Live"}
    world.tasks[LEFT].frozen = True
    world.poll_rounds(8)
    assert suspected(world) == {LEFT}


def test_a_coordinator_that_cannot_poll_reports_why() -> None:
    world = with_next_coordinator()
    message = "flights-g1 cannot be read"
    world.feed(lambda core, now: core.problem_changed("generation", message, now))
    world.tick()
    assert world.reports[-1]["problems"] == [message]
