"""A task while replicas disagree: chained digests, paused sinks, a discarded log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from task_world import SCHEMA, World

from rekindle.protocol import SinkAssignment
from rekindle.streams.digest import chain_digest, chained_digest_from
from rekindle.streams.log import OutputLog
from rekindle.task.core.status import KEPT_DIGESTS, REPORTED_DIGESTS
from rekindle.task.discard import discard_log_if_marked, mark_for_discard
from rekindle.topology.spec import SinkSpec
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

SINK = SinkAssignment(
    query="q", from_epoch=0, sink=SinkSpec.model_validate({"files": {"url": "memory://x"}})
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.sinks.stop()
    made.saver.stop(1)


def test_a_chained_digest_covers_every_epoch_since_its_base(world: World) -> None:
    world.run_to(8)
    chained = chained_digest_from(-1)
    for batch in world.log:
        chained = chain_digest(chained, batch.epoch, batch.watermark, batch.digest)
    answer = world.status.response(1)
    assert answer.chained[max(answer.chained)] == chained == world.loop.state.chained_digest
    assert answer.digests == {b.epoch: b.digest for b in world.log}


def test_a_chained_digest_continues_from_a_checkpoint(tmp_path: Path) -> None:
    whole = World(tmp_path / "whole")
    whole.run_to(25)
    start = whole.saved[0]
    restored = World(tmp_path / "restored", start)
    restored.run_to(25)
    assert restored.loop.state.chained_digest == whole.loop.state.chained_digest


def test_requested_digests_are_kept(world: World) -> None:
    world.status.request_digests([3])
    for epoch in range(2 * KEPT_DIGESTS):
        world.status.computed(epoch, f"d{epoch}", f"c{epoch}")
    answer = world.status.response(1)
    newest = 2 * KEPT_DIGESTS - 1
    assert set(answer.chained) == {3, *range(newest - REPORTED_DIGESTS + 1, newest + 1)}


def test_sinks_write_no_epoch_after_the_agreed_one(world: World) -> None:
    world.sinks.pause_after(4)
    world.sinks.assign([SINK])
    world.run_to(20)
    eventually(lambda: world.sinks.progress()[0].durable == 4)
    assert world.sinks.wait_until_durable(world.log.last, 1.0), "it does not wait for later epochs"
    assert world.sink.epochs == [0, 1, 2, 3, 4]
    world.sinks.pause_after(None)
    eventually(lambda: world.sinks.progress()[0].durable == world.log.last)


def test_a_conflicting_file_is_reported(world: World) -> None:
    world.sink.conflict = "q-p000-e000000000003.parquet exists with rows that differ"
    world.sinks.assign([SINK])
    world.run_to(5)
    eventually(lambda: world.status.response(1).sinks[0].conflict == world.sink.conflict)


def test_a_conflict_ends_when_the_wrong_file_is_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.task.core.sink.RETRY_CONFLICTS_S", 0.0)
    world.sink.conflict, world.sink.deleted = "epoch 0 exists with rows that differ", True
    world.sinks.pause_after(-1)
    world.sinks.assign([SINK])
    world.run_to(5)
    world.sinks.pause_after(4)
    eventually(lambda: world.sinks.progress()[0].durable == 4)
    eventually(lambda: world.status.response(1).sinks[0].conflict is None)


def test_checks_of_conflicts_on_a_slow_store_leave_time_to_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[tuple[float, float]] = []

    def check(may_write: Callable[[int], bool]) -> None:
        began = time.monotonic()
        time.sleep(0.2)
        checks.append((began, time.monotonic()))

    monkeypatch.setattr("rekindle.task.core.sink.RETRY_CONFLICTS_S", 0.0)
    monkeypatch.setattr(world.sink, "retry_conflicts", check)
    world.sink.conflict = "epoch 0 exists with rows that differ"
    world.sinks.assign([SINK])
    world.run_to(5)
    eventually(lambda: len(checks) > 2)
    for (began, ended), (next_began, _) in itertools.pairwise(checks):
        assert next_began - ended >= 3 * (ended - began)


def test_a_log_that_was_marked_is_deleted_once(tmp_path: Path) -> None:
    directory = tmp_path / "log" / "s" / "0"
    World(directory).run_to(3)
    mark_for_discard(directory)
    assert discard_log_if_marked(directory)
    assert not discard_log_if_marked(directory)
    assert OutputLog(directory, "s", 0, SCHEMA).last == -1
