"""The report on queries whose tasks are gone."""

from __future__ import annotations

from typing import Any

from coordinator_world import World, started

from rekindle.topology.model import Slot


def _query(world: World, name: str) -> dict[str, Any]:
    rows = world.reports[-1]["queries"]
    return next(dict(row) for row in rows if row["name"] == name)


def _kill_all_of(world: World, segment: str) -> None:
    for slot in [s for s in world.tasks if s.segment == segment]:
        world.kill(slot)


def test_a_lost_query_stays_at_its_checkpoint() -> None:
    world = started()
    sink = _query(world, "q-both")["stableEpoch"]
    _kill_all_of(world, "both")
    world.rounds(20)
    checkpoint = world.store[-1].epoch
    assert checkpoint <= _query(world, "q-both")["stableEpoch"] <= sink


def test_a_new_coordinator_knows_what_was_written() -> None:
    world = started()
    _kill_all_of(world, "both")
    world.start_coordinator()
    world.rounds(20)
    assert _query(world, "q-both")["stableEpoch"] >= world.store[-1].epoch > 0


def test_the_lag_of_a_lost_query_counts_from_its_checkpoint() -> None:
    world = started(epochs=30)
    _kill_all_of(world, "both")
    world.rounds(4)
    assert _query(world, "q-both")["lagSeconds"] < 10


def test_epochs_that_no_task_wrote_are_not_reported() -> None:
    world = started()
    before = _query(world, "q-both")["stableEpoch"]
    world.tasks[Slot("both", 0, 0)].frozen = True
    world.run(5)
    assert _query(world, "q-both")["stableEpoch"] <= max(before, world.store[-1].epoch)
