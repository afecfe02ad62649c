"""State and log as pieces: what a newcomer installs computes the same bits as its donor, and as a
restored one, whoever is killed at whichever chunk.

Design: docs/design/state-movement.md#pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_parts import MemorySpill, batch, filled, open_log
from test_checkpoints_manifests import MemoryObjects
from test_checkpoints_restore_histories import (
    EPOCHS,
    Model,
    closed_digest,
    model,
    rows_digest,
)
from window_parts import folded

from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.state import compaction
from rekindle.engine.state.operator import EMPTY, OperatorState, match_columns
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import advance
from rekindle.exchange.state_mover import donor as donors
from rekindle.exchange.state_mover import newcomer as newcomers
from rekindle.exchange.state_mover.chunks import ChunkPlan
from rekindle.exchange.state_mover.donor import DonorCore, DonorLimits
from rekindle.exchange.state_mover.messages import Order, Replica, Session, SessionVersion
from rekindle.exchange.state_mover.newcomer import NewcomerCore, NewcomerLimits
from rekindle.streams.digest import chained_digest_from, digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.task.moving import pieces as pieces_module
from rekindle.task.moving.pieces import Installation, Moved, NotMovable, Pieces, install
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot

pytestmark = pytest.mark.simulated

PANES = (1, 4, 17)
"""Tumbling windows, hopping ones, and long ones, whose panes are in a tree."""


@pytest.fixture(autouse=True, scope="module")
def many_small_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "PAGE_ROWS", 4)
        patch.setattr(compaction, "WAITING_BYTES", 2_000)
        patch.setattr(compaction, "MAX_SINGLE_DELTAS", 3)
        patch.setattr(pieces_module, "FILE_BYTES", 1_000)
        patch.setattr(pieces_module, "READ_BYTES", 300)
        yield


class Replicated:
    """A replica of a window: its state, and its log."""

    def __init__(self, known: Model, directory: Path, name: str) -> None:
        self.model = known
        self.files = RunFiles(directory / f"{name}-state", memory_bytes=2_000)
        schema = known.closed[0].schema
        self.log = OutputLog(directory / name, "s", 0, schema, file_bytes=2_000)
        self.state, self.epoch = EMPTY, -1

    @property
    def task_state(self) -> TaskState:
        watermark = self.model.watermark(self.epoch)
        return TaskState(self.epoch, watermark, State({"op": self.state}), f"-1:{self.epoch:032d}")

    def take(self, moved: Moved) -> None:
        found = moved.state.operators.operators.get("op", EMPTY)
        self.state = match_columns(self.model.shape.run_shape, found, "op")
        self.epoch = moved.state.epoch

    def work(self, count: int) -> None:
        """One call, as the model does it, but of several epochs."""
        first = self.epoch + 1
        part = self.model.steps[first : first + count]
        if not part:
            return
        rows, watermarks = pa.concat_tables([rows for rows, _ in part]), [w for _, w in part]
        step = advance(self.model.shape, self.state, rows, watermarks, self.files)
        expected = closed_digest(self.model, first, first + len(part))
        assert digest_table(step.closed) == expected
        for at in range(first, first + len(part)):
            closed, digest = self.model.closed[at], closed_digest(self.model, at, at + 1)
            watermark = self.model.watermark(at)
            self.log.append(EpochBatch("s", 0, at, watermark, closed, digest))
        self.state, self.epoch = step.state, first + len(part) - 1

    def check(self) -> None:
        assert self.state.digest == self.model.digest(self.epoch)
        found = folded(self.state, self.model.shape)
        assert digest_table(found) == rows_digest(self.model, self.epoch)

    def finish(self, calls: Sequence[int]) -> None:
        for count in calls:
            self.work(count)
        self.work(EPOCHS)
        self.check()


def stored_by(directory: Path, pieces: Pieces, chunk_bytes: int) -> Path:
    """All chunks, one after another."""
    plan = ChunkPlan(pieces.sizes, chunk_bytes)
    path = directory / "stored"
    with path.open("wb") as file:
        for number in range(plan.chunks):
            data = pieces.read(plan.slices(number))
            assert len(data) == sum(cut.nbytes for cut in plan.slices(number))
            file.write(data)
    return path


def finished(stored: Path, replica: Replicated) -> Moved:
    """The log and the digest of an installation; the replica goes on from it."""
    found = install(stored, replica.files, ("op",))
    replica.log.start_at(found.base, keep=False)
    for epoch in found.epochs(replica.log):
        replica.log.append(epoch)
    moved = Moved(found.state, found.base, found.digest(replica.log))
    replica.take(moved)
    return moved


calls = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(st.sampled_from(PANES), st.integers(0, 1), calls, calls, st.integers(60, 5_000), st.data())
def test_a_moved_state_computes_what_its_donor_and_a_restored_one_do(
    panes: int, seed: int, before: list[int], after: list[int], chunk_bytes: int, data: Any
) -> None:
    known = model(panes, seed)
    with TemporaryDirectory() as name:
        directory = Path(name)
        donor = Replicated(known, directory, "donor")
        for count in before:
            donor.work(count)
        donor.log.truncate(data.draw(st.integers(-1, donor.epoch)))
        pin = donor.log.pin()
        pinned = donor.task_state
        pieces = Pieces(pinned, donor.log, pin.base)
        donor.work(after[0])  # it goes on
        donor.log.truncate(donor.epoch)
        stored = stored_by(directory, pieces, chunk_bytes)

        newcomer = Replicated(known, directory, "newcomer")
        moved = finished(stored, newcomer)
        assert moved.digest == pieces.digest
        assert (moved.state.epoch, moved.base) == (pinned.epoch, pin.base)
        assert moved.state.watermark == pinned.watermark
        assert moved.state.chained_digest == pinned.chained_digest
        newcomer.finish(after)
        donor.finish(after)
        assert newcomer.log.results(pin.base) == donor.log.results(0)

        store = Store(MemoryObjects.url, objects=MemoryObjects())
        saved = StateStore(store, "u").save(
            "s",
            0,
            epoch=0,
            watermark=0,
            operator_ids=("op",),
            state=pinned.operators,
            previous=None,
        )
        assert saved.object is not None
        restored = Replicated(known, directory, "restored")
        _, found = StateStore(store, "u", restored.files).load(saved.object)
        restored.take(Moved(replace(pinned, operators=found), 0, ""))
        restored.log.start_at(pinned.epoch + 1)
        restored.finish(after)
        assert restored.state.digest == newcomer.state.digest == donor.state.digest


class Sessions:
    """A newcomer and its donors, and the effects that are to be done."""

    def __init__(self, known: Model, directory: Path, chunk_bytes: int) -> None:
        self.directory = directory
        self.newcomer_replica = Replicated(known, directory, "newcomer")
        self.donors = [Replicated(known, directory, f"donor-{n}") for n in range(2)]
        self.limits = NewcomerLimits(chunk_bytes=chunk_bytes, chunks_at_once=3)
        self.boots = 0
        self.version = 0
        self.moved: Moved | None = None
        self.stored = directory / "stored"
        self.pieces: dict[Session, Pieces] = {}
        self.now = 0.0
        self.stored_chunks = 0
        self.effects: deque[Any] = deque()
        self.start_donor(0)
        self.start_newcomer()

    def start_donor(self, at: int) -> None:
        """A donor, or another boot of it, or the other one."""
        self.boots += 1
        self.donor_slot = Slot("seg", 0, at)
        self.donor_state = self.donors[at]
        epoch = self.donor_state.epoch
        self.donor = DonorCore(
            Replica(self.donor_slot, 1), f"boot-{self.boots}", epoch, DonorLimits(chunk_bytes=200)
        )
        self.pieces.clear()
        own = (donors.PinSnapshot, donors.UnpinSnapshot, donors.ReadChunk, donors.Reply)
        self.effects = deque(effect for effect in self.effects if not isinstance(effect, own))

    def start_newcomer(self) -> None:
        self.boots += 1
        self.boot = f"boot-{self.boots}"
        self.replica = Replica(Slot("seg", 0, 2), 1)
        self.newcomer = NewcomerCore(self.replica, self.boot, self.limits)
        self.effects.clear()
        self.stored.unlink(missing_ok=True)

    def order(self) -> None:
        self.version += 1
        session = Session(self.replica.slot, 1, SessionVersion(1, self.version))
        order = Order(session, self.boot, Replica(self.donor_slot, 1), needed=0)
        self.to_newcomer(newcomers.OrderReceived(order))

    def to_newcomer(self, event: newcomers.NewcomerCoreEvent) -> None:
        self.effects += self.newcomer.step(event, self.now)

    def to_donor(self, event: donors.DonorCoreEvent) -> None:
        self.effects += self.donor.step(event, self.now)

    def run(self, through_chunk: int) -> None:
        """Until so many chunks are stored, or nothing is left to do."""
        while self.effects and self.stored_chunks < through_chunk:
            self.do(self.effects.popleft())

    def do(self, effect: Any) -> None:
        match effect:
            case newcomers.SendToDonor(_, message):
                self.to_donor(donors.MessageReceived(message))
            case donors.Reply(message):
                self.to_newcomer(newcomers.MessageReceived(message))
            case donors.PinSnapshot(session):
                state, log = self.donor_state.task_state, self.donor_state.log
                found = self.pieces[session] = Pieces(state, log, log.pin().base)
                base = log.base
                self.to_donor(
                    donors.SnapshotPinned(session, found.epoch, base, found.sizes, found.digest)
                )
                self.donor_state.work(1)  # it goes on
            case donors.UnpinSnapshot(session):
                self.pieces.pop(session, None)
            case donors.ReadChunk(session, number, slices):
                data = self.pieces[session].read(slices)
                self.to_donor(donors.ChunkRead(session, number, data))
            case newcomers.StoreChunk(session, number, data):
                with self.stored.open("ab") as file:
                    file.write(data)
                self.stored_chunks += 1
                self.to_newcomer(newcomers.ChunkStored(session, number))
            case newcomers.InstallState(session, _):
                self.moved = finished(self.stored, self.newcomer_replica)
                self.to_newcomer(newcomers.StateInstalled(session, self.moved.digest))
            case newcomers.DiscardState():
                self.stored.unlink(missing_ok=True)
            case newcomers.StartFrom():
                pass


@given(
    st.sampled_from(PANES),
    calls,
    st.lists(
        st.tuples(st.sampled_from(["donor", "other", "newcomer"]), st.integers(0, 12)), max_size=4
    ),
    st.integers(200, 900),
    calls,
)
def test_a_kill_of_either_side_at_any_chunk_costs_only_the_session(
    panes: int, before: list[int], kills: list[tuple[str, int]], chunk_bytes: int, after: list[int]
) -> None:
    with TemporaryDirectory() as name:
        session = Sessions(model(panes, 1), Path(name), chunk_bytes)
        for donor, lead in zip(session.donors, (0, 1), strict=True):
            for count in before:
                donor.work(count + lead)
        session.start_donor(0)
        session.order()
        for kind, chunks in kills:
            session.run(session.stored_chunks + chunks)
            if session.newcomer.started:
                break
            match kind:
                case "donor":
                    session.start_donor(session.donor_slot.replica)
                case "other":
                    session.start_donor(1 - session.donor_slot.replica)
                case _:
                    session.start_newcomer()
            session.order()
        session.run(10**9)
        if not session.newcomer.started:  # it asks another boot of the donor once more
            session.order()
            session.run(10**9)
        assert session.newcomer.started
        session.newcomer_replica.check()
        session.newcomer_replica.finish(after)


def some_pieces(directory: Path) -> Pieces:
    log = filled(directory / "log", 5)
    state = TaskState(4, 4000, State({"op": EMPTY}), chained_digest_from(-1))
    return Pieces(state, log, 0)


def bytes_of(pieces: Pieces) -> bytes:
    plan = ChunkPlan(pieces.sizes, 10_000_000)
    return pieces.read(plan.slices(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"RKSM\2" + data[5:], "use images of one release"),
        (lambda data: b"RKLG" + data[4:], "use images of one release"),
        (lambda data: data[:40], "40 bytes are too few for a header"),
        (lambda data: data[:-64], "epoch 4 cannot be read"),
        (lambda data: data + bytes(64), "64 bytes follow the last epoch"),
        (lambda data: data[:-70] + b"?" + data[-69:], "epoch 4 cannot be read"),
        (lambda data: data.replace(b"spark", b"storm"), "use images of one release"),
    ],
)
def test_what_is_not_state_of_this_release_is_refused_with_a_message(
    tmp_path: Path, change: Any, message: str
) -> None:
    data = change(bytes_of(some_pieces(tmp_path)))
    log = open_log(tmp_path / "installed")
    with pytest.raises(NotMovable, match=message):
        [*Installation(pa.py_buffer(data), None, frozenset({"op"})).epochs(log)]


def test_state_of_another_operator_is_refused(tmp_path: Path) -> None:
    data = pa.py_buffer(bytes_of(some_pieces(tmp_path)))
    with pytest.raises(NotMovable, match="operators op"):
        Installation(data, None, frozenset({"other"}))


def test_another_state_or_log_has_another_digest(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 5)
    first = TaskState(4, 4000, State({"op": EMPTY}), "-1:a")
    digests = {
        Pieces(state, log, base).digest
        for state in (
            first,
            replace(first, watermark=1),
            replace(first, chained_digest="-1:b"),
            replace(first, operators=State({"op": OperatorState(seq=1)})),
            replace(first, epoch=3),
        )
        for base in (0, 1)
    }
    assert len(digests) == 10


def test_spilled_epochs_are_sent_too(tmp_path: Path) -> None:
    log = filled(tmp_path / "log", 30, spill=MemorySpill(), budget=4_000)
    assert log.spilled(0) is not None
    pieces = Pieces(TaskState(29, 0, State({})), log, 0)
    found = Installation(pa.py_buffer(bytes_of(pieces)), None, frozenset())
    other = open_log(tmp_path / "other")
    assert [e.digest for e in found.epochs(other)] == [batch(e).digest for e in range(30)]


def test_a_pinned_log_is_not_truncated(tmp_path: Path) -> None:
    log = filled(tmp_path, 30, file_bytes=500)
    pin = log.pin()
    log.truncate(20)
    assert log.base == pin.base == 0
    log.unpin(pin)
    log.truncate(20)
    assert log.base > 10


def test_a_log_that_lacks_an_epoch_is_not_sent(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    with pytest.raises(Exception, match="does not hold epochs 0 to 4"):
        Pieces(TaskState(4, 0, State({})), log, 0)


def test_other_results_of_earlier_boots_are_not_replaced(tmp_path: Path) -> None:
    """Which result is right is decided by computing the epoch again."""
    pieces = some_pieces(tmp_path)
    log = filled(tmp_path / "own", 3)
    log.append(batch(3, watermark=1))
    before = log.results(0)
    found = Installation(pa.py_buffer(bytes_of(pieces)), None, frozenset({"op"}))
    with pytest.raises(NotMovable, match="epoch 3 of the donor's log differs from"):
        found.write_log(log, tmp_path / "own", is_over=lambda: False)
    assert log.results(0) == before


def test_epochs_of_a_partner_do_not_stay_when_the_installation_is_given_up(tmp_path: Path) -> None:
    """The next boot would take them for results of this replica."""
    pieces = some_pieces(tmp_path)
    log = filled(tmp_path / "own", 2)
    found = Installation(pa.py_buffer(bytes_of(pieces)), None, frozenset({"op"}))
    with pytest.raises(NotMovable, match="restores from a checkpoint"):
        found.write_log(log, tmp_path / "own", is_over=lambda: log.last == 3)
    assert not log.results(0)
    found.write_log(log, tmp_path / "own", is_over=lambda: False)
    assert log.results(0) == open_log(tmp_path / "log").results(0)
