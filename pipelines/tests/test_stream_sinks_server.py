"""A real Flight client reads a real Flight server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from log_parts import SCHEMA, batch, open_log
from test_streams_damage import flip, value_of

from rekindle.identity import Identity
from rekindle.protocol import ConsistencyState
from rekindle.stream_sinks.client import NoLongerKept, ReadRefused, ReplicaUnavailable, read_call
from rekindle.stream_sinks.cursor import Cursor
from rekindle.stream_sinks.reading import ServedQuery
from rekindle.stream_sinks.server import MAX_SENDING_OF_PEER, Calls, StreamSinkServer
from rekindle.stream_sinks.ticket import Ticket
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.live_history import Position
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

IDENTITY = Identity("uid-1", "secret")
OPTIONS = flight.FlightCallOptions(
    timeout=20, headers=[(b"authorization", b"Bearer " + str(IDENTITY.reader_token).encode())]
)


class Task:
    """What of a task readers outside can see."""

    def __init__(
        self,
        directory: Path,
        *,
        tentative: bool = False,
        address: str = "127.0.0.1",
        port: int = 0,
        **log_options: object,
    ) -> None:
        self.log: OutputLog = open_log(directory / "log", **log_options)
        self.output = LiveOutput(self.log, directory / "tentative", directory.name)
        self.query = ServedQuery("delays", self.log, self.output, tentative=tentative)
        self.server = StreamSinkServer(address, port, IDENTITY)
        self.server.serve([self.query])

    def append(self, *epochs: int, rows: int = 3) -> None:
        for epoch in epochs:
            self.log.append(batch(epoch, rows))

    def append_tentative(self, *epochs: int, attempt: int = 1) -> None:
        self.output.enter(ConsistencyState.UP_FAILURE)
        for epoch in epochs:
            self.output.append(attempt, epoch, epoch, batch(epoch, 2, salt=7).rows)

    def correct(self, *epochs: int) -> None:
        self.output.undo(self.log.last + 1)
        self.append(*epochs)
        self.output.reconciliation_done(self.log.last)


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    made = Task(tmp_path, tentative=True)
    yield made
    made.server.stop()


def connect(task: Task) -> Any:
    return flight.connect(f"grpc://127.0.0.1:{task.server.port}")


def received(client: Any, ticket: str) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    for chunk in client.do_get(flight.Ticket(ticket), OPTIONS):
        yield json.loads(chunk.app_metadata.to_pybytes()), chunk.data


def call(client: Any, ticket: str | dict[str, Any]) -> list[tuple[dict[str, Any], pa.RecordBatch]]:
    return list(received(client, ticket if isinstance(ticket, str) else json.dumps(ticket)))


def summary(messages: list[tuple[dict[str, Any], pa.RecordBatch]]) -> list[tuple[str, int, int]]:
    """Of each message its kind, epoch and number of rows."""
    return [(m["kind"], m["epoch"], rows.num_rows) for m, rows in messages]


def test_a_client_reads_what_is_kept_and_goes_on(task: Task) -> None:
    task.append(0, 1)
    client = connect(task)
    first = call(client, {"query": "delays"})
    assert summary(first) == [("STABLE", 0, 3), ("STABLE", 1, 3), ("END", 1, 0)]
    assert first[1][1].schema == SCHEMA
    assert pa.Table.from_batches([first[1][1]]).equals(batch(1).rows)
    task.append(2)
    assert summary(call(client, first[-1][0]["next"])) == [("STABLE", 2, 3), ("END", 2, 0)]
    assert summary(call(client, first[0][0]["next"]))[0] == ("STABLE", 1, 3)


def test_a_call_waits_for_what_comes(task: Task) -> None:
    task.append(0)
    client = connect(task)
    ticket = call(client, {"query": "delays"})[-1][0]["next"]
    threading.Timer(0.2, lambda: task.append(1)).start()
    assert summary(call(client, ticket))[0] == ("STABLE", 1, 3)
    began = time.monotonic()
    assert summary(call(client, {"query": "delays", "from_epoch": 9})) == [("END", 8, 0)]
    assert 0.9 < time.monotonic() - began < 5


def test_epochs_without_rows_are_not_sent(task: Task) -> None:
    task.append(*range(50), rows=0)
    task.append(50)
    assert summary(call(connect(task), {"query": "delays"})) == [("STABLE", 50, 3), ("END", 50, 0)]


def test_each_message_has_the_state_of_the_output(task: Task) -> None:
    task.append(0)
    asked = {"query": "delays", "tentative": True}
    assert [m["state"] for m, _ in call(connect(task), asked)] == ["STABLE"] * 2
    task.append_tentative(1)
    assert [m["state"] for m, _ in call(connect(task), asked)] == ["UP_FAILURE"] * 3


def test_a_call_ends_after_its_bytes(task: Task) -> None:
    task.append(*range(10), rows=1000)
    client, ticket = connect(task), json.dumps({"query": "delays", "max_bytes": 50_000})
    calls, got = 0, list[int]()
    while len(got) < 10:
        found = call(client, ticket)
        ticket, calls = found[-1][0]["next"], calls + 1
        got += [m["epoch"] for m, _ in found[:-1]]
    assert got == list(range(10))
    assert calls > 3


def test_a_large_epoch_comes_in_parts(task: Task) -> None:
    task.append(0, rows=200_000)
    found = call(connect(task), {"query": "delays"})[:-1]
    assert [m["part"] for m, _ in found] == list(range(found[0][0]["parts"]))
    assert len(found) > 2
    assert pa.Table.from_batches([rows for _, rows in found]).num_rows == 200_000
    assert '"from_epoch": 0' in found[0][0]["next"]
    assert '"from_epoch": 1' in found[-1][0]["next"]


def test_parts_are_bounded_whatever_the_rows(task: Task) -> None:
    """A few long rows among many short ones: the average says nothing of a part."""
    texts = ["x" * (1 << 20 if 50 <= at < 60 else 1) for at in range(20_000)]
    rows = pa.table({"n": list(range(20_000)), "s": texts}, schema=SCHEMA)
    task.log.append(EpochBatch("stream", 0, 0, 0, rows, "00" * 16))
    found = call(connect(task), {"query": "delays"})[:-1]
    assert pa.Table.from_batches([part for _, part in found]).equals(rows.combine_chunks())
    assert max(part.nbytes for _, part in found) < (1 << 20) + 1000
    assert len(found) < 40


def test_an_epoch_below_the_base_is_refused_with_the_base(tmp_path: Path) -> None:
    task = Task(tmp_path, file_bytes=4_000)
    task.append(*range(30))
    task.log.truncate(25)
    base = task.log.base
    assert base > 0
    with pytest.raises(flight.FlightServerError, match=f"oldest kept epoch is {base}") as refused:
        call(connect(task), {"query": "delays", "from_epoch": base - 1})
    assert json.loads(refused.value.extra_info) == {"error": "BelowFloor", "oldest": base}
    assert "Traceback" not in str(refused.value)
    assert summary(call(connect(task), {"query": "delays"}))[0] == ("STABLE", base, 3)
    task.server.stop()


@pytest.mark.parametrize("asked_from", [0, 10])
def test_damage_to_retained_rows_is_refused_with_the_new_base(
    task: Task, tmp_path: Path, asked_from: int
) -> None:
    task.append(*range(30))
    task.log.retain(1 << 20)
    task.log.truncate(20)
    (path,) = (tmp_path / "log").glob("*.log")
    flip(path, value_of(path, 1001))
    got = list[int]()
    ticket = json.dumps({"query": "delays", "from_epoch": asked_from})
    with pytest.raises(flight.FlightServerError, match="begins with epoch 21 now") as refused:
        got += (m["epoch"] for m, _ in received(connect(task), ticket))
    assert got == list(range(asked_from, 10))
    assert json.loads(refused.value.extra_info) == {"error": "BelowFloor", "oldest": 21}
    assert "Traceback" not in str(refused.value)
    assert task.log.damage is None
    assert summary(call(connect(task), {"query": "delays"}))[0] == ("STABLE", 21, 3)


def test_the_client_knows_why_it_is_refused(task: Task) -> None:
    task.log.start_at(20)
    task.append(20)
    address, token = f"127.0.0.1:{task.server.port}", IDENTITY.reader_token
    first = Ticket("delays", cursor=Cursor(1)).encode()
    with pytest.raises(NoLongerKept) as below:
        list(read_call(address, first, token))
    assert below.value.oldest == 20
    with pytest.raises(ReadRefused, match="reader's token"):  # as of another topology's pod
        list(read_call(address, first, "another"))
    with pytest.raises(ReplicaUnavailable, match="no query board"):
        list(read_call(address, Ticket("board").encode(), token))


def test_epochs_that_replicas_disagree_about_are_not_sent(task: Task) -> None:
    task.append(*range(5))
    task.query.through = 2
    assert summary(call(connect(task), {"query": "delays"}))[-1] == ("END", 2, 0)


def test_no_tentative_epoch_is_sent_while_replicas_disagree_about_those_before(
    task: Task,
) -> None:
    task.append(*range(5))
    task.query.through = 2
    task.append_tentative(5)
    task.output.truncate(4)
    client = connect(task)
    found = call(client, {"query": "delays", "tentative": True})
    assert summary(found)[-2:] == [("STABLE", 2, 3), ("END", 2, 0)]
    task.query.limit(None)
    rest = [("STABLE", 3, 3), ("STABLE", 4, 3), ("TENTATIVE", 5, 2), ("END", 4, 0)]
    assert summary(call(client, found[-1][0]["next"])) == rest


def test_no_tentative_epoch_is_sent_above_what_replicas_agree_on(task: Task) -> None:
    task.append(0)
    task.append_tentative(1, 2)
    task.query.through = 1
    client = connect(task)
    found = call(client, {"query": "delays", "tentative": True})
    assert summary(found) == [("STABLE", 0, 3), ("TENTATIVE", 1, 2), ("END", 0, 0)]
    task.query.limit(None)
    assert summary(call(client, found[-1][0]["next"]))[0] == ("TENTATIVE", 2, 2)


@pytest.mark.parametrize(
    ("ticket", "message"),
    [
        ({"query": "board"}, "has no query board.*it has delays"),
        ({"query": "delays", "partition": 3}, "has partition 0 .* not 3"),
        ({"query": "delays", "form_epoch": 3}, "no field form_epoch"),
        ({"query": "delays", "from_epoch": -3}, "from_epoch in a ticket is -3"),
        ("delays", "a ticket is JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(
    task: Task, ticket: str | dict[str, Any], message: str
) -> None:
    with pytest.raises(flight.FlightServerError, match=message):
        call(connect(task), ticket)


def test_tentative_results_have_to_be_offered(task: Task) -> None:
    task.query.tentative = False
    with pytest.raises(flight.FlightServerError, match=r"set sink\.stream\.tentative: true"):
        call(connect(task), {"query": "delays", "tentative": True})


@pytest.mark.parametrize("token", ["", "Bearer secret", "Bearer x"])
def test_the_reader_token_is_needed(task: Task, token: str) -> None:
    options = flight.FlightCallOptions(timeout=10, headers=[(b"authorization", token.encode())])
    with pytest.raises(flight.FlightUnauthenticatedError, match="reader's token"):
        connect(task).do_get(flight.Ticket('{"query": "delays"}'), options).read_all()


def test_queries_are_listed_with_what_is_kept(task: Task) -> None:
    task.append(*range(5))
    (info,) = connect(task).list_flights(options=OPTIONS)
    assert info.descriptor.path == [b"delays"]
    assert info.schema == SCHEMA
    assert json.loads(info.app_metadata)["newest"] == 4
    again = connect(task).get_flight_info(info.descriptor, OPTIONS)
    assert summary(call(connect(task), again.endpoints[0].ticket.ticket.decode()))[0][1] == 0


def test_tentative_epochs_come_and_are_corrected(task: Task) -> None:
    task.append(0)
    client = connect(task)
    stable_only = call(client, {"query": "delays"})[-1][0]["next"]
    found = call(client, {"query": "delays", "tentative": True})
    task.append_tentative(1, 2)
    found += call(client, found[-1][0]["next"])
    assert summary(found)[-3:] == [("TENTATIVE", 1, 2), ("TENTATIVE", 2, 2), ("END", 0, 0)]
    task.correct(1, 2)
    corrected = call(client, found[-1][0]["next"])
    assert summary(corrected) == [
        ("UNDO", 1, 0),
        ("STABLE", 1, 3),
        ("STABLE", 2, 3),
        ("REC_DONE", 2, 0),
        ("END", 2, 0),
    ]
    assert summary(call(client, stable_only))[:-1] == [("STABLE", 1, 3), ("STABLE", 2, 3)]


def test_a_reader_goes_on_at_another_replica(task: Task, tmp_path: Path) -> None:
    task.append(0)
    task.append_tentative(1, 2)
    found = call(connect(task), {"query": "delays", "tentative": True})
    assert summary(found)[-2] == ("TENTATIVE", 2, 2)
    other = Task(tmp_path / "other", tentative=True)
    try:
        other.append(0)
        other.append_tentative(1, 2, 3)
        client = connect(other)
        after = call(client, found[-1][0]["next"])
        assert summary(after) == [("TENTATIVE", 3, 2), ("END", 0, 0)]
        other.output.undo(1)
        other.append(1, 2, 3)
        kinds = [kind for kind, _, _ in summary(call(client, after[-1][0]["next"]))]
        assert kinds == ["UNDO", "STABLE", "STABLE", "STABLE", "REC_DONE", "END"]
    finally:
        other.server.stop()


def test_a_forgotten_position_is_corrected_first(task: Task) -> None:
    task.append(0)
    client = connect(task)
    task.append_tentative(1, 2)
    ticket = call(client, {"query": "delays", "tentative": True})[-1][0]["next"]
    task.correct(1, 2, 3)
    task.append_tentative(4, attempt=2)
    task.output.truncate(3)  # all consumers of the topology have these
    found = call(client, ticket)
    assert summary(found) == [
        ("UNDO", 1, 0),
        ("STABLE", 1, 3),
        ("STABLE", 2, 3),
        ("REC_DONE", 2, 0),
        ("STABLE", 3, 3),
        ("TENTATIVE", 4, 2),
        ("END", 3, 0),
    ]


def test_a_position_of_another_boot_is_corrected_first(task: Task, tmp_path: Path) -> None:
    task.append(0)
    task.append_tentative(1, 2)
    ticket = call(connect(task), {"query": "delays", "tentative": True})[-1][0]["next"]
    restarted = Task(tmp_path / "restarted", tentative=True)
    try:
        restarted.append(0, 1, 2, 3)
        restarted.append_tentative(4)
        restarted.output.truncate(3)
        found = call(connect(restarted), ticket)
        assert summary(found) == [
            ("UNDO", 1, 0),
            ("STABLE", 1, 3),
            ("STABLE", 2, 3),
            ("REC_DONE", 2, 0),
            ("STABLE", 3, 3),
            ("TENTATIVE", 4, 2),
            ("END", 3, 0),
        ]
    finally:
        restarted.server.stop()


def test_what_is_forgotten_during_a_call_is_not_skipped(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.append(0)
    client = connect(task)
    task.append_tentative(1, 2)
    ticket = call(client, {"query": "delays", "tentative": True})[-1][0]["next"]
    task.correct(1, 2, 3)
    task.append_tentative(4, attempt=2)
    following, calls = task.output.next, list[int]()

    def truncated_before(position: Position | None, from_epoch: int) -> Any:
        calls.append(from_epoch)
        if len(calls) == 2:  # the first one only looks whether there is anything
            task.output.truncate(3)
        return following(position, from_epoch)

    monkeypatch.setattr(task.output, "next", truncated_before)
    assert [kind for kind, _, _ in summary(call(client, ticket))][:2] == ["UNDO", "STABLE"]


def test_a_ticket_of_a_part_asks_for_the_whole_epoch(task: Task) -> None:
    task.append(0)
    task.log.append(batch(1, 200_000))
    task.output.append(1, 2, 2, batch(2, 200_000, salt=7).rows)
    client = connect(task)
    found = call(client, {"query": "delays", "tentative": True})
    for kind, epoch in (("STABLE", 1), ("TENTATIVE", 2)):
        parts = [m for m, _ in found if (m["kind"], m["epoch"]) == (kind, epoch)]
        assert len(parts) > 2
        for part in parts[:-1]:
            again = summary(call(client, part["next"]))
            assert again[0][:2] == (kind, epoch)
            assert sum(rows for at, e, rows in again if (at, e) == (kind, epoch)) == 200_000


def test_many_idle_readers_of_one_address_starve_nobody(task: Task) -> None:
    """Behind one address there may be a gateway, or `kubectl port-forward`."""
    task.append(0)
    tickets = [call(connect(task), {"query": "delays"})[-1][0]["next"]] * 24
    found: list[list[tuple[str, int, int]] | Exception] = []

    def read(ticket: str) -> None:
        try:
            with connect(task) as client:
                ticket = call(client, ticket)[-1][0]["next"]  # nothing comes
                found.append(summary(call(client, ticket)))
        except Exception as error:
            found.append(error)

    readers = [threading.Thread(target=read, args=(ticket,)) for ticket in tickets]
    for reader in readers:
        reader.start()
    time.sleep(1.2)  # within their second calls, if all are served
    assert summary(call(connect(task), {"query": "delays"}))[0] == ("STABLE", 0, 3)
    task.append(1)
    for reader in readers:
        reader.join(20)
    assert [answer for answer in found if isinstance(answer, Exception)] == []
    assert len(found) == 24


def test_those_who_wait_to_be_sent_something_get_their_turn() -> None:
    calls, order = Calls(), list[int]()
    busy = [calls.sending("one") for _ in range(MAX_SENDING_OF_PEER)]
    for turn in busy:
        turn.__enter__()

    def wait(number: int) -> None:
        with calls.sending("one"):
            order.append(number)

    waiting = []
    for number in range(3):
        waiting.append(threading.Thread(target=wait, args=(number,)))
        waiting[-1].start()
        eventually(lambda n=number: calls.queued == n + 1)  # type: ignore[misc]
    with calls.sending("another"):
        assert order == []
    busy.pop().__exit__(None, None, None)
    for thread in waiting:
        thread.join(5)
    assert order == [0, 1, 2]
    for turn in busy:
        turn.__exit__(None, None, None)


def test_a_reader_that_takes_nothing_holds_up_nobody(task: Task) -> None:
    """More rows than the windows of all connections take, which gRPC widens while they are fast."""
    once = pa.array([0]).take(pa.array([0] * 3_000_000))
    rows = pa.table({"n": once, "s": pa.array(["x" * 20]).take(once)}, schema=SCHEMA)
    task.log.append(EpochBatch("stream", 0, 0, 0, rows, "00" * 16))
    ticket = flight.Ticket('{"query": "delays"}')
    clients = [connect(task) for _ in range(MAX_SENDING_OF_PEER)]
    stuck = [client.do_get(ticket, OPTIONS) for client in clients]
    for reader in stuck:
        reader.read_chunk()
    began = time.monotonic()
    task.append(1)
    assert time.monotonic() - began < 5
    another = connect(task)

    def refused() -> bool:
        """Until the buffers of all connections are full, a sender is not stuck between messages."""
        try:
            another.do_get(ticket, OPTIONS).read_chunk()
        except flight.FlightUnavailableError as error:
            return "8 of one address" in str(error)
        return False

    eventually(refused, 30)
    another.close()
    for reader in stuck:
        reader.cancel()
    for client in clients:
        client.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            assert call(connect(task), {"query": "delays", "from_epoch": 1})
            return
        except flight.FlightUnavailableError:
            time.sleep(0.1)
    raise AssertionError("the calls of readers that are gone did not end")
