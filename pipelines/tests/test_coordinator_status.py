"""The report: queries whose tasks are gone, and the schema of the API server."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from coordinator_world import World, started

from rekindle.coordinator.edge.objects import data_plane_document
from rekindle.coordinator.model import CheckpointReport, QueryReport, Report, TaskReport
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.crd import resource_schema, undeclared_in_status

T = TypeVar("T")


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
    world.poll_rounds(20)
    checkpoint = world.store[-1].epoch
    assert checkpoint <= _query(world, "q-both")["stableEpoch"] <= sink


def test_a_new_coordinator_knows_what_was_written() -> None:
    world = started()
    _kill_all_of(world, "both")
    world.start_coordinator()
    world.poll_rounds(20)
    assert _query(world, "q-both")["stableEpoch"] >= world.store[-1].epoch > 0


def test_the_lag_of_a_lost_query_counts_from_its_checkpoint() -> None:
    world = started(epochs=30)
    _kill_all_of(world, "both")
    world.poll_rounds(4)
    assert _query(world, "q-both")["lagSeconds"] < 10


def test_epochs_that_no_task_wrote_are_not_reported() -> None:
    world = started()
    before = _query(world, "q-both")["stableEpoch"]
    world.tasks[Slot("both", 0, 0)].frozen = True
    world.run_epochs(5)
    assert _query(world, "q-both")["stableEpoch"] <= max(before, world.store[-1].epoch)


def _filled(kind: type[T]) -> T:
    """An object without fields that are None."""
    values = {"str": "x", "int": 1, "bool": True, "float": 1.0}
    return kind(**{f.name: values[str(f.type).split(" ")[0]] for f in fields(kind)})  # type: ignore[arg-type]


def test_the_crd_declares_every_field_of_the_report() -> None:
    report = Report(
        fence=1,
        tasks=(_filled(TaskReport),),
        queries=(_filled(QueryReport),),
        diverged=("x",),
        inconsistent=("x",),
        problems=("x",),
        generation=1,
        head_epoch=1,
        store="x",
        checkpoint=_filled(CheckpointReport),
    )
    assert len(data_plane_document(report)) == len(fields(Report))
    assert undeclared_in_status({"dataPlane": data_plane_document(report)}) == []


def test_the_crd_knows_every_phase_of_a_task() -> None:
    status = resource_schema()["properties"]["status"]["properties"]
    task = status["dataPlane"]["properties"]["tasks"]["items"]["properties"]
    assert task["phase"]["enum"] == list(TaskPhase)
