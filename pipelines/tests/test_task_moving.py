"""A replica gets state and log from its partner over HTTP: both shells, in one process.

Design: docs/design/state-movement.md#over-http.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from state_parts import of_runs
from task_world import FakeStates

from rekindle.backoff import BackoffPolicy
from rekindle.engine.model import State
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.exchange.state_mover.donor import DonorLimits
from rekindle.exchange.state_mover.messages import (
    Directive,
    NewcomerReport,
    OfferRequest,
    Order,
    Replica,
    Session,
    SessionVersion,
)
from rekindle.exchange.state_mover.newcomer import NewcomerEffect, NewcomerLimits
from rekindle.exchange.state_mover.phases import NewcomerPhase
from rekindle.identity import Identity
from rekindle.protocol import PollRequest, RestorePoint, TaskRef
from rekindle.streams.digest import chained_digest_from, digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.movement_wire import STATE_PATH
from rekindle.streams.server import StreamServer
from rekindle.task.core.movement import MovementPart
from rekindle.task.moving import donor as donor_module
from rekindle.task.moving import pieces as pieces_module
from rekindle.task.moving.donor import StateDonor
from rekindle.task.moving.newcomer import Installed, StateNewcomer
from rekindle.task.moving.pieces import Moved, install
from rekindle.task.saver import CheckpointSaver
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot
from rekindle_testing.waiting import eventually

ADDRESS = "127.0.43.1"
OWN = Identity("uid-a", "token-a")
SCHEMA = pa.schema([("n", pa.int64())])
CHUNK_BYTES = 64 << 10
DONOR = Replica(Slot("seg", 0, 0), 1)
NEWCOMER = TaskRef(segment="seg", partition=0, replica=1, incarnation=3)
SLOT = Slot("seg", 0, 1)


def open_log(directory: Path) -> OutputLog:
    return OutputLog(directory, "s", 0, SCHEMA)


class Donor:
    """A replica that has state: 40 runs of 16 KiB, and a log of 30 epochs."""

    def __init__(self, directory: Path, port: int = 0, boot: str = "donor-1") -> None:
        self.log = open_log(directory / boot)
        runs = [Run(pa.table({"__w": [at] * 1024, "n": range(at, at + 1024)})) for at in range(40)]
        operators = State({"op": of_runs(*runs)})
        self.state = TaskState(29, 2900, operators, chained_digest_from(-1))
        for epoch in range(30):
            self.append(epoch)
        self.saver = CheckpointSaver(FakeStates())
        self.server = StreamServer(ADDRESS, port, OWN, incarnation=1)
        limits = DonorLimits(chunk_bytes=CHUNK_BYTES)
        self.donor = StateDonor(
            DONOR, boot, lambda: self.state, self.log, self.saver, self.server, limits
        )

    def append(self, epoch: int) -> None:
        rows = pa.table({"n": list(range(epoch % 3 * 1000))}, schema=SCHEMA)
        self.log.append(EpochBatch("s", 0, epoch, epoch * 100, rows, digest_table(rows)))

    def stop(self) -> None:
        self.donor.stop(1)
        self.server.stop()
        self.saver.stop(1)


class Newcomer:
    def __init__(self, directory: Path, boot: str = "new-1") -> None:
        self.directory = directory
        limits = NewcomerLimits(chunk_bytes=CHUNK_BYTES, retry=BackoffPolicy(0.2, 0.5))
        self.part = MovementPart(NEWCOMER, boot, limits)
        self.boot = boot
        self.shell = StateNewcomer(self.part, OWN, directory / "moved", self.install, limits)
        self.fail = ""

    def install(self, stored: Path) -> Installed:
        if self.fail:
            raise OSError(28, self.fail)
        found = install(stored, RunFiles(self.directory / "runs"), ("op",))
        log = open_log(self.directory / "log")
        earlier = found.write_log(log, self.directory / "log", lambda: False)
        return Installed(Moved(found.state, found.base, found.digest(log)), log, earlier)

    def order(self, port: int, number: int = 1, **fields: Any) -> PollRequest:
        session = Session(SLOT, 3, SessionVersion(1, number))
        order = Order(session, self.boot, DONOR, needed=0)  # the first epoch of its inputs
        directive = Directive(order, f"{ADDRESS}:{port}", **fields)
        return poll(movement=directive)

    def report(self) -> NewcomerReport:
        found, _ = self.shell.report()
        assert found is not None
        return found

    @property
    def phase(self) -> NewcomerPhase | None:
        progress = self.report().progress
        return progress.phase if progress is not None else None


def poll(**fields: Any) -> PollRequest:
    return PollRequest(topology="uid-a", fence=1, generation=1, task=NEWCOMER, **fields)


@pytest.fixture
def donor(tmp_path: Path) -> Iterator[Donor]:
    made = Donor(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    made = Newcomer(tmp_path / "newcomer")
    yield made
    made.shell.stop()


def test_state_and_log_move_while_the_donor_goes_on(donor: Donor, newcomer: Newcomer) -> None:
    newcomer.shell.apply_poll(newcomer.order(donor.server.port), None)
    for epoch in range(30, 60):
        donor.append(epoch)
        donor.state = replace(donor.state, epoch=epoch)
        donor.donor.tick()
    eventually(lambda: newcomer.shell.installed is not None, 30)
    installed = newcomer.shell.installed
    assert installed is not None
    epoch, state = installed.moved.state.epoch, installed.moved.state
    tables = [run.table for run in state.operators.operators["op"].runs()]
    assert tables == [run.table for run in donor.state.operators.operators["op"].runs()]
    assert installed.log.results(0) == {e: r for e, r in donor.log.results(0).items() if e <= epoch}
    assert newcomer.part.has_state
    eventually(lambda: not donor.donor.sessions, 5)  # released
    eventually(lambda: not donor.saver.held(donor.state.operators), 5)
    donor.log.truncate(10**6)
    assert donor.log.base == 60


def test_the_log_of_a_task_that_starts_at_once_stays_open(
    donor: Donor, newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor may take what is installed before anything else happens."""
    taken: list[Installed] = []
    perform = newcomer.shell._perform

    def perform_and_take(effects: list[NewcomerEffect]) -> None:
        perform(effects)
        if newcomer.shell.installed is not None:
            taken.append(newcomer.shell.installed)
            newcomer.shell.installed = None

    monkeypatch.setattr(newcomer.shell, "_perform", perform_and_take)
    newcomer.shell.apply_poll(newcomer.order(donor.server.port), None)
    eventually(lambda: bool(taken), 30)
    newcomer.shell.stop()
    assert taken[0].log.wait_for(0, 0.0), "a closed log answers False"


def test_state_is_not_read_for_a_session_that_has_ended(
    donor: Donor, newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    released = threading.Event()

    def slow(table: pa.Table) -> str:
        read.append(len(read))
        if len(read) == 3:
            released.wait(30)
        return digest_table(table)

    monkeypatch.setattr(pieces_module, "digest_table", slow)
    order = newcomer.order(donor.server.port)
    assert order.movement is not None
    assert order.movement.order is not None
    newcomer.shell.apply_poll(order, None)
    eventually(lambda: len(read) == 3, 30)
    donor.donor.release([order.movement.order.session])
    eventually(lambda: not donor.donor.sessions, 5)
    released.set()
    eventually(lambda: not donor.saver.held(donor.state.operators), 10)
    assert len(read) == 3


def test_another_boot_of_the_donor_ends_the_session(
    tmp_path: Path, donor: Donor, newcomer: Newcomer
) -> None:
    stored = newcomer.shell._store

    async def slow(chunk: Any) -> None:
        if chunk.number == 2:
            donor.stop()
            other.append(Donor(tmp_path, donor.server.port, "donor-2"))
        await stored(chunk)

    other: list[Donor] = []
    newcomer.shell._store = slow  # type: ignore[method-assign]
    newcomer.shell.apply_poll(newcomer.order(donor.server.port), None)
    eventually(lambda: newcomer.phase is NewcomerPhase.FAILED, 30)
    newcomer.shell._store = stored  # type: ignore[method-assign]
    newcomer.shell.apply_poll(newcomer.order(donor.server.port, number=2), None)
    eventually(lambda: newcomer.shell.installed is not None, 30)
    other[0].stop()


def test_a_newcomer_restores_a_checkpoint_if_the_state_cannot_be_installed(
    donor: Donor, newcomer: Newcomer
) -> None:
    newcomer.fail = "no space"
    order = newcomer.order(donor.server.port)
    newcomer.shell.apply_poll(order, None)
    eventually(lambda: newcomer.phase is NewcomerPhase.FAILED, 30)
    progress = newcomer.report().progress
    assert progress is not None
    assert "no space" in progress.message
    restore = RestorePoint(epoch=3, object="entry")
    followed = newcomer.shell.apply_poll(poll(restore=restore, movement=order.movement), None)
    assert followed.restore == restore
    assert newcomer.part.restores
    assert not [*(newcomer.directory / "moved").glob("*")]


def test_a_restore_point_is_not_followed_within_a_session(donor: Donor, newcomer: Newcomer) -> None:
    order = newcomer.order(1)  # nobody is there
    assert order.movement is not None
    assert order.movement.order is not None
    version = order.movement.order.session.version
    newcomer.shell.apply_poll(order, None)
    late = poll(restore=RestorePoint(epoch=3, object="entry"))
    assert newcomer.shell.apply_poll(late, None).restore is None
    abandoned = replace(order.movement, order=None, abandoned=version)
    restoring = poll(restore=late.restore, movement=abandoned)
    assert newcomer.shell.apply_poll(restoring, None).restore == late.restore


def test_a_disk_without_space_ends_the_session_in_words(
    donor: Donor, newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    newcomer.shell.apply_poll(newcomer.order(donor.server.port), None)
    eventually(lambda: newcomer.phase is NewcomerPhase.FAILED, 30)
    progress = newcomer.report().progress
    assert progress is not None
    assert "200,000 bytes are free" in progress.message


def ask(port: int, content: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    sent = {"Authorization": "Bearer token-a", **headers}
    request = urllib.request.Request(f"http://{ADDRESS}:{port}{STATE_PATH}", body, sent)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, {}
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


SMALL_CHUNKS = asdict(
    OfferRequest(Session(SLOT, 3, SessionVersion(1, 1)), DONOR, needed=0, chunk_bytes=1)
)
GOOD = {"topology": "uid-a", "protocol": 3, "oldest": 3, "incarnation": 1}


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ({**GOOD, "protocol": 2, "oldest": 2}, 426, "speaks protocol 2"),
        ({**GOOD, "topology": "uid-b"}, 421, "it is for topology uid-b"),
        ({**GOOD, "incarnation": 7}, 410, "it is for incarnation 7, this is 1"),
        ({**GOOD, "kind": "secrets", "request": {}}, 400, "not a valid request"),
        ({**GOOD, "kind": "chunk", "request": {"number": 1}}, 400, "not a valid request"),
        ({**GOOD, "kind": "offer", "request": SMALL_CHUNKS}, 400, "not a valid request"),
        (b"[1]", 400, "not a valid request"),
        (b"x" * 70_000, 413, "at most"),
    ],
)
def test_requests_of_others_are_refused_with_a_message(
    donor: Donor, content: Any, status: int, message: str
) -> None:
    found, body = ask(donor.server.port, content)
    assert found == status
    assert message in body["message"]


def test_a_stranger_gets_no_state(donor: Donor) -> None:
    found, body = ask(donor.server.port, GOOD, Authorization="Bearer wrong")
    assert found == 401
    assert "token" in body["message"]


def test_a_donor_of_an_older_release_ends_the_session_in_words(newcomer: Newcomer) -> None:
    server = StreamServer(ADDRESS, 0, OWN, incarnation=1)
    server._message = _only_epochs  # type: ignore[method-assign]
    newcomer.shell.apply_poll(newcomer.order(server.port), None)
    eventually(lambda: newcomer.phase is NewcomerPhase.FAILED, 30)
    progress = newcomer.report().progress
    server.stop()
    assert progress is not None
    assert "only POST /v3/epochs is served here" in progress.message


async def _only_epochs(http: Any) -> Any:
    from rekindle.streams.server import _Refusal
    from rekindle.streams.wire import StreamUnavailable

    raise _Refusal(404, StreamUnavailable("only POST /v3/epochs is served here"))


def test_answers_hold_a_bounded_number_of_chunks(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for chunks and takes none is told to ask later."""
    monkeypatch.setattr(donor_module, "ANSWER_S", 0.5)
    donor.donor._max_chunk_answers = 0
    session = {"slot": {"segment": "seg", "partition": 0, "replica": 1}, "incarnation": 3}
    session["version"] = {"fence": 1, "number": 1}
    named = {"segment": "seg", "partition": 0, "replica": 0}
    request = {"session": session, "donor": {"slot": named, "incarnation": 1}, "number": 0}
    began = time.monotonic()
    status, _ = ask(
        donor.server.port, {**GOOD, "kind": "chunk", "request": {**request, "boot": "b"}}
    )
    assert status == 200
    assert time.monotonic() - began < 5
    assert donor.donor._chunk_answers == 0
