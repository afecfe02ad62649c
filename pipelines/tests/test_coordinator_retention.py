"""I5: no epoch is truncated, and no entry dropped, that a consumer may still need.

Random histories of work, checkpoints, deaths, restores, freezes, store outages and coordinator
restarts, with an old coordinator that still runs, of slow sinks and of edits. Each manifest must
satisfy I2 as well: all sinks have what it counts as written.

Design: docs/design/coordinator.md#retention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from coordinator_world import DIAMOND, World, started
from hypothesis import given
from hypothesis import strategies as st

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.checkpoints.retention import (
    Progress,
    floors,
    keep_entries,
    restore_entry,
)
from rekindle.coordinator.model import Generation
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.protocol import EntryRef
from rekindle.topology.model import Partition, Slot
from rekindle_testing.fixtures.coordinator_parts import (
    SimulatedSegment,
    make_generation,
    make_topology,
)
from rekindle_testing.fixtures.simulated_task import SimulatedTask

pytestmark = pytest.mark.simulated

ACTIONS = st.sampled_from(
    ["work", "work", "poll", "poll", "head", "tick", "round", "round"]
    + ["run"] * 7
    + ["kill", "kill", "start", "start", "reboot", "freeze", "freeze", "freeze", "thaw"]
    + ["lag", "lag", "edit"]
    + ["coordinator", "coordinator", "keep_old", "zombie", "zombie", "store", "hold", "release"]
)


def act(world: World, action: str, number: int) -> None:
    slots = list(world.generation.topology.slots())
    slot = slots[number % len(slots)]
    task = world.tasks.get(slot)
    match action:
        case "work" if task:
            world.work(slot, 1 + number % 7)
        case "poll":
            world.poll(slot)
        case "head":
            world.release_epochs(1 + number % 5)
        case "tick":
            world.now += 0.25 * (number % 8)
            world.tick()
        case "round":
            world.poll_round()
        case "run":
            world.run_epochs(1 + number % 3)
        case "kill":
            world.kill(slot)
        case "start":
            world.start_task(slot)
        case "reboot" if task:
            task.reboot()
        case "freeze" if task:
            task.frozen = True
        case "thaw" if task:
            task.frozen = False
        case "lag" if task:
            task.sink_lag = number % 40
        case "edit":
            world.change_generation(edited(world.generation.number + 1))
        case "coordinator":
            world.start_coordinator()
        case "keep_old":
            world.start_coordinator(keep_old_coordinator=True)
        case "zombie" if world.zombie:
            world.poll(slot, world.zombie)
        case "store":
            world.store_up = not world.store_up
        case "hold":
            world.hold_writes = True
        case "release":
            world.hold_writes = False
            world.release_writes()


def edited(number: int) -> Generation:
    """Each adds or removes the query of `right`, and changes the sink of the one of `left`."""
    changes: dict[str, dict[str, Any]] = {
        "right": {"query": number % 2 == 0},
        "left": {"sink": f"file:///{number}"},
    }
    parts = [replace(p, **changes.get(p.name, {})) for p in DIAMOND]
    return make_generation(parts, number)


@given(
    st.sampled_from([3, 6]),
    st.booleans(),
    st.lists(st.tuples(ACTIONS, st.integers(0, 1000)), min_size=8, max_size=14),
)
def test_no_history_truncates_what_is_needed_and_all_recovers(
    epochs: int, lends: bool, history: list[tuple[str, int]]
) -> None:
    world = started(epochs, lends)
    for action, number in history:
        act(world, action, number)
        assert not world.undeliverable_epochs(), (action, number)
    heal(world)
    assert not world.undeliverable_epochs()
    assert lags(world) == []


def heal(world: World) -> None:
    world.store_up, world.hold_writes, world.zombie = True, False, None
    world.release_writes()
    for slot in world.generation.topology.slots():
        if slot not in world.tasks:
            world.start_task(slot)
        world.tasks[slot].frozen = False
        world.tasks[slot].sink_lag = 0
    world.list_pods()
    for _ in range(60 + world.head // 4):
        if not lags(world):
            break
        world.run_epochs(1)
    world.run_epochs(world.interval_epochs + 1)


def may_be_live(task: SimulatedTask) -> bool:
    return task.core.status.may_be_live


def lags(world: World) -> list[str]:
    """Partitions that do not run, are not checkpointed, or keep more than without failures."""
    newest = world.store[-1]
    found = [
        f"{s.key} is at {t.state_epoch}"
        for s, t in world.tasks.items()
        if t.state_epoch < world.head
    ]
    found += [f"{s.key} may not be Live" for s, t in world.tasks.items() if not may_be_live(t)]
    found += [f"{key} keeps {refs}" for key, refs in newest.entries.items() if len(refs) > 1]
    if newest.epoch < world.head - 2 * world.interval_epochs:
        found.append(f"the newest checkpoint is at {newest.epoch}, the head at {world.head}")
    if world.tasks[next(iter(world.tasks))].log_base == 0:
        found.append("no log is truncated")
    return found


def test_a_log_of_an_earlier_boot_does_not_move_the_position() -> None:
    world = World(
        [
            SimulatedSegment("src"),
            SimulatedSegment("mid", ("src",)),
            SimulatedSegment("end", ("mid",), query=True),
        ]
    )
    world.start_all()
    world.run_epochs(9)
    mid, end = Slot("mid", 0, 0), Slot("end", 0, 0)
    world.kill(end)
    world.run_epochs(9)  # `end` is at 7, and pins it
    world.tasks[mid].reports_log = False  # it is doubted
    world.tasks[mid].reboot()
    world.start_task(end)
    world.poll_rounds(2)
    assert world.tasks[mid].restored_from == 7
    world.work(mid, 1)
    world.run_while_stuck(mid, 8)  # `end` reads from the log of `mid`, whose engine is still at 8
    assert world.tasks[end].state_epoch > 11
    assert not world.undeliverable_epochs()
    world.run_epochs(10)
    assert world.tasks[mid].state_epoch == world.head


def test_a_floor_is_the_least_of_its_readers_holds() -> None:
    graph = build_graph(make_topology(DIAMOND))
    manifest = manifest_of({"src/0": [7], "left/0": [7], "left/1": [7, 3], "right/0": [7]})
    found = floors(graph, manifest, Progress(positions={Partition("right", 0): (5,)}))
    assert found[Partition("src", 0)] == 3
    assert Partition("left", 0) not in found, "its reader `both` is not in the manifest"


def test_no_floor_while_a_reader_has_unknown_progress() -> None:
    graph = build_graph(make_topology(DIAMOND))
    manifest = manifest_of({p.key: [7] for p in graph.partitions})
    found = floors(graph, manifest, Progress(unknown=frozenset({Partition("left", 1)})))
    assert Partition("src", 0) not in found
    assert found[Partition("left", 0)] == 7


def test_a_stream_that_only_sinks_read_is_held_by_its_own_entry() -> None:
    graph = build_graph(make_topology([SimulatedSegment("src", query=True)]))
    found = floors(graph, manifest_of({"src/0": [11]}), Progress())
    assert found == {Partition("src", 0): 11}


def test_a_partition_that_is_behind_pins_entries_of_all_its_ancestors() -> None:
    graph = build_graph(
        make_topology(
            [SimulatedSegment("a"), SimulatedSegment("b", ("a",)), SimulatedSegment("c", ("b",))]
        )
    )
    a, b, c = (Partition(n, 0) for n in "abc")
    # c has no entry at 15 yet: it would restore 11.
    available = {a: refs(15, 11, 7), b: refs(15, 7), c: refs(11, 7)}
    kept = keep_entries(graph, available, previous={}, progress=Progress(positions={b: (7,)}))
    assert epochs(kept["c/0"]) == [11]
    assert epochs(kept["b/0"]) == [15, 7], "7 is its newest entry at or before c's 11"
    assert epochs(kept["a/0"]) == [15, 7]


def test_an_entry_that_is_being_loaded_is_kept() -> None:
    graph = build_graph(make_topology([SimulatedSegment("a")]))
    a = Partition("a", 0)
    kept = keep_entries(
        graph, {a: refs(15, 11, 7)}, previous={}, progress=Progress(restoring={a: (7,)})
    )
    assert epochs(kept["a/0"]) == [15, 7]


def test_entries_through_which_a_log_is_in_the_store_are_kept() -> None:
    """`b` waits since epoch 10. Of `a`'s log, what is up to 30 is in the store, and soon up to
    40. While `a` has no task, nothing of that is dropped."""
    graph = build_graph(make_topology([SimulatedSegment("a"), SimulatedSegment("b", ("a",))]))
    a, b = (Partition(n, 0) for n in "ab")
    available = {a: refs(50, 40, 30, 20, 10, 5), b: refs(10)}
    runs = Progress({a: (55,)})
    kept = keep_entries(graph, available, {}, replace(runs, shipped={a: (30, 40)}))
    assert epochs(kept["a/0"]) == [50, 40, 30, 10]
    assert keep_entries(graph, available, kept, Progress()) == kept
    assert epochs(keep_entries(graph, available, kept, runs)["a/0"]) == [50, 10]
    older = keep_entries(graph, available, {}, replace(runs, shipped={a: (7,)}))
    assert epochs(older["a/0"]) == [50, 10], "it would pin more of the inputs"


def refs(*numbers: int) -> tuple[EntryRef, ...]:
    return tuple(EntryRef(n, f"o{n}", f"d{n}") for n in numbers)


def epochs(entries: tuple[EntryRef, ...]) -> list[int]:
    return [e.epoch for e in entries]


def manifest_of(entries: dict[str, list[int]]) -> Manifest:
    newest = max(max(e) for e in entries.values())
    kept = {k: refs(*v) for k, v in entries.items()}
    return Manifest(seq=1, epoch=newest, generation=1, fence=1, time="", entries=kept)


GAP_S = 12


@pytest.fixture
def short_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.coordinator.tasks.input_gaps.GAP_S", float(GAP_S))


def world_with_gap(missing: int) -> tuple[World, Slot]:
    """A replica of a partition is behind a checkpoint, and so many of the epochs that it reads next
    are in no log any more: the entry from which to compute them was lost."""
    parts = [SimulatedSegment("src"), SimulatedSegment("mid", ("src",), replicas=2, query=True)]
    world, behind = World(parts), Slot("mid", 0, 1)
    world.start_all()
    world.run_epochs(8)
    position = world.tasks[behind].state_epoch
    while world.store[-1].epoch < position + 4:
        world.run_while_stuck(behind, 1)
    src = world.tasks[Slot("src", 0, 0)]
    src.log_base = position + 1 + missing
    src.step(partial(src.core.log_truncated, src.log_base))
    return world, behind


@pytest.mark.usefixtures("short_gap")
def test_a_task_whose_input_nobody_has_starts_again() -> None:
    world, behind = world_with_gap(missing=2)
    world.run_epochs(GAP_S - 2)
    assert world.tasks[behind].boot == 0
    world.run_epochs(10)
    assert world.tasks[behind].boot == 1
    assert world.tasks[behind].state_epoch >= world.head - 2


@pytest.mark.usefixtures("short_gap")
def test_a_task_that_is_slow_goes_on() -> None:
    world, behind = world_with_gap(missing=0)
    world.run_while_stuck(behind, GAP_S + 10)
    assert world.tasks[behind].boot == 0


@pytest.mark.usefixtures("short_gap")
def test_a_new_coordinator_does_not_restart_a_task_that_waits_for_an_input() -> None:
    """It has never seen the log of the task grow."""
    world, behind = world_with_gap(missing=0)
    world.start_coordinator()
    world.run_while_stuck(behind, GAP_S + 10)
    assert world.tasks[behind].boot == 0


@given(
    st.sets(st.integers(-1, 60), min_size=1, max_size=5),
    st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
def test_a_restored_task_has_all_that_its_readers_may_need(
    epochs: set[int], held_log: tuple[int, int] | None
) -> None:
    refs = tuple(EntryRef(e, f"{e}", "") for e in sorted(epochs, reverse=True))
    entry = restore_entry(refs, held_log)
    needed = set(range(refs[-1].epoch + 1, 70))
    in_log = set() if held_log is None else set(range(held_log[0], held_log[1] + 1))
    assert needed - in_log <= set(range(entry.epoch + 1, 70)), "the others are computed again"
    newer = [ref for ref in refs if ref.epoch > entry.epoch]
    assert all(needed - in_log - set(range(ref.epoch + 1, 70)) for ref in newer)
