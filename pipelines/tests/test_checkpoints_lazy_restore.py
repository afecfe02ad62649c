"""A state that is used before its runs are fetched: the same results, whatever arrives when."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoints_store import FailingObjects
from window_parts import SHAPE, SLIDE, epochs, folded, history, shape_of, table

from rekindle.backoff import BackoffPolicy
from rekindle.checkpoints import fetching
from rekindle.checkpoints import state as state_module
from rekindle.checkpoints.fetching import (
    AwaitedRuns,
    Fetch,
    FetchPhase,
    FetchQueue,
    LostObject,
)
from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.failure import DiskFull
from rekindle.engine.model import State
from rekindle.engine.state import compaction, operator
from rekindle.engine.state.compaction import compact_all, join_single_deltas
from rekindle.engine.state.operator import EMPTY, OperatorState, match_columns
from rekindle.engine.state.remote import AwaitedRun, RemoteRun, RunFacts
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import WindowShape, advance
from rekindle.errors import StateLost, StateMismatch, StoreError
from rekindle.objects import Retry, open_objects
from rekindle.streams.digest import digest_table
from rekindle.workers import CallTimer
from rekindle_testing.waiting import eventually

T = TypeVar("T")


@pytest.fixture(autouse=True)
def many_objects_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "OBJECT_BYTES", 1)
    monkeypatch.setattr(compaction, "PAGE_ROWS", 4)
    monkeypatch.setattr(fetching, "_BACKOFF", BackoffPolicy(first_s=0.02, longest_s=0.05))


class World:
    """A store with faults, and the state of one operator in it. `faults`: for each read of a state
    object, what it raises, as long as there are more."""

    def __init__(self, directory: str) -> None:
        self.faults: list[Exception | None] = []
        self.reads: list[str] = []
        url = f"file://{directory}/store"
        objects = FailingObjects(open_objects(url), self._fault)
        self.store = Store(url, objects=objects, retry=Retry(attempts=1))
        self.files = RunFiles(Path(directory) / "runs", memory_bytes=0)
        self.saver = StateStore(self.store, "u", self.files)
        self.entry: Entry | None = None
        self.fetch: Fetch | None = None
        self._fetches: list[Fetch] = []

    def stop(self) -> None:
        """Threads that fetch would go on for as long as the store is away."""
        for fetch in self._fetches:
            fetch.stop()

    def _fault(self, operation: str, name: str) -> None:
        if operation == "get" and "/state/" in name:
            self.reads.append(name)
            if self.faults and (error := self.faults.pop(0)) is not None:
                raise error

    def save(self, state: OperatorState, epoch: int) -> str:
        operators = State({"op": join_single_deltas(SHAPE.run_shape, state)})
        ref = self.saver.save("s", 0, epoch, 0, ("op",), operators, self.entry)
        assert ref.object is not None
        self.entry = self.saver.load_entry(ref.object)
        return ref.object

    def restore(self, name: str) -> OperatorState:
        self.saver = StateStore(self.store, "u", self.files)
        self.entry, state, self.fetch = self.saver.open(name)
        self._fetches.append(self.fetch)
        return match_columns(SHAPE.run_shape, state.operators.get("op", EMPTY), "op")


def retried(action: Callable[[], T]) -> T:
    """As the task's loop does."""
    while True:
        try:
            return action()
        except StateLost:
            raise
        except (StoreError, DiskFull):
            continue


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(str(tmp_path))
    yield world
    world.stop()


def fill(world: World, groups: int, panes: int = 1) -> OperatorState:
    """The state after epochs 0 to 2, each with a row for each group and pane.

    A row, here and below: key, pane, epoch, count, and five partials (`window_parts.NAMES`). What
    `advance` gets of each epoch: its number, the watermark before it and the one after it.
    """
    state = EMPTY
    for number in range(3):
        rows = [
            (f"{g}", p * SLIDE, number, 1, 0.1 * g, g, 1.0, 1.0, "x")
            for g in range(groups)
            for p in range(panes)
        ]
        state = advance(SHAPE, state, table(rows), [(number, -100, -100)]).state
    return state


# -- the same results ----------------------------------------------------------------------------


actions = st.lists(
    st.tuples(
        st.sampled_from(["nothing", "compact", "spill", "save", "restore", "fetch", "background"]),
        st.integers(0, 20),
        st.lists(st.sampled_from([None, OSError, DiskFull]), max_size=4),
    ),
    min_size=1,
    max_size=8,
)


def act(
    world: World, shape: WindowShape, state: OperatorState, epoch: int, action: tuple[str, int, Any]
) -> OperatorState:
    what, which, faults = action
    if what == "compact":
        return retried(lambda: compact_all(shape.run_shape, state))
    if what == "spill":
        return world.files.spill({"op": state})["op"]
    if what in ("save", "restore") and (state.digest or not state.is_empty):
        name = retried(lambda: world.save(state, epoch))
        if what == "restore":
            # An error that is raised keeps what it has passed through, for as long as it lives.
            world.faults = [kind and kind("busy") for kind in faults]
            return world.restore(name)
    if what == "fetch" and world.fetch is not None and (missing := world.fetch.unfetched):
        fetch = world.fetch
        retried(lambda: fetch.get(missing[which % len(missing)]))
    if what == "background" and world.fetch is not None:
        world.fetch.start()
    return state


@given(epochs, actions, st.sampled_from([1, 4, 20]), st.integers(1, 3))
def test_a_lazy_restore_gives_the_same_bits(
    drawn: list[Any], acts: list[Any], panes: int, size: int
) -> None:
    shape = shape_of(panes)
    steps = history(drawn, panes * SLIDE)
    with tempfile.TemporaryDirectory() as directory:
        world = World(directory)
        plain = lazy = EMPTY
        expected, got = [], []
        for at in range(0, len(steps), size):
            part = steps[at : at + size]
            rows, marks = pa.concat_tables([t for t, _ in part]), [m for _, m in part]
            eager = advance(shape, plain, rows, marks)
            before = lazy
            step = retried(partial(advance, shape, before, rows, marks, world.files))
            plain, lazy = eager.state, step.state
            expected.append(digest_table(eager.closed))
            got.append(digest_table(step.closed))
            lazy = act(world, shape, lazy, marks[-1][0], acts[at % len(acts)])
        assert got == expected
        assert lazy.digest == plain.digest
        final = lazy
        rows = retried(lambda: folded(final, shape))
        assert digest_table(rows) == digest_table(folded(plain, shape))
        world.stop()


# -- what is read --------------------------------------------------------------------------------


def test_epochs_do_not_read_the_base(world: World) -> None:
    state = world.restore(world.save(fill(world, 80), 2))
    for number in range(3, 40):
        rows = [(f"{g}", 0, number, 1, 0.1, g, 1.0, 1.0, "x") for g in range(number % 7)]
        state = advance(SHAPE, state, table(rows), [(number, -100, -100)], world.files).state
        state = world.files.spill({"op": state})["op"]
    assert world.reads == []
    assert world.fetch is not None
    assert len(world.fetch.unfetched) > 10


def test_the_first_save_of_a_restored_replica_refers_to_the_entry(world: World) -> None:
    """It needs none of the objects for that."""
    state = world.restore(world.save(fill(world, 80), 2))
    assert world.entry is not None
    before = world.entry.objects["op"]
    rows = table([("a", 0, 3, 1, 0.1, 1, 1.0, 1.0, "x")])
    state = advance(SHAPE, state, rows, [(3, -100, -100)]).state
    world.save(state, 3)
    after = world.entry.objects["op"]
    assert set(before) < set(after)
    assert len(after) == len(before) + 1
    assert world.reads == []


def test_replicas_that_save_in_turn_share_what_was_restored(world: World) -> None:
    """The committed entry is the other's, which compacted a page; all others are shared."""
    first = fill(world, 80)
    name = world.save(first, 2)
    assert world.entry is not None
    shared = set(world.entry.objects["op"])
    rows = table([("a", 0, 3, 1, 0.1, 1, 1.0, 1.0, "x")])
    other, entry = world.saver, world.entry
    restored = advance(SHAPE, world.restore(name), rows, [(3, -100, -100)]).state
    mine = world.saver
    world.saver, world.entry = other, entry
    world.save(advance(SHAPE, first, rows, [(3, -100, -100)]).state, 3)
    world.saver = mine
    world.save(restored, 4)
    names = set(world.entry.objects["op"])
    assert len(names & shared) >= len(shared) - 2
    assert len(names - shared) == 2, "a delta, and the page"
    assert len(world.reads) == 1


def test_a_save_reads_what_it_has_to_write_again(world: World) -> None:
    state = world.restore(world.save(fill(world, 30), 2))
    world.entry = None  # another replica's objects are committed
    name = world.save(state, 3)
    assert world.fetch is not None
    assert world.fetch.unfetched == []
    assert digest_table(folded(world.restore(name))) == digest_table(folded(state))


def test_a_window_that_closes_reads_its_own_panes(world: World) -> None:
    state = compact_all(SHAPE.run_shape, fill(world, 24, panes=8))
    shape = shape_of(1)
    state = world.restore(world.save(state, 2))
    closed = advance(shape, state, None, [(3, -100, SLIDE)], world.files)
    assert closed.closed.num_rows == 24
    assert world.fetch is not None
    # What is missing belongs to the other seven panes.
    assert 0 < len(world.reads) < 1.5 * len(world.fetch.unfetched) / 7


def test_objects_of_the_first_windows_to_close_are_fetched_first(world: World) -> None:
    state = compact_all(SHAPE.run_shape, fill(world, 20, panes=6))
    state = world.restore(world.save(state, 2))
    assert world.fetch is not None
    order = world.fetch.unfetched
    world.fetch.prioritize(order[-1])
    world.fetch.start()
    eventually(lambda: world.fetch is not None and not world.fetch.unfetched, 10)
    first = {name.rpartition("/")[2] for name in world.reads[:4]}
    assert order[-1].rpartition("/")[2] in first
    deltas_and_pages = list(state.runs())
    assert deltas_and_pages


def test_runs_that_are_dropped_are_not_fetched(world: World) -> None:
    state = world.restore(world.save(fill(world, 30, panes=2), 2))
    fetch = world.fetch
    assert fetch is not None
    state = advance(SHAPE, state, None, [(3, -100, 1000)], world.files).state
    before = len(world.reads)
    fetch.start()
    eventually(lambda: not fetch.unfetched, 10)
    assert len(world.reads) == before
    assert state.is_empty


# -- failures ------------------------------------------------------------------------------------


def test_a_failure_is_reported_and_tried_again(world: World) -> None:
    state = world.restore(world.save(fill(world, 30), 2))
    fetch = world.fetch
    assert fetch is not None
    world.faults = [OSError("busy")] * 6
    fetch.start()
    eventually(lambda: "busy" in (fetch.problem or ""), 10)
    eventually(lambda: not fetch.unfetched, 20)
    assert fetch.problem is None
    assert fetch.lost is None
    assert all(run.is_available and not run.in_memory for run in state.runs())


def test_a_call_that_does_not_return_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that needs the object waits for that call."""
    monkeypatch.setattr(fetching, "CallTimer", partial(CallTimer, slow_s=0.05))
    goes_on, awaited_run = (
        threading.Event(),
        AwaitedRun(RunFacts(1, 1, (0, 0), pa.schema([])), Nowhere()),
    )

    def load(name: str, awaited: AwaitedRuns) -> None:
        assert goes_on.wait(10)
        awaited[0].arrive(Run(pa.table({})))

    fetch = Fetch(load)
    fetch.expect({"x": ({0: awaited_run}, 1)})
    fetch.start()
    eventually(lambda: "reading the state object x has not ended" in (fetch.problem or ""), 10)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(fetch.get, "x")
        assert not reader.done()
        goes_on.set()
        reader.result(10)
    assert awaited_run.run is not None
    assert fetch.problem is None


def test_a_wait_for_a_fetch_can_be_seen(world: World) -> None:
    """So that a task that is killed while its call waits is not taken for one with a large call."""
    state = world.restore(world.save(fill(world, 20), 2))
    assert world.fetch is not None
    waits = list[str]()

    @contextmanager
    def during_wait() -> Iterator[None]:
        waits.append(threading.current_thread().name)
        yield

    world.fetch.during_wait = during_wait
    folded(state)
    assert set(waits) == {threading.current_thread().name}
    before = len(waits)
    folded(state)
    assert len(waits) == before


def test_a_task_that_stops_waits_for_nothing() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    awaited_run = AwaitedRun(RunFacts(1, 1, (0, 0), pa.schema([])), Nowhere())

    def load(name: str, awaited: AwaitedRuns) -> None:
        begun.set()
        assert goes_on.wait(10)

    fetch = Fetch(load)
    fetch.expect({"x": ({0: awaited_run}, 1)})
    fetch.start()
    assert begun.wait(10)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(fetch.get, "x")
        fetch.stop()
        with pytest.raises(StoreError, match="the task stops"):
            reader.result(10)
    goes_on.set()


class Nowhere:
    def fetch(self) -> None:
        raise AssertionError

    def prioritize(self) -> None: ...


@pytest.mark.parametrize("damage", ["missing", "damaged", "another"])
def test_an_object_that_is_found_lost_late_is_not_retried(
    world: World, tmp_path: Path, damage: str
) -> None:
    state = world.restore(world.save(fill(world, 30), 2))
    files = sorted((tmp_path / "store/u/state/op").iterdir())
    content = files[1].read_bytes()
    for file in files:
        file.unlink()
        if damage != "missing":
            file.write_bytes(content if damage == "another" else content[:50])
    what = "is damaged" if damage != "missing" else "does not exist"
    with pytest.raises(StateLost, match=what) as failed:
        retried(lambda: advance(SHAPE, state, None, [(3, -100, 1000)]))
    assert world.entry is not None
    assert failed.value.object in world.entry.objects["op"]
    assert world.fetch is not None
    assert world.fetch.lost is not None
    assert world.fetch.lost.object == failed.value.object
    with pytest.raises(StateLost):
        folded(state)
    rows = table([("a", 0, 3, 1, 0.1, 1, 1.0, 1.0, "x")])
    assert advance(SHAPE, state, rows, [(3, -100, -100)]).closed.num_rows == 0


def test_one_bad_read_is_not_a_lost_state(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that was cut off on the way."""
    saved = fill(world, 30)
    state = world.restore(world.save(saved, 2))
    get, cut = Store.get, list[str]()

    def get_cut(store: Store, name: str) -> bytes:
        body = get(store, name)
        first = "/state/" in name and name not in cut
        cut.append(name)
        return body[:-1] if first else body

    monkeypatch.setattr(Store, "get", get_cut)
    with pytest.raises(StoreError, match="is damaged") as failed:
        folded(state)
    assert not isinstance(failed.value, StateLost)
    assert world.fetch is not None
    assert "is damaged" in (world.fetch.problem or "")
    assert digest_table(retried(lambda: folded(state))) == digest_table(folded(saved))
    assert (world.fetch.lost, world.fetch.problem) == (None, None)


def test_at_most_four_objects_are_in_memory() -> None:
    """Also if many threads read what is not here."""
    facts = RunFacts(1, 1, (0, 0), pa.schema([]))
    awaited = {f"{n}": AwaitedRun(facts, Nowhere()) for n in range(20)}
    changed, in_flight, most = threading.Lock(), 0, 0

    def load(name: str, runs: AwaitedRuns) -> None:
        nonlocal in_flight, most
        with changed:
            in_flight += 1
            most = max(most, in_flight)
        time.sleep(0.01)
        with changed:
            in_flight -= 1

    fetch = Fetch(load)
    fetch.expect({name: ({0: run}, 1) for name, run in awaited.items()})
    fetch.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch.get, reversed(awaited)))
    assert fetch.unfetched == []
    assert most == fetching.PARALLEL


def test_an_unavailable_store_is_no_lost_state(world: World, tmp_path: Path) -> None:
    state = world.restore(world.save(fill(world, 30), 2))
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreError) as failed:
        folded(state)
    assert not isinstance(failed.value, StateLost)
    (tmp_path / "away").rename(tmp_path / "store")
    assert folded(state).num_rows == 30


# -- formats -------------------------------------------------------------------------------------


def test_an_entry_that_does_not_say_how_large_runs_are_is_read_at_once(world: World) -> None:
    """Of the release before."""
    saved = fill(world, 30)
    world.save(saved, 2)
    assert world.entry is not None
    found = dict(world.entry.layouts["op"])
    del found["objects"]
    for part in ("pages", "deltas"):
        kept = found[part].items()
        found[part] = {k: v for k, v in kept if k not in ("rows", "first", "last")}
    old = replace(world.entry, layouts={"op": found})
    states, fetch = StateStore(world.store, "u", world.files).open_state(old)
    assert fetch.unfetched == []
    assert all(run.is_available for run in states.operators["op"].runs())
    assert digest_table(folded(states.operators["op"])) == digest_table(folded(saved))


def test_columns_are_matched_before_the_rows_are_fetched(world: World) -> None:
    state = world.restore(world.save(fill(world, 30), 2))
    names = [*reversed(SHAPE.partials)]
    aligned = match_columns(replace(SHAPE, partials=tuple(names)).run_shape, state, "op")
    with pytest.raises(StateMismatch, match="column p4 is string in the state and missing"):
        match_columns(replace(SHAPE, partials=SHAPE.partials[:-1]).run_shape, state, "op")
    assert world.reads == []
    assert next(aligned.runs()).table.schema.names[-5:] == ["p4", "p3", "p2", "p1", "p0"]
    assert next(state.runs()).table.schema.names[-5:] == ["p0", "p1", "p2", "p3", "p4"]


def test_an_object_has_to_be_what_its_entry_describes(world: World) -> None:
    name = world.save(fill(world, 30), 2)
    state = world.restore(name)
    run = next(state.runs())
    assert isinstance(run, RemoteRun)
    wrong = replace(run._awaited.facts, rows=run.rows + 1)
    run._awaited.facts = wrong
    with pytest.raises(StateLost, match="is not what its entry describes"):
        retried(lambda: folded(state))


# -- growth --------------------------------------------------------------------------------------


def test_what_was_restored_does_not_count_as_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were pending at the restore do not count towards the limit above which a call waits
    for runs that are not fetched: only those appended since then do."""
    with monkeypatch.context() as slow:
        slow.setattr(operator, "COMPACTION_RATIO", 0.0)
        state = replace(fill(world, 500), credit=1 << 20)  # rows that compaction may process
    assert state.pending.sum() == 1500
    monkeypatch.setattr(compaction, "WAITING_BYTES", state.nbytes)
    state = world.restore(world.save(state, 2))
    calls = 0
    while not world.reads and calls < 100:
        rows = [(f"{g}", 0, calls + 3, 1, 0.1, g, 1.0, 1.0, "x") for g in range(50)]
        state = advance(SHAPE, state, table(rows), [(calls + 3, -100, -100)]).state
        calls += 1
    assert 25 < calls < 50


# -- what is fetched when ------------------------------------------------------------------------


def test_failed_objects_are_fetched_again_after_the_others() -> None:
    queue = FetchQueue({"a": 1, "b": 2, "c": 3})
    queue.prioritize(["c", "b"])
    assert queue.take(0.0) == "c"
    queue.failed("c", "busy", 0.0)
    assert (queue.take(0.0), queue.problem) == (None, "busy")
    assert (now := queue.wake_at) is not None
    assert [queue.take(now) for _ in range(4)] == ["b", "a", "c", None]
    queue.fetched("c")
    assert queue.problem is None
    assert queue.unfetched_bytes == 3


def test_an_object_that_fails_again_and_again_does_not_keep_others_waiting() -> None:
    queue, now = FetchQueue(dict.fromkeys("abcdefgh", 1)), 0.0
    attempts = 0
    for _ in range(20):
        if queue.unfetched == ["a"]:
            break
        assert queue.wake_at is not None
        now = max(now, queue.wake_at)
        name = queue.take(now)
        assert name is not None
        if name == "a":
            attempts += 1
            queue.failed("a", "forbidden", now)
        else:
            queue.fetched(name)
            assert queue.problem == "forbidden"
    assert queue.unfetched == ["a"]
    assert attempts == 1


def test_the_cost_of_a_step_does_not_depend_on_how_many_objects_wait() -> None:
    """Also while the store is away, and if each is wanted."""
    names = [f"{n}" for n in range(20_000)]
    queue, began = FetchQueue(dict.fromkeys(names, 1)), time.process_time()
    for name in names:
        queue.prioritize([name])
    for number in range(1_000):
        wake_at = queue.wake_at
        assert wake_at is not None
        now = max(wake_at, float(number))
        name = queue.take(now) or ""
        assert name
        if number % 2:
            queue.failed(name, "busy", now)
            assert queue.take(now) is None
        else:
            queue.fetched(name)
        assert not queue.complete
        assert queue.unfetched_bytes == 20_000 - number // 2 - 1
    assert time.process_time() - began < 2


def test_large_objects_are_fetched_alone() -> None:
    queue = FetchQueue({"a": 1 << 30, "b": 1, "c": 1 << 30, "d": 1})
    assert [queue.take(0.0), queue.take(0.0), queue.wake_at] == ["a", None, None]
    small = FetchQueue(dict.fromkeys("abc", 10), most_bytes=25)
    assert [small.take(0.0) for _ in "abc"] == ["a", "b", None]
    queue.fetched("a")
    assert [queue.take(0.0), queue.take(0.0)] == ["b", None]
    assert queue.wake_at is None
    queue.fetched("b")
    assert queue.take(0.0) == "c"


def test_an_object_damaged_in_each_read_is_lost() -> None:
    queue, now = FetchQueue({"a": 1}), 0.0
    for _ in range(fetching.READS):
        assert queue.lost is None
        assert queue.wake_at is not None
        now = queue.wake_at
        assert queue.take(now) == "a"
        queue.failed("a", "damaged", now, bad_read=True)
    assert (queue.lost, queue.take(now + 9)) == (LostObject("a", "damaged"), None)


def test_nothing_is_fetched_of_a_state_that_is_lost() -> None:
    queue = FetchQueue({"a": 1, "b": 2})
    assert queue.take(0.0) == "a"
    queue.mark_lost("a", "it is missing")
    assert (queue.take(9.0), queue.wake_at) == (None, None)
    assert queue.lost == LostObject("a", "it is missing")
    assert queue.unfetched == ["b", "a"]


QUEUE_STEPS = ["take", "prefer", "claim", "fetched", "failed", "time passes"]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(QUEUE_STEPS)), max_size=60))
def test_each_object_is_fetched_once(steps: list[tuple[int, str]]) -> None:
    """By one thread at a time, whatever fails and is preferred, and in the end all are fetched."""
    queue, now, in_flight = FetchQueue(dict.fromkeys("abcde", 1)), 0.0, set[str]()
    fetched: list[str] = []

    def end(name: str, failed: bool) -> None:
        in_flight.discard(name)
        if failed:
            queue.failed(name, "busy", now)
        else:
            queue.fetched(name)
            fetched.append(name)

    for which, what in steps:
        name = "abcde"[which]
        now += which
        if what == "take" and (taken := queue.take(now)) is not None:
            assert taken not in in_flight
            in_flight.add(taken)
        elif what == "prefer":
            queue.prioritize([name])
        elif what == "claim" and queue.phase(name) is FetchPhase.WAITING and queue.has_room(name):
            queue.claim(name)
            in_flight.add(name)
        elif what in ("fetched", "failed") and in_flight:
            end(min(in_flight), failed=what == "failed")
    for name in sorted(in_flight):
        end(name, failed=False)
    while (wake_at := queue.wake_at) is not None:
        now = max(now, wake_at)
        taken = queue.take(now)
        assert taken is not None
        end(taken, failed=False)
    assert sorted(fetched) == list("abcde")
    assert queue.unfetched == []
