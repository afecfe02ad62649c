"""Which checkpoint epochs are used, and what a restart would cost."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from coordinator_world import World
from hypothesis import given
from hypothesis import strategies as st

from rekindle.coordinator.checkpoints.policy import (
    Replay,
    next_checkpoint,
    replay_target_s,
    with_consumers,
)
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.protocol import MAX_INTERVALS
from rekindle.report import CheckpointProblemKind
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_topology


def replays_with(targets: st.SearchStrategy[float | None]) -> st.SearchStrategy[list[Replay]]:
    speeds = st.none() | st.floats(1e-6, 20.0)
    replays = st.builds(Replay, st.integers(-1, 400), speeds, targets)
    return st.lists(replays, min_size=1, max_size=5)


REPLAYS = replays_with(st.none()) | replays_with(st.floats(1.0, 500.0) | st.just(math.inf))
"""No operator has a target, or some have."""
INTERVALS = st.integers(1, 20)
EPOCH_S = 0.5  # of a simulated task


def replay_s(replay: Replay, at: int) -> float:
    """How long the replay is if the partition restarts at this epoch."""
    return (at - replay.entry) * (replay.epoch_s if replay.epoch_s is not None else 1e9)


@given(REPLAYS, INTERVALS)
def test_no_replay_exceeds_its_target(replays: list[Replay], interval: int) -> None:
    due = next_checkpoint(replays, interval)
    oldest = min(replay.entry for replay in replays)
    is_first = due - interval <= oldest
    for replay in replays:
        if replay.target_s is not None and not is_first:
            assert replay_s(replay, due) <= replay.target_s * (1 + 1e-9)


@given(REPLAYS, INTERVALS)
def test_no_checkpoint_is_saved_that_no_target_needs(replays: list[Replay], interval: int) -> None:
    if all(replay.target_s is None for replay in replays):
        return
    later = next_checkpoint(replays, interval) + interval
    assert any(
        later - replay.entry > MAX_INTERVALS * interval
        or (replay.target_s is not None and replay_s(replay, later) > replay.target_s * (1 - 1e-9))
        for replay in replays
    )


@given(REPLAYS, INTERVALS, st.booleans())
def test_a_checkpoint_is_due_at_a_checkpoint_epoch(
    replays: list[Replay], interval: int, wanted: bool
) -> None:
    due = next_checkpoint(replays, interval, wanted=wanted)
    oldest = min(replay.entry for replay in replays)
    assert (due + 1) % interval == 0
    assert due > oldest
    if wanted or replays[0].target_s is None:
        assert due - oldest <= interval, "each checkpoint epoch is used"


def test_a_checkpoint_is_due_until_the_consumers_have_it() -> None:
    graph = build_graph(make_topology(PARTS))
    targets = {"rows": 10.0, "sums": 100.0}
    replays = {p: Replay(15, EPOCH_S, targets[p.segment]) for p in graph.partitions}
    for partition in graph.partitions:  # each saves it, sources first
        assert next_checkpoint(with_consumers(replays, graph).values(), 4) == 35
        replays[partition] = replace(replays[partition], entry=35)
    assert next_checkpoint(with_consumers(replays, graph).values(), 4) == 55


def test_a_consumer_that_does_not_run_makes_nothing_due() -> None:
    graph = build_graph(make_topology(PARTS))
    rows = {p: Replay(35, EPOCH_S, 10.0) for p in graph.partitions if p.segment == "rows"}
    assert with_consumers(rows, graph) == rows


def test_nothing_is_due_while_no_partition_runs() -> None:
    assert next_checkpoint([], 10) == NO_EPOCH


@pytest.mark.parametrize(
    ("own", "topologys", "expected"),
    [(None, None, None), (None, "60s", 60.0), ("2m", "60s", 120.0), ("5s", None, 5.0)],
)
def test_an_operator_replaces_the_target(
    own: str | None, topologys: str | None, expected: float | None
) -> None:
    topology = make_topology(PARTS, replay_target=topologys)
    (operator,) = topology.spec.operators
    raw = {**operator.model_dump(by_alias=True), "checkpoint": {"replayTarget": own}}
    spec = topology.spec.model_copy(update={"operators": (type(operator).model_validate(raw),)})
    topology = replace(topology, spec=spec)
    targets = {s.name: replay_target_s(topology, s) for s in topology.segments}
    assert targets["sums"] == expected
    assert targets["rows"] == (60.0 if topologys else None)


@dataclass
class LargeLog:
    size: int

    def log_bytes(self) -> int:
        return self.size

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> None:
        return None


PARTS = [
    SimulatedSegment("rows", partitions=2),
    SimulatedSegment("sums", ("rows",), partitions=2, query=True),
]
SUMS = Slot("sums", 1, 0)


def run(world: World, epochs: int) -> list[int]:
    """Returns the epochs that each manifest of this time has."""
    before = len(world.store)
    for _ in range(epochs):
        world.run_epochs(1)
        for task in world.tasks.values():
            task.core.status.processed(0, EPOCH_S)  # its own calls take no time
        assert not world.undeliverable_epochs()
    return [manifest.epoch for manifest in world.store[before:]]


def distances(committed: list[int]) -> set[int]:
    return {b - a for a, b in pairwise(committed)}


def started(target: str | None, interval_epochs: int = 4) -> World:
    world = World(PARTS, interval_epochs, replay_target=target)
    world.start_all()
    run(world, 12)
    return world


def test_checkpoints_are_as_rare_as_the_target_allows() -> None:
    assert distances(run(started(None), 20)) == {4}
    assert distances(run(started("10s"), 64)) == {20}


def test_all_partitions_save_at_the_same_epochs() -> None:
    world = started("5s")
    run(world, 40)
    for manifest in world.store[-3:]:
        assert {ref.epoch for refs in manifest.entries.values() for ref in refs} == {manifest.epoch}


def test_a_partition_that_saves_first_waits_for_the_others() -> None:
    world = started("14s")  # 28 epochs, more than a partition that is behind is waited for
    run(world, 40)
    committed, slow = world.store[-1].epoch, world.tasks[SUMS]
    slow.store_fails = True
    first = Partition("rows", 0)
    while world.coordinator.committer.newest_entry(first) == committed:
        assert run(world, 1) == []
    assert run(world, 2) == []
    slow.store_fails = False
    run(world, 8)
    newest = world.store[-1]
    assert newest.epoch > committed
    assert {ref.epoch for refs in newest.entries.values() for ref in refs} == {newest.epoch}


@pytest.mark.parametrize("seed", range(4))
def test_no_loss_needs_what_is_gone(seed: int) -> None:
    """`run` looks for epochs that nobody can deliver, after each one."""
    rng, world = random.Random(seed), started("8s")
    for _ in range(6):
        slot = rng.choice(sorted(world.tasks))
        world.kill(slot)
        if rng.random() < 0.3:
            world.start_coordinator()
        run(world, rng.randrange(9))
        world.start_task(slot)
        run(world, rng.randrange(9))
    run(world, 30)
    assert {task.phase for task in world.tasks.values()} == {"Live"}
    assert world.store[-1].epoch >= world.head - 24


def test_a_restart_replays_what_the_target_allows() -> None:
    world = started("10s")
    run(world, 30)
    for _ in range(24):
        run(world, 1)
        tasks = world.reports[-1]["tasks"]
        assert all(t["replaySeconds"] <= 10 + EPOCH_S for t in tasks)
        for task in tasks:
            epochs = task["stableEpoch"] - task["replayFrom"]
            assert task["replaySeconds"] == pytest.approx(epochs * EPOCH_S, rel=0.1)


def test_left_out_checkpoints_are_no_problem() -> None:
    world = started("1000s", interval_epochs=1)  # one in 30
    for _ in range(25):
        run(world, 1)
        assert not world.coordinator.problems(world.now)
    for task in world.tasks.values():
        task.store_fails = True
    run(world, 80)
    found = [p.kind for p in world.coordinator.checkpoint_problems(world.now)]
    assert found == [CheckpointProblemKind.STALLED]


def test_a_replica_that_cannot_save_is_replaced_when_one_is_due() -> None:
    parts = [PARTS[0], replace(PARTS[1], replicas=2)]
    world = World(parts, replay_target="10s")
    world.start_all()
    run(world, 12)
    world.tasks[SUMS].store_fails = True
    run(world, 60)
    assert world.store[-1].entries["sums/1"][0].epoch >= world.head - 40


def test_a_replica_with_a_lent_state_gets_a_checkpoint() -> None:
    parts = [PARTS[0], replace(PARTS[1], replicas=2)]
    world = World(parts, lends=True, replay_target="1000s")
    world.start_all()
    run(world, 30)
    world.kill(SUMS)
    world.start_task(SUMS)
    run(world, 12)
    assert world.tasks[SUMS].core.status.lent_from is not None
    assert world.tasks[SUMS].phase == "Live"


def test_a_partition_that_catches_up_saves_meanwhile() -> None:
    world = started(None)
    world.kill(SUMS)
    run(world, 40)
    task = world.start_task(SUMS)
    world.poll_rounds(4)
    saved = set()
    while task.state_epoch < world.head:
        world.work(SUMS, 4)
        world.poll_rounds(2)
        saved |= {ref.epoch for ref in task.core.saver.saved()}
    assert len(saved) > 5


def test_a_log_near_its_budget_gets_a_checkpoint() -> None:
    world = started("1000s")
    newest = world.store[-1].epoch
    assert run(world, 12) == []
    world.tasks[SUMS].core.status.ports = LargeLog(world.generation.topology.spec.log_budget)
    assert run(world, 12)[0] > newest
