"""Histories of two replicas that are restored while they work: epochs, catch-up, checkpoints,
compaction, several readers, reads that fail, objects that are damaged and repaired, garbage
collection and kills, in any order with the fetch. What they compute is what a task computes that
never fails, and what is committed can be restored."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoints_manifests import MemoryObjects
from window_parts import SLIDE, folded, history, shape_of

from rekindle.backoff import BackoffPolicy
from rekindle.checkpoints import fetching
from rekindle.checkpoints import state as state_module
from rekindle.checkpoints.fetching import Fetch
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.manifests import ManifestStore
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store, UnreadableObject
from rekindle.engine.failure import DiskFull
from rekindle.engine.model import State
from rekindle.engine.state import compaction
from rekindle.engine.state.compaction import compact_all, join_single_deltas
from rekindle.engine.state.operator import EMPTY, OperatorState, match_columns
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import WindowShape, advance
from rekindle.errors import ObjectMissing, StateLost, StoreError
from rekindle.objects import Retry
from rekindle.protocol import EntryRef, RestorePoint
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_EPOCH
from rekindle.task.core.saver import SaverCore, SaverEffect, SaveState
from rekindle.task.state import TaskState
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.simulated

EPOCHS = 12
RETAIN = 2
REPLICAS = (0, 1)


@pytest.fixture(autouse=True, scope="module")
def many_small_objects() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "OBJECT_BYTES", 1)
        patch.setattr(compaction, "PAGE_ROWS", 4)
        patch.setattr(compaction, "FREQUENT_ROWS", 2)
        patch.setattr(compaction, "MAX_VALUE_DELTAS", 2)
        patch.setattr(compaction, "WAITING_BYTES", 2_000)
        patch.setattr(compaction, "MAX_SINGLE_DELTAS", 3)
        patch.setattr(fetching, "_BACKOFF", BackoffPolicy(first_s=0.001, longest_s=0.002))
        yield


@dataclass(frozen=True, eq=False)
class Model:
    """What a task computes that never fails: after each epoch."""

    shape: WindowShape
    steps: Sequence[tuple[pa.Table, tuple[int, int, int]]]
    closed: Sequence[pa.Table]
    states: Sequence[OperatorState]

    def watermark(self, epoch: int) -> int:
        """After the epoch."""
        _, (_, _, after) = self.steps[epoch]
        return after

    def digest(self, epoch: int) -> str:
        return self.states[epoch].digest if epoch >= 0 else ""


@cache
def closed_digest(known: Model, first: int, end: int) -> str:
    """Of the windows that epochs close."""
    return digest_table(pa.concat_tables(known.closed[first:end]))


@cache
def rows_digest(known: Model, epoch: int) -> str:
    """Of the rows of the state after an epoch."""
    return digest_table(folded(known.states[epoch] if epoch >= 0 else EMPTY, known.shape))


@cache
def model(panes: int, seed: int) -> Model:
    rng = np.random.default_rng(seed)
    drawn: list[tuple[list[Any], int]] = []
    watermark_us = 0
    for _ in range(EPOCHS):
        rows = [
            (
                f"k{rng.integers(12)}",
                (watermark_us // SLIDE + int(rng.integers(-3, 9))) * SLIDE,
                float(rng.choice([0.1, 1e15, -1e15, 1e-3, -0.0])) * float(rng.random()),
                int(rng.integers(-9, 9)),
                float(rng.random()),
                float(rng.random()),
                "x" * int(rng.integers(3)),
            )
            for _ in range(rng.integers(10))
        ]
        drawn.append((rows, int(rng.choice([0, 0, 0, 3, 10, 25]))))
        watermark_us += drawn[-1][1]
    shape, state = shape_of(panes), EMPTY
    closed, states = [], []
    steps = history(drawn, panes * SLIDE)
    for rows, watermarks in steps:
        step = advance(shape, state, rows, [watermarks])
        state = step.state
        closed.append(step.closed)
        states.append(state)
    return Model(shape, steps, closed, states)


class FullFiles(RunFiles):
    """`full`: so many writes fail."""

    full = 0

    def write(self, schema: pa.Schema, runs: Sequence[Run]) -> list[Run]:
        if self.full and runs:
            self.full -= 1
            raise DiskFull("full")
        return super().write(schema, runs)


class FaultyObjects(MemoryObjects):
    """`faults`: how the next reads of state objects fail; with "none" one succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def get(self, name: str) -> bytes:
        data = super().get(name)
        if "/state/" not in name or not self.faults:
            return data
        match self.faults.pop():
            case "busy":
                raise OSError("busy")
            case "cut":
                return data[:-1]
            case "flipped":
                return bytes([*data[:40], data[40] ^ 4, *data[41:]])
        return data


class Replica:
    """A task: its state, its saver, and what is not here of what it was restored from."""

    def __init__(self, world: World, ref: EntryRef | None) -> None:
        self.world = world
        self.states = StateStore(world.store, "u", world.files)
        self.core = SaverCore()
        self.to_save: SaveState | None = None
        self.state, self.epoch = EMPTY, NO_EPOCH
        self.fetch: Fetch | None = None
        self.entry: str | None = None
        self.clock = 0.0
        if ref is not None and ref.object is not None:
            self.entry = ref.object
            _, found, self.fetch = self.states.open(ref.object)
            table = found.operators.get("op", EMPTY)
            self.state = match_columns(world.model.shape.run_shape, table, "op")
            self.epoch = ref.epoch
            self.step(self.core.state_incomplete)
            self.check()

    @property
    def complete(self) -> bool:
        return self.fetch is None or self.fetch.complete

    def step(self, happened: Callable[[float], list[SaverEffect]]) -> None:
        self.clock += 60  # each back-off has ended
        for effect in happened(self.clock):
            if isinstance(effect, SaveState):
                self.to_save = effect

    def check(self) -> None:
        assert self.state.digest == self.world.model.digest(self.epoch)

    def work(self, count: int) -> None:
        """One call."""
        world, first = self.world, self.epoch + 1
        part = world.model.steps[first : first + count]
        if not part:
            return
        rows, watermarks = pa.concat_tables([rows for rows, _ in part]), [w for _, w in part]
        step = advance(world.model.shape, self.state, rows, watermarks, world.files)
        expected = closed_digest(world.model, first, first + len(part))
        assert digest_table(step.closed) == expected
        self.state, self.epoch = step.state, first + len(part) - 1
        self.check()

    def save(self) -> None:
        """The saver's thread."""
        if self.to_save is None:
            return
        save, self.to_save = self.to_save, None
        try:
            previous = None
            with suppress(ObjectMissing, UnreadableObject):
                previous = self.states.load_entry(save.reuse) if save.reuse else None
            of = save.state
            ref = self.states.save("s", 0, of.epoch, 0, ("op",), of.operators, previous)
        except (StoreError, DiskFull) as error:
            self.step(partial(self.core.save_failed, str(error)))
            raise
        self.step(partial(self.core.entry_saved, ref))

    def checkpoint(self) -> None:
        operators = State({"op": join_single_deltas(self.world.model.shape.run_shape, self.state)})
        self.step(partial(self.core.state_reached, TaskState(self.epoch, 0, operators)))

    def read(self, number: int) -> None:
        """A reader that needs any object."""
        if self.fetch is not None and (missing := self.fetch.unfetched):
            self.fetch.get(missing[number % len(missing)])

    def fetch_all(self) -> None:
        """In the background, from now on."""
        if self.fetch is not None:
            self.fetch.start()

    def read_all(self) -> None:
        """A reader of the whole state: what it finds is right at any time."""
        state, epoch = self.state, self.epoch
        found = folded(state, self.world.model.shape)
        assert digest_table(found) == rows_digest(self.world.model, epoch)

    def note_fetched(self) -> None:
        if self.complete:
            self.step(self.core.state_complete)


def _outcome(result: Future[None], _: Replica) -> None:
    result.result()


def _has_ended(fetch: Fetch) -> bool:
    return fetch.complete or fetch.lost is not None


class World:
    def __init__(self, directory: str, known: Model) -> None:
        self.model = known
        self.memory = FaultyObjects()
        self.store = Store(self.memory.url, objects=self.memory, retry=Retry(attempts=1))
        self.files = FullFiles(Path(directory), memory_bytes=2_000)
        self.manifests = ManifestStore(self.store, "u")
        self.seq = 0
        self.refs: tuple[EntryRef, ...] = (EntryRef(NO_EPOCH, None, ""),)  # the newest first
        self.reported_lost: set[str] = set()
        self.damaged: dict[str, bytes] = {}
        self.digests: dict[int, str] = {}  # of all entries of an epoch
        self.lost = 0
        self.write_manifest()
        self.replicas: dict[int, Replica] = {}
        self._fetches: list[Fetch] = []
        for number in REPLICAS:
            self.start(number)

    def stop(self) -> None:
        for fetch in self._fetches:
            fetch.stop()

    def write_manifest(self) -> None:
        self.seq += 1
        epoch = self.refs[0].epoch
        assert self.manifests.write(Manifest(self.seq, epoch, 1, 1, "", {"s/0": self.refs}))

    # -- tasks -----------------------------------------------------------------------------------

    def start(self, number: int, at: int = 0) -> None:
        """From an entry that is not known to be lost; it waits while there is none."""
        usable = [r for r in self.refs if r.object not in self.manifests.unrestorable]
        if number in self.replicas or not usable:
            return
        replica = self.replicas[number] = Replica(self, usable[at % len(usable)])
        if replica.fetch is not None:
            self._fetches.append(replica.fetch)
        self.tell(replica)

    def kill(self, number: int) -> None:
        """Nothing of it is left but what is in the store; its threads end some time."""
        replica = self.replicas.pop(number, None)
        if replica is not None and replica.fetch is not None:
            replica.fetch.stop()

    def attempt(self, number: int, action: Callable[[Replica], None]) -> None:
        """A task whose state is lost names the object, and ends; other failures pass."""
        if (replica := self.replicas.get(number)) is None:
            return
        try:
            action(replica)
            if replica.fetch is not None and (lost := replica.fetch.lost) is not None:
                raise lost
        except StateLost as error:
            self.lost += 1
            self.reported_lost.add(error.object)
            self.kill(number)
        except (StoreError, DiskFull):
            pass
        else:
            replica.note_fetched()

    def together(self, number: int, which: int) -> None:
        """The loop, the saver, the background and other readers, at the same time."""
        replica = self.replicas.get(number)
        if replica is None:
            return
        if replica.fetch is not None and which % 2:
            replica.fetch.start()
        actions = [
            lambda: replica.work(1 + which % 4),
            replica.save,
            lambda: replica.read(which),
            lambda: replica.read(which + 1),
        ]
        if which % 5 == 0:
            actions.append(replica.read_all)
        with ThreadPoolExecutor(len(actions)) as pool:
            results = [pool.submit(action) for action in actions]
        for result in results:
            self.attempt(number, partial(_outcome, result))

    # -- the coordinator -------------------------------------------------------------------------

    def tell(self, replica: Replica) -> None:
        ref = self.refs[0]
        point = RestorePoint(epoch=ref.epoch, object=ref.object)
        replica.step(partial(replica.core.entry_committed, point))
        mine = {done.object for done in replica.core.saved()} | {ref.object or ""}
        if refused := frozenset(self.manifests.unrestorable.keys() & mine):
            replica.step(partial(replica.core.entries_refused, refused))

    def commit(self, number: int, which: int) -> None:
        if (replica := self.replicas.get(number)) is None:
            return
        if not (reported := [d for d in replica.core.saved() if d.epoch > self.refs[0].epoch]):
            return
        done = reported[which % len(reported)]
        assert self.digests.setdefault(done.epoch, done.digest) == done.digest
        assert replica.complete, "it has read all that the entry may refer to"
        assert done.object is not None
        if self.manifests.not_committable([done.object]):
            replica.step(partial(replica.core.entries_refused, frozenset({done.object})))
            return
        ref = EntryRef(done.epoch, done.object, done.digest, 1)
        kept = [r for r in self.refs if r.object not in self.manifests.unrestorable]
        self.refs = (ref, *kept[:1])
        self.write_manifest()
        for each in self.replicas.values():
            self.tell(each)

    def collect(self) -> None:
        self.memory.now += 1
        reading = [r.entry for r in self.replicas.values() if not r.complete]
        in_use = {entry for entry in reading if entry is not None}
        self.manifests.collect_garbage(RETAIN, in_use=in_use, reported_lost=self.reported_lost)
        self.reported_lost.clear()
        for replica in self.replicas.values():
            self.tell(replica)

    def needed(self, in_use: Sequence[str] = ()) -> set[str]:
        entries = [r.object for r in self.refs if r.object is not None]
        return self.memory.states_of([*entries, *in_use])

    def check(self) -> None:
        """Nothing is deleted that somebody needs."""
        reading = [r.entry for r in self.replicas.values() if not r.complete and r.entry]
        assert self.needed(reading) <= self.memory.names()

    # -- others ----------------------------------------------------------------------------------

    def damage(self, number: int) -> None:
        if names := sorted(self.needed() - self.damaged.keys()):
            name = names[number % len(names)]
            whole = self.damaged[name] = self.memory.data[f"u/{name}"]
            self.memory.data[f"u/{name}"] = bytes([whole[0] ^ 1, *whole[1:]])

    def repair(self) -> None:
        for name, whole in self.damaged.items():
            if f"u/{name}" in self.memory.data:
                self.memory.data[f"u/{name}"] = whole
        self.damaged.clear()


FAULTS = ["busy", "cut", "flipped", "none", "none"]
ACTIONS = st.sampled_from(
    ["work"] * 4
    + ["checkpoint", "save", "commit", "persist", "persist", "persist", "collect", "collect"]
    + ["read", "read", "read", "background", "together", "together", "read_all", "faults"]
    + ["compact", "spill", "full", "kill", "start", "restart", "restart", "restart"]
    + ["damage", "damage", "repair", "overtake", "overtake"]
)


def act(world: World, action: str, number: int) -> None:
    """`number` decides which replica acts (even: 0, odd: 1), and what it acts on."""
    which = number % 2
    number //= 2
    match action:
        case "work":
            world.attempt(which, lambda r: r.work((1, 1, 2, 5)[number % 4]))
        case "checkpoint":
            world.attempt(which, Replica.checkpoint)
        case "save":
            world.attempt(which, Replica.save)
        case "commit":
            world.commit(which, number)
        case "persist":
            for step in ("work", "checkpoint", "save", "commit"):
                act(world, step, 2 * number + which)
        case "overtake":  # the entry that a replica still reads leaves the manifests
            for _ in range(RETAIN + 1):
                act(world, "persist", 2 * number + 1 - which)
            world.collect()
        case "collect":
            world.collect()
        case "read":
            world.attempt(which, lambda r: r.read(number))
        case "read_all":
            world.attempt(which, Replica.read_all)
        case "background":
            world.attempt(which, Replica.fetch_all)
        case "together":
            world.together(which, number)
        case "faults":
            world.memory.faults += [FAULTS[number // n % len(FAULTS)] for n in (1, 5, 25, 125)]
        case "compact":
            world.attempt(which, compact_whole)
        case "spill":
            world.attempt(which, spill)
        case "full":
            world.files.full = 2
        case "kill":
            world.kill(which)
        case "start":
            world.start(which, number)
        case "restart":
            world.kill(which)
            world.start(which, number)
        case "damage":
            world.damage(number)
        case "repair":
            world.repair()


def compact_whole(replica: Replica) -> None:
    replica.state = compact_all(replica.world.model.shape.run_shape, replica.state)


def spill(replica: Replica) -> None:
    replica.state = replica.world.files.spill({"op": replica.state})["op"]


def recover(world: World) -> None:
    """All failures end, and replicas work and save to the end."""
    world.repair()
    world.memory.faults, world.files.full = [], 0
    world.collect()
    for number in REPLICAS:
        world.start(number)
    for number, replica in list(world.replicas.items()):
        if replica.fetch is not None:
            replica.fetch.start()
            eventually(partial(_has_ended, replica.fetch), 10)
        world.attempt(number, Replica.note_fetched)
    for number in REPLICAS:
        world.start(number)  # one whose state was lost before the repair
        replica = world.replicas[number]
        if replica.fetch is not None:
            replica.fetch.finish()
        replica.note_fetched()
        while replica.epoch < EPOCHS - 1:
            replica.work(3)
        replica.read_all()
        if replica.to_save is not None:
            replica.save()
        replica.step(replica.core.woken)
        replica.checkpoint()
        while replica.to_save is not None:
            replica.save()
    world.commit(0, -1)
    world.collect()


def check_restorable(world: World) -> None:
    for ref in world.refs:
        if ref.object is None:
            continue
        _, state = StateStore(world.store, "u").load(ref.object)
        found = match_columns(world.model.shape.run_shape, state.operators.get("op", EMPTY), "op")
        assert found.digest == world.model.digest(ref.epoch)
        found_rows = folded(found, world.model.shape)
        assert digest_table(found_rows) == rows_digest(world.model, ref.epoch)


@given(
    st.sampled_from([1, 4, 20]),
    st.integers(0, 1),
    st.lists(st.tuples(ACTIONS, st.integers(0, 2_000)), min_size=10, max_size=20),
)
def test_replicas_compute_the_same_whatever_they_have_of_their_state(
    panes: int, seed: int, actions: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(directory, model(panes, seed))
        try:
            for action, number in actions:
                act(world, action, number)
                world.check()
            recover(world)
            world.check()
            check_restorable(world)
            assert world.refs[0].epoch == EPOCHS - 1
            assert world.manifests.unrestorable == {}
            assert not world.reported_lost
        finally:
            world.stop()
