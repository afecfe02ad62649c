"""Replicas that write groups of epochs in turn, whatever fails: each group is written once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from random_histories import histories

from rekindle.connectors.group_writer import (
    PATIENCE,
    BeginSession,
    Done,
    GroupWriter,
    Look,
    Step,
    WriteGroup,
)

EPOCHS = 5  # in a group
GROUPS = 12


@dataclass
class Broker:
    """Transactions of one transactional id. `on_its_way`: a commit that is decided, and that looks
    do not see yet. `rows`: the groups that are visible, by their last epoch."""

    session: int = 0
    rows: list[int] = field(default_factory=list)
    marker: int = -1
    on_its_way: int | None = None

    def begin_session(self) -> tuple[int, int]:
        self.arrive()
        self.session += 1
        return self.session, self.marker

    def commit(self, session: int, group: int) -> bool:
        """False: it is fenced."""
        self.arrive()
        if session != self.session:
            return False
        self.on_its_way = group
        return True

    def arrive(self) -> None:
        if self.on_its_way is not None:
            self.rows.append(self.on_its_way)
            self.marker, self.on_its_way = self.on_its_way, None


class MarkerOutside(Broker):
    """The marker is written after the transaction: looks and sessions may come between."""

    late: int | None = None

    def arrive(self) -> None:
        if self.on_its_way is not None:
            self.rows.append(self.on_its_way)
            if self.late is not None:
                self.marker = self.late
            self.late, self.on_its_way = self.on_its_way, None


class MarkerReadBefore(Broker):
    """The marker is read before the session has begun."""

    def begin_session(self) -> tuple[int, int]:
        marker = self.marker
        self.arrive()
        self.session += 1
        return self.session, marker


class Replica:
    """A task that writes its groups in order. What it does, and hears of it, are two moves, so it
    can be frozen between them, and be killed."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.start()

    def start(self) -> None:
        self.core = GroupWriter()
        self.group = EPOCHS - 1  # its last epoch
        self.session = 0
        self.step: Step | None = None

    def move(self, now: float, outcome: str) -> None:
        """Decide, or do what was decided. `outcome`: of a commit."""
        if self.step is None:
            self.step = self.core.next_step(self.group, now)
            return
        step, self.step = self.step, None
        match step:
            case Done():
                self.group += EPOCHS
            case Look():
                self.core.marker_read(self.broker.marker, now)
            case BeginSession():
                self.session, marker = self.broker.begin_session()
                self.core.session_begun(marker)
            case WriteGroup():
                self._commit(outcome)

    def _commit(self, outcome: str) -> None:
        if outcome == "not sent":
            self.core.session_lost()
        elif not self.broker.commit(self.session, self.group):
            self.core.fenced()
        elif outcome == "unknown":
            self.core.session_lost()
        else:
            self.core.committed(self.group)


MOVES = [
    *(f"{who} {what}" for who in "ab" for what in 8 * ["ok"] + ["unknown", "not sent", "killed"]),
    *3 * ["arrive"],
    *2 * ["wait"],
]


def run(moves: Sequence[str], broker: Broker) -> None:
    replicas, now = {"a": Replica(broker), "b": Replica(broker)}, 0.0
    for move in moves:
        who, _, outcome = move.partition(" ")
        now += 0.05
        if move == "arrive":
            broker.arrive()
        elif move == "wait":
            now += PATIENCE.first_s
        elif outcome == "killed":
            replicas[who].start()
        else:
            replicas[who].move(now, outcome)
    broker.arrive()
    assert broker.rows == [EPOCHS * n + EPOCHS - 1 for n in range(len(broker.rows))]


@given(histories(MOVES, 400))
def test_each_group_is_written_once_and_in_order(moves: list[str]) -> None:
    run(moves, Broker())


@pytest.mark.parametrize("wrong", [MarkerOutside, MarkerReadBefore])
def test_a_marker_at_the_wrong_time_is_found(wrong: type[Broker]) -> None:
    @given(histories(MOVES, 400))
    def property_of(moves: list[str]) -> None:
        run(moves, wrong())

    with pytest.raises(AssertionError):
        property_of()


@given(histories(MOVES, 100))
def test_whatever_happened_all_is_written_in_the_end(moves: list[str]) -> None:
    broker = Broker()
    replicas, now = [Replica(broker), Replica(broker)], 0.0
    for move in moves:
        who, _, outcome = move.partition(" ")
        replicas["ab".find(who)].move(now, outcome or "ok")
        now += 0.05
    for _ in range(20_000):
        now += 0.05
        for replica in replicas:
            replica.move(now, "ok")
        broker.arrive()
    assert len(broker.rows) > GROUPS


def test_replicas_do_not_fence_each_other_when_commits_are_slow() -> None:
    """A commit takes 10 s, longer than the first patience."""
    broker, now, sessions = Broker(), 0.0, 0
    replicas, busy_until = [Replica(broker), Replica(broker)], [0.0, 0.0]
    while now < 600.0:
        now += 0.05
        for at, replica in enumerate(replicas):
            if now < busy_until[at]:
                continue
            if replica.step is None and isinstance(
                replica.core.next_step(replica.group, now), WriteGroup
            ):
                busy_until[at] = now + 10.0
            replica.move(now, "ok")
        broker.arrive()
    sessions = broker.session
    assert len(broker.rows) > 40
    assert sessions < 10


def test_a_replica_takes_over_from_one_that_is_gone() -> None:
    broker, now = Broker(), 0.0
    gone, other = Replica(broker), Replica(broker)
    while len(broker.rows) < 3:
        gone.move(now, "ok")
        broker.arrive()
        other.move(now, "ok")
        now += 0.05
    since = now
    while len(broker.rows) < 6:
        other.move(now, "ok")
        broker.arrive()
        now += 0.05
    assert now - since < PATIENCE.first_s + 3.0


def test_a_single_replica_does_not_wait() -> None:
    replica, now = Replica(Broker()), 0.0
    while len(replica.broker.rows) < 3:
        replica.move(now, "ok")
        replica.broker.arrive()
    replica.start()  # killed
    for _ in range(40):
        replica.move(now, "ok")
        replica.broker.arrive()
    assert len(replica.broker.rows) > 6
