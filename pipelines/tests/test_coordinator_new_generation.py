"""A new generation: where new segments and queries start, what state is kept.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from coordinator_world import DIAMOND, World, next_polls, started

from rekindle.arrow_types import arrow_schema
from rekindle.checkpoints.manifest import Manifest
from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.files_sink import FilesSink
from rekindle.coordinator.checkpoints.beginnings import Beginnings, Unanswered
from rekindle.coordinator.checkpoints.new_generation import (
    checkpoint_epoch_at_or_after,
    empty_entry,
    start_generation,
)
from rekindle.coordinator.model import Generation
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.protocol import BegunWindow, EntryRef
from rekindle.streams.epochs import EpochBatch
from rekindle.topology.kinds.files import FilesSinkSpec
from rekindle.topology.model import Segment, Slot, partition_of
from rekindle_testing.fixtures.coordinator_parts import SCHEMA, SimulatedSegment, make_generation

pytestmark = pytest.mark.simulated


def test_new_segments_start_after_a_later_checkpoint_epoch() -> None:
    world = started()
    head = world.head
    parts = (
        *[replace(p, query=True) if p.name == "right" else p for p in DIAMOND],
        SimulatedSegment("new", ("left",), query=True),
    )
    world.change_generation(make_generation(parts, 2))
    for slot in world.generation.topology.slots():
        if slot not in world.tasks:
            world.start_task(slot)
    world.poll_rounds(4)
    newest = world.store[-1]
    start = newest.entries["new/0"][0].epoch
    assert (start + 1) % world.interval_epochs == 0
    assert start > head
    assert newest.queries["q-new"].epoch == start + 1
    assert newest.queries["q-right"].epoch == start + 1
    assert newest.queries["q-left"].epoch == 0
    assert world.tasks[Slot("new", 0, 0)].restored_from == start
    world.start_coordinator()
    world.poll_rounds(4)
    assert world.store[-1].entries["new/0"] == newest.entries["new/0"]
    assert world.store[-1].queries == newest.queries


def test_a_query_with_another_sink_starts_again() -> None:
    world = started()
    parts = [replace(p, sink="file:///y") if p.name == "left" else p for p in DIAMOND]
    world.change_generation(make_generation(parts, 2))
    world.poll_rounds(4)
    queries = world.store[-1].queries
    assert queries["q-left"].epoch > world.head - world.interval_epochs
    assert (queries["q-left"].epoch % world.interval_epochs, queries["q-both"].epoch) == (0, 0)
    given = next_polls(world)[Slot("left", 0, 0)].sinks
    assert [(s.query, s.from_epoch, s.sink.files and s.sink.files.url) for s in given] == [
        ("q-left", queries["q-left"].epoch, "file:///y")
    ]


def test_settings_of_a_stream_sink_change_in_place() -> None:
    def parts(retain: str) -> list[SimulatedSegment]:
        return [replace(p, retain=retain) if p.name == "left" else p for p in DIAMOND]

    world = World(parts("4Mi"))
    world.start_all()
    world.run_epochs(10)
    before = world.store[-1]
    world.change_generation(make_generation(parts("8Mi"), 2))
    world.poll_rounds(2)
    given = next_polls(world)[Slot("left", 0, 0)].sinks
    assert [s.sink.retained_bytes for s in given] == [8 << 20]
    world.run_epochs(10)
    after = world.store[-1]
    assert (after.generation, after.queries) == (2, before.queries)
    assert after.entries["left/0"][0].epoch > before.entries["left/0"][0].epoch + 4
    assert world.tasks[Slot("left", 0, 0)].response().sinks[0].durable >= after.epoch


def test_no_entry_is_committed_before_a_new_query_is_known() -> None:
    world = started()
    parts = [replace(p, query=True) if p.name == "right" else p for p in DIAMOND]
    world.change_generation(make_generation(parts, 2))
    while world.store[-1].generation != 2:
        world.tick()
    first_epoch = world.store[-1].queries["q-right"].epoch
    world.start_coordinator()  # the first coordinator ends before any task gets a restore point
    world.tasks[Slot("right", 0, 0)].sink_lag = 100
    world.run_epochs(3 * world.interval_epochs)
    assert world.tasks[Slot("right", 0, 0)].state_epoch > first_epoch
    assert world.store[-1].entries["right/0"][0].epoch < first_epoch
    world.tasks[Slot("right", 0, 0)].sink_lag = 0
    world.run_epochs(2 * world.interval_epochs)
    assert world.store[-1].entries["right/0"][0].epoch > first_epoch


def edited() -> tuple[World, Slot, Slot]:
    """The definition of `both` is replaced; the tasks of the old one continue."""
    world = started()
    parts = [replace(p, edit="-2") if p.name == "both" else p for p in DIAMOND]
    world.change_generation(make_generation(parts, 2), keep_old_pods=True)
    return world, Slot("both", 0, 0), Slot("both-2", 0, 0)


def written_by(world: World, slot: Slot) -> int:
    return max(durable for (p, _), durable in world.written.items() if p == partition_of(slot))


def test_obsolete_tasks_do_not_write_epochs_of_the_new_definition() -> None:
    world, old, new = edited()
    world.hold_writes = True  # the manifest with the new generation is written late
    world.run_epochs(3 * world.interval_epochs)
    world.hold_writes = False
    world.release_writes()
    world.start_task(new)
    world.run_epochs(5 * world.interval_epochs)
    first_epoch = world.store[-1].queries["q-both"].epoch
    assert world.tasks[old].state_epoch > first_epoch
    assert written_by(world, old) < first_epoch
    assert written_by(world, new) > first_epoch
    given = next_polls(world)[old]
    assert (
        given.sinks,
        given.upstreams,
        given.floor,
        given.restore,
    ) == ((), (), None, None)


def test_sinks_of_obsolete_tasks_stop_first() -> None:
    world, old, _ = edited()
    world.start_coordinator()
    world.run_epochs(3 * world.interval_epochs)
    assert not world.tasks[old].response().sinks
    assert written_by(world, old) < world.store[-1].queries["q-both"].epoch


@pytest.mark.parametrize("trouble", ["ignores_polls", "frozen"])
def test_an_obsolete_task_does_not_delay_a_generation(trouble: str) -> None:
    world, old, _ = edited()
    setattr(world.tasks[old], trouble, True)
    world.poll_rounds(2)
    assert world.store[-1].generation == 1
    world.poll_rounds(20)
    assert world.store[-1].generation == 2


def test_a_start_is_ahead_of_all_tasks() -> None:
    parts = [SimulatedSegment("src"), SimulatedSegment("new", ("src",), query=True)]
    generation = make_generation(parts, 3, interval_epochs=4)
    previous = replace(manifest_of(src={3: True}), epoch=3)
    found = start_generation(previous, generation, build_graph(generation.topology), head_epoch=6)
    assert found.entries["new/0"] == (empty_entry(11),)


def test_an_added_source_reports_its_first_epoch() -> None:
    world = started()
    assert not any(report["problems"] for report in world.reports)
    parts = (
        *DIAMOND,
        SimulatedSegment("more", partitions=2),
        SimulatedSegment("own", ("more",), query=True),
    )
    world.change_generation(make_generation(parts, 2))
    world.poll_rounds(8)
    begins = world.store[-1].entries["more/0"][0].epoch + 1
    assert begins > world.head
    assert world.reports[-1]["problems"] == [
        f"source more begins with epoch {begins}; rows of its earlier epochs are not read"
    ]
    world.change_generation(make_generation(parts, 3))
    world.poll_rounds(8)
    assert world.reports[-1]["problems"] == []


def with_operator_ids(generation: Generation, **segments: tuple[str, ...]) -> Generation:
    return replace(generation, operator_ids={**generation.operator_ids, **segments})


def manifest_of(**epochs: dict[int, bool]) -> Manifest:
    """Segment -> epoch of each entry -> whether it has state; all of partition 0."""
    entries = {
        f"{name}/0": tuple(
            EntryRef(e, f"{name}@{e}" if full else None, "d") for e, full in refs.items()
        )
        for name, refs in epochs.items()
    }
    return Manifest(seq=5, epoch=29, generation=2, fence=1, time="", entries=entries)


def fused(reader: bool) -> Generation:
    """The segments A and N of the generation before are fused into `an`; `reader`: `r` reads it."""
    parts = [
        SimulatedSegment("src"),
        SimulatedSegment("an", ("src",), operators=("op-A", "op-N"), query=not reader),
    ]
    parts += [SimulatedSegment("r", ("an",), query=True)] if reader else []
    return with_operator_ids(
        make_generation(parts, 3, interval_epochs=10), A=("op-A",), N=("op-N",)
    )


def test_a_segment_that_never_started_loses_no_state() -> None:
    generation = fused(reader=False)
    previous = manifest_of(src={29: True, 19: True}, A={29: True, 19: True}, N={39: False})
    found = start_generation(previous, generation, build_graph(generation.topology), head_epoch=35)
    assert [ref.epoch for ref in found.entries["an/0"]] == [29, 19]
    assert [a.sources for a in found.migrations] == [("A@29",), ("A@19",)]
    assert not found.problems


def test_epochs_of_a_segment_that_never_started_are_not_skipped() -> None:
    generation = fused(reader=False)
    previous = manifest_of(src={89: True, -1: False}, A={89: True, -1: False}, N={-1: False})
    found = start_generation(previous, generation, build_graph(generation.topology), head_epoch=95)
    assert found.entries["an/0"] == (empty_entry(-1),)
    assert not found.problems


def test_a_reader_keeps_no_entry_that_its_inputs_cannot_serve() -> None:
    generation = fused(reader=True)
    previous = manifest_of(
        src={29: True, 9: True},
        A={29: True, 9: True},
        N={29: True, 19: True},
        r={29: True, 19: True},
    )
    graph = build_graph(generation.topology)
    found = start_generation(previous, generation, graph, head_epoch=45)
    assert [ref.epoch for ref in found.entries["r/0"]] == [29]
    assert not found.problems
    changed = replace(previous, entries={**previous.entries, "r/0": previous.entries["r/0"][1:]})
    found = start_generation(changed, generation, graph, head_epoch=45)
    assert found.entries["r/0"] == (empty_entry(29),)
    assert "r/0 loses its state" in found.problems[0]


BOTH = {29: True, 19: True}


@pytest.mark.parametrize(
    ("reader", "own_reader", "starts"),  # q loses its state, but in the first one
    [(BOTH, BOTH, [29]), ({39: True, 19: True}, {19: True}, [39]), ({19: True}, {19: True}, [29])],
)
def test_what_a_reader_no_longer_has_limits_its_own_readers(
    reader: dict[int, bool], own_reader: dict[int, bool], starts: list[int]
) -> None:
    parts = [
        SimulatedSegment("src"),
        SimulatedSegment("an", ("src",), operators=("op-A", "op-N")),
        SimulatedSegment("r", ("an",)),
        SimulatedSegment("q", ("r",), query=True),
    ]
    generation = with_operator_ids(
        make_generation(parts, 3, interval_epochs=10), A=("op-A",), N=("op-N",)
    )
    previous = manifest_of(
        src={29: True, 9: True}, A={29: True, 9: True}, N=BOTH, r=reader, q=own_reader
    )
    graph = build_graph(generation.topology)
    found = start_generation(previous, generation, graph, head_epoch=45)
    assert [ref.epoch for ref in found.entries["q/0"]] == starts


def test_entries_of_inputs_that_were_lost_before_limit_nobody() -> None:
    """Their logs have the epochs: floors follow what their readers hold."""
    generation = make_generation(
        [SimulatedSegment("src"), SimulatedSegment("r", ("src",), query=True)]
    )
    previous = manifest_of(src={29: True, 19: True}, r={9: True})
    graph = build_graph(generation.topology)
    found = start_generation(previous, generation, graph, head_epoch=45)
    assert found.entries == previous.entries
    assert not found.problems


def test_operators_in_other_segments_keep_their_state() -> None:
    world = started()
    committed = world.store[-1].epoch
    parts = tuple(
        replace(p, name="both2", operators=("op-both", "op-more")) if p.name == "both" else p
        for p in DIAMOND
    )
    generation = make_generation(parts, 2)
    older = world.generation.operator_ids
    generation = replace(generation, operator_ids={**older, **generation.operator_ids})
    world.allow_migrations = True
    world.change_generation(generation)
    world.poll_rounds(4)
    newest = world.store[-1]
    assert [r.epoch for r in newest.entries["both2/0"]] == [committed]
    (migration,) = world.migrations
    assert migration.sources == (f"both/0@{committed}",)
    assert "both/0" not in newest.entries


@pytest.mark.parametrize(("epoch", "checkpoint_epoch"), [(-1, -1), (0, 3), (3, 3), (4, 7), (7, 7)])
def test_a_start_is_after_a_checkpoint_epoch(epoch: int, checkpoint_epoch: int) -> None:
    assert checkpoint_epoch_at_or_after(epoch, 4) == checkpoint_epoch


def test_an_older_generation_changes_nothing() -> None:
    world = started()
    older = make_generation([SimulatedSegment("x")], 0)
    world.feed(lambda core, now: core.generation_seen(older, now))
    assert world.coordinator.generation is world.generation


def definitions(world: World) -> dict[str, tuple[str, int]]:
    return {n: (q.definition, q.generation) for n, q in world.store[-1].queries.items()}


def test_a_changed_definition_has_another_identity() -> None:
    world = started()
    before = definitions(world)
    assert {generation for _, generation in before.values()} == {1}
    parts = [replace(p, edit="-2", partitions=2) if p.name == "both" else p for p in DIAMOND]
    world.change_generation(make_generation(parts, 2))
    world.poll_rounds(20)
    after = definitions(world)
    assert after["q-left"] == before["q-left"]
    assert after["q-both"][1] == 2
    assert after["q-both"][0] != before["q-both"][0]
    world.start_task(Slot("both-2", 0, 0))
    world.poll_rounds(4)
    (given,) = next_polls(world)[Slot("both-2", 0, 0)].sinks
    assert (given.definition, given.generation) == after["q-both"]


def test_a_segment_that_keeps_state_may_be_another_definition() -> None:
    """One of its operators keeps its id and state, but the query's input is new."""
    old = make_generation(
        [SimulatedSegment("src"), SimulatedSegment("an", ("src",), query=True)], 1
    )
    previous = start_generation(None, old, build_graph(old.topology), head_epoch=-1)
    manifest = replace(manifest_of(src={29: True}), queries=previous.queries)
    entries = {**manifest.entries, "an/0": (EntryRef(29, "an@29", "d"),)}
    parts = [
        SimulatedSegment("src"),
        SimulatedSegment("an", ("src",), edit="-2", operators=("op-an", "op-N"), query=True),
    ]
    new = with_operator_ids(make_generation(parts, 2), an=("op-an",))
    graph = build_graph(new.topology)
    found = start_generation(replace(manifest, entries=entries), new, graph, head_epoch=35)
    assert found.entries["an-2/0"][0].epoch == 29
    assert found.queries["q-an"].generation == 2
    assert found.queries["q-an"].epoch > 35


def test_a_query_of_an_old_release_continues() -> None:
    generation = make_generation([SimulatedSegment("src", query=True)], 4)
    first = start_generation(None, generation, build_graph(generation.topology), head_epoch=-1)
    unnamed = {n: replace(q, definition="", generation=0) for n, q in first.queries.items()}
    previous = replace(manifest_of(src={9: True}), queries=unnamed)
    found = start_generation(previous, generation, build_graph(generation.topology), head_epoch=12)
    assert found.queries["q-src"] == replace(first.queries["q-src"], generation=0)


def opened_sink(world: World, directory: Path, slot: Slot) -> FilesSink:
    """The sink that a task opens for its assignment."""
    (given,) = next_polls(world)[slot].sinks
    definition = Definition(
        given.definition, given.generation, given.from_epoch, world.interval_epochs
    )
    spec = FilesSinkSpec(url=f"file://{directory}")
    return FilesSink(
        given.query, spec, slot.partition, "uid", arrow_schema(SCHEMA), definition=definition
    )


def test_epochs_after_the_checkpoint_are_written_once(tmp_path: Path) -> None:
    """Checkpoints stall and sinks continue; then all tasks stop and the definition changes."""
    world = started()
    old = opened_sink(world, tmp_path, Slot("both", 0, 0))
    world.store_up = False
    world.run_epochs(30)
    written = world.tasks[Slot("both", 0, 0)].state_epoch
    rows = pa.table({"a": [1]}, arrow_schema(SCHEMA))
    for epoch in range(written + 1):
        old.write(EpochBatch("s", 0, epoch, 0, rows, ""))
    for slot in list(world.tasks):
        world.kill(slot)
    world.store_up = True
    parts = [replace(p, edit="-2", partitions=2) if p.name == "both" else p for p in DIAMOND]
    world.change_generation(make_generation(parts, 2))
    world.start_coordinator()
    world.poll_rounds(20)
    for partition in (0, 1):
        world.start_task(Slot("both-2", partition, 0))
    world.poll_rounds(4)
    assert world.store[-1].queries["q-both"].epoch < written
    begins = [opened_sink(world, tmp_path, Slot("both-2", p, 0)).last_epoch() + 1 for p in (0, 1)]
    assert begins == [checkpoint_epoch_at_or_after(written, world.interval_epochs) + 1] * 2


def test_a_new_definition_starts_once_its_source_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = BegunWindow(operator="op-both-2", after_us=7)
    answered: list[str] = []

    def begun_windows(_: Beginnings, segment: Segment, epoch: int) -> tuple[BegunWindow, ...]:
        if segment.id != "both-2":
            return ()
        if not answered:
            raise Unanswered("src")
        return (begun,)

    monkeypatch.setattr(Beginnings, "begun_windows", begun_windows)
    monkeypatch.setattr(
        Beginnings, "epochs_to_ask", lambda _, segment: (11,) if segment.is_source else ()
    )
    world, _, new = edited()
    world.start_task(new)
    world.kill(Slot("src", 0, 0))
    world.kill(Slot("src", 0, 1))
    world.poll_rounds(8)
    assert next_polls(world)[new].restore is None
    assert any("wait for source src" in p for p in world.reports[-1]["problems"])
    world.start_task(Slot("src", 0, 0))
    world.run_epochs(1)
    assert next_polls(world)[Slot("src", 0, 0)].event_times_of == (11,)
    assert next_polls(world)[new].event_times_of == ()
    answered.append("src")
    world.poll_rounds(2)
    restore = next(p.restore for p in world.tasks[new].polls if p.restore is not None)
    assert restore.begun == (begun,)
    assert not any("wait for source" in p for p in world.reports[-1]["problems"])
