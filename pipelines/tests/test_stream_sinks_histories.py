"""Readers of random histories: stable epochs once and in order, tentative ones always corrected."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_parts import batch, open_log

from rekindle.errors import BelowFloor
from rekindle.stream_sinks import reading
from rekindle.stream_sinks.cursor import Cursor
from rekindle.stream_sinks.reading import ReadCall, ServedQuery
from rekindle.stream_sinks.ticket import Ticket, TicketPosition, parse_ticket
from rekindle.streams.live_output import LiveOutput


class Replica:
    """A task that fails and corrects itself, and whose replicas disagree, at random."""

    def __init__(self, directory: Path, random: Random) -> None:
        self.random = random
        self.log = open_log(directory)
        self.output = LiveOutput(self.log, directory / "tentative", directory.name)
        self.served = ServedQuery("q", self.log, self.output, tentative=True)
        self.attempt, self.newest, self.correcting = 0, -1, False

    def go_on(self) -> None:
        stable, choice = self.log.last, self.random.random()
        if self.newest > stable and not self.correcting and choice < 0.3:
            self.output.undo(stable + 1)
            self.correcting = True
        elif self.correcting and choice < 0.7:
            self._append()
            if self.log.last >= self.newest or self.random.random() < 0.1:
                self.output.reconciliation_done(self.log.last)
                self.correcting = False
        elif self.newest > stable or choice < 0.3:
            if self.newest <= stable:
                self.attempt, self.newest = self.attempt + 1, stable
            self.newest += 1
            rows = batch(self.newest, 2, salt=self.attempt).rows
            self.output.append(self.attempt, self.newest, 0, rows)
        else:
            self._append()
        if self.random.random() < 0.1:
            disputed = self.served.through is None and self.log.last >= 0
            self.served.limit(self.random.randint(-1, self.log.last) if disputed else None)
        if self.random.random() < 0.2:
            self.output.truncate(self.log.last - self.random.randint(0, 1))

    def _append(self) -> None:
        self.log.append(batch(self.log.last + 1, 0 if self.log.last % 5 == 3 else 3))


class Reader:
    """What a client that follows the rules of docs/read-a-stream.md has. `dropped`: the newest
    tentative epoch that an UNDO has dropped and no REC_DONE has ended; -1: none."""

    def __init__(self, tentative: bool) -> None:
        self.ticket = Ticket("q", 0, Cursor(0), tentative, wait_s=0, max_bytes=600).encode()
        self.stable: dict[int, pa.Table] = {}
        self.tentative: dict[int, pa.Table] = {}
        self.dropped = -1

    def read(self, replica: Replica, random: Random) -> bool:
        """One call, which may end early, also within an epoch; whether there was anything."""
        any_rows = False
        parts: list[pa.RecordBatch] = []
        for rows, metadata in ReadCall(
            replica.served, parse_ticket(self.ticket.encode())
        ).messages():
            message = json.loads(metadata)
            kind, epoch = message["kind"], message["epoch"]
            self.ticket = message["next"]
            any_rows = any_rows or kind != "END"
            parts.append(rows)
            if message["part"] + 1 < message["parts"]:
                if random.random() < 0.1:
                    break  # the connection is lost
                continue
            table = pa.Table.from_batches(parts)
            parts = []
            if kind in ("STABLE", "TENTATIVE"):
                assert replica.served.through is None or epoch <= replica.served.through
            if kind == "STABLE":
                assert epoch not in self.stable
                assert not self.stable or epoch > max(self.stable)
                assert all(e > epoch for e in self.tentative)
                self.stable[epoch] = table
            elif kind == "TENTATIVE":
                assert not self.stable or epoch > max(self.stable)
                assert epoch not in self.tentative
                self.tentative[epoch] = table
            elif kind == "UNDO":
                gone = [e for e in self.tentative if e >= epoch]
                assert gone
                self.dropped = max([self.dropped, *gone])
                for e in gone:
                    del self.tentative[e]
            elif kind == "REC_DONE":
                assert self.dropped >= 0
                self.dropped = -1
            if random.random() < 0.1:
                break  # the connection is lost
        return any_rows

    def read_all(self, replica: Replica, random: Random) -> None:
        """Calls until nothing comes: afterwards, all stable epochs are there."""
        while self.read(replica, random):
            pass
        assert sorted(self.stable) == with_rows(max(replica.served.newest, *self.stable, -1))
        assert all(e > replica.served.newest for e in self.tentative)


def with_rows(last: int) -> list[int]:
    """The epochs through `last` that have rows: `Replica` appends some without."""
    return [e for e in range(last + 1) if (e - 1) % 5 != 3]


@pytest.mark.simulated
@given(st.integers(0, 2**32), st.booleans())
def test_readers_that_change_replicas_get_the_stable_results(seed: int, tentative: bool) -> None:
    random = Random(seed)
    small_parts = patch.object(reading, "PART_BYTES", 64)
    with TemporaryDirectory() as directory, small_parts:
        replicas = [Replica(Path(directory) / name, random) for name in random.choice(["a", "ab"])]
        reader, reads = Reader(tentative), random.choice([0.1, 0.5])
        for _ in range(30):
            random.choice(replicas).go_on()
            if random.random() < reads:
                random.choice([reader.read, reader.read, reader.read_all])(
                    random.choice(replicas), random
                )
        best = max(replicas, key=lambda r: r.log.last)
        best.served.limit(None)
        best.output.undo(best.log.last + 1)
        while best.log.last < max(best.newest, *reader.tentative, 0, reader.dropped):
            best._append()
        best.output.reconciliation_done(best.log.last)
        reader.read_all(best, random)
        assert sorted(reader.stable) == with_rows(best.log.last)
        assert all(t.equals(batch(e, 3).rows) for e, t in reader.stable.items())
        assert not reader.tentative
        assert reader.dropped == -1
        assert tentative or not reader.tentative


TICKETS = st.builds(
    Ticket,
    st.text(max_size=9),
    st.none() | st.integers(0, 64),
    st.none()
    | st.integers(0, 99).flatmap(
        lambda s: st.builds(
            Cursor,
            st.just(s),
            st.none() | st.tuples(st.integers(s, s + 5), st.integers(s + 5, s + 9)),
            st.integers(-1, 200),
        )
    ),
    st.booleans(),
    st.none()
    | st.builds(TicketPosition, st.text(max_size=9), st.integers(0, 9), st.integers(-1, 9)),
    st.integers(0, 8 << 20),
    st.floats(0, 1),
)


@given(TICKETS)
def test_tickets_are_read_as_they_are_written(ticket: Ticket) -> None:
    assert parse_ticket(ticket.encode().encode()) == ticket


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["query", "from_epoch", "at", "held", "wait_s", "partition", "x"]),
                inner,
                max_size=4,
            )
        ),
    ).map(lambda message: json.dumps(message).encode())
)
def test_any_other_bytes_are_refused_with_a_message(content: bytes) -> None:
    error = None
    try:
        parse_ticket(content)
    except ValueError as refused:
        error = str(refused)
    assert error is None or "ticket" in error


def test_the_floor_is_named(tmp_path: Path) -> None:
    replica = Replica(tmp_path, Random(1))
    for _ in range(5):
        replica._append()
    served = ServedQuery("q", replica.log, None, from_epoch=3)
    with pytest.raises(BelowFloor, match="oldest kept epoch is 3"):
        next(ReadCall(served, Ticket("q", cursor=Cursor(2))).messages())
