"""The report: queries whose tasks are gone, and the schema of the API server."""

from __future__ import annotations

import re
from typing import Any

from coordinator_world import World, started
from test_report import FULL

from rekindle.coordinator.core.report import MAX_CHECKPOINT_PROBLEMS
from rekindle.protocol import ConsistencyState, TaskPhase, TaskProblem
from rekindle.report import CheckpointProblemKind, report_json
from rekindle.task.core.hot_keys import HotKeys
from rekindle.task.core.partner import PartnerMessages
from rekindle.task.core.source import LiveSourceStatus
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.crd import resource_schema, undeclared_in_status


def _query(world: World, name: str) -> dict[str, Any]:
    rows = world.reports[-1]["queries"]
    return next(dict(row) for row in rows if row["name"] == name)


def _kill_all_of(world: World, segment: str) -> None:
    for slot in [s for s in world.tasks if s.segment == segment]:
        world.kill(slot)


class _HotKeys(HotKeys):
    def __init__(self, found: str) -> None:
        self.found = found

    def text(self, epoch: int) -> str:
        return self.found


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


def test_tentative_output_is_reported_with_its_newest_epoch() -> None:
    world = started()
    slot = Slot("both", 0, 0)
    consistency = world.tasks[slot].core.status.set_consistency
    consistency(ConsistencyState.UP_FAILURE, 14, ["left"], PartnerMessages())
    world.poll_rounds(4)
    (task,) = [t for t in world.reports[-1]["tasks"] if t["slot"] == slot.key]
    assert (task["outputState"], task["tentativeEpoch"]) == ("UP_FAILURE", 14)
    assert task["missingInputs"] == ["left"]
    consistency(ConsistencyState.STABLE, None, [], PartnerMessages())
    world.poll_rounds(4)
    (task,) = [t for t in world.reports[-1]["tasks"] if t["slot"] == slot.key]
    assert not {"outputState", "tentativeEpoch", "missingInputs"} & set(task)


def test_what_a_source_has_not_read_and_left_out_is_reported() -> None:
    world = started()
    slot = Slot("both", 0, 0)
    status = LiveSourceStatus("clicks", {"0": 5, "1": 2}, 3, "offset 7: no number")
    world.tasks[slot].core.status.source = status
    world.poll_rounds(20)
    (task,) = [t for t in world.reports[-1]["tasks"] if t["slot"] == slot.key]
    assert (task["sourceBehind"], task["badRecords"]) == (7, 3)
    assert task["badRecord"] == "offset 7: no number"


def test_a_hot_key_is_reported_while_the_task_has_one() -> None:
    world = started()
    slot = Slot("both", 0, 0)
    hot_keys = _HotKeys("about 60 % of its rows have one key")
    world.tasks[slot].core.status.hot_keys = hot_keys
    for text in (hot_keys.found, ""):
        hot_keys.found = text
        world.poll_rounds(20)
        (task,) = [t for t in world.reports[-1]["tasks"] if t["slot"] == slot.key]
        assert task.get("hotKey", "") == text


def test_the_lag_of_a_lost_query_counts_from_its_checkpoint() -> None:
    world = started(epochs=15)
    _kill_all_of(world, "both")
    world.poll_rounds(4)
    assert _query(world, "q-both")["lagSeconds"] < 10


def test_a_query_whose_sources_have_ended_is_finished() -> None:
    world = started()
    assert "finished" not in _query(world, "q-both")
    for slot in (s for s in world.tasks if s.segment != "both"):
        world.tasks[slot].core.status.last_epoch = 3
    world.poll_rounds(20)
    assert _query(world, "q-both")["finished"] is True


def test_a_coordinator_that_has_heard_of_no_source_knows_no_lag() -> None:
    world = started()
    for segment in {slot.segment for slot in world.tasks}:
        _kill_all_of(world, segment)
    world.start_coordinator()
    world.poll_rounds(20)
    assert "lagSeconds" not in _query(world, "q-both")


def test_epochs_that_no_task_wrote_are_not_reported() -> None:
    world = started()
    before = _query(world, "q-both")["stableEpoch"]
    world.tasks[Slot("both", 0, 0)].frozen = True
    world.run_epochs(5)
    assert _query(world, "q-both")["stableEpoch"] <= max(before, world.store[-1].epoch)


def _data_plane_schema() -> Any:
    return resource_schema()["properties"]["status"]["properties"]["dataPlane"]["properties"]


def test_the_crd_declares_every_field_of_the_report() -> None:
    assert undeclared_in_status({"dataPlane": report_json(FULL)}) == []


def test_the_crd_knows_every_phase_of_a_task() -> None:
    task = _data_plane_schema()["tasks"]["items"]["properties"]
    assert task["phase"]["enum"] == list(TaskPhase)


def test_the_crd_names_every_kind_of_checkpoint_problem() -> None:
    problems = _data_plane_schema()["checkpointProblems"]
    kind = problems["items"]["properties"]["kind"]
    assert re.findall(r"`(\w+)`", kind["description"]) == list(CheckpointProblemKind)
    assert problems["maxItems"] >= MAX_CHECKPOINT_PROBLEMS >= len(CheckpointProblemKind)
    assert all(len(k) <= kind["maxLength"] for k in CheckpointProblemKind)


def test_the_crd_accepts_kinds_of_a_newer_coordinator() -> None:
    """Otherwise the API server would refuse all of its reports until the CRD is replaced."""
    kind = _data_plane_schema()["checkpointProblems"]["items"]["properties"]["kind"]
    assert "enum" not in kind


def test_messages_of_checkpoint_problems_are_bounded() -> None:
    world = started()
    world.feed(lambda core, now: core.garbage_collected("x" * 5000, {}, now))
    world.poll_rounds(9)
    (problem,) = world.reports[-1]["checkpointProblems"]
    assert len(problem["message"]) == 1024
    assert world.reports[-1]["problems"] == [problem["message"]]


def test_a_task_that_cannot_save_is_reported() -> None:
    world = started()
    slot = Slot("both", 0, 0)
    task = world.tasks[slot]
    problem = TaskProblem(message="the store is down", saving=True)
    response = task.response().model_copy(update={"problem": problem})
    world.feed(lambda core, now: core.poll_answered(slot, task.incarnation, response, now))
    world.now += 2
    world.tick()
    saving = {t["slot"]: t.get("savingFails") for t in world.reports[-1]["tasks"]}
    assert saving.pop(slot.key) is True
    assert set(saving.values()) == {None}
