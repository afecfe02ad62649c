"""Whether a coordinator's own network is faulty: what proves it, what proves nothing, and for how
long a proof counts.

Two sources are read by one task, which the coordinator hears; the sources it does not hear.

Design: docs/design/coordinator.md#suspicion.
"""

from __future__ import annotations

import pytest

from rekindle.coordinator.model import Pod
from rekindle.coordinator.tasks.membership import (
    MAX_SILENCE_S,
    Membership,
    Task,
    coordinator_is_isolated,
)
from rekindle.protocol import STREAM_PORT, PollResponse, TaskPhase, TaskRef
from rekindle.topology.model import Slot, partition_of

SOURCES = Slot("src", 0, 0), Slot("src", 1, 0)
READER = Slot("left", 0, 0)
POLL_S = 0.25


class Cluster:
    """`interval_s`: of epochs. All tasks have just processed epoch 100, and are Live."""

    def __init__(self, interval_s: float = 1.0, phase: TaskPhase = TaskPhase.LIVE) -> None:
        self.interval_s = interval_s
        self.now = 1000.0
        self.membership = Membership()
        self.membership.pods_listed((pod(s) for s in (*SOURCES, READER)), self.now)
        self.membership.polling_started(self.now)
        self.was_isolated: list[bool] = []
        for epoch in (99, 100):
            self.now += POLL_S
            for slot in (*SOURCES, READER):
                self.hear(slot, epoch, phase if slot in SOURCES else TaskPhase.LIVE)
        self.cut_at = self.now

    def task(self, slot: Slot) -> Task:
        task = self.membership.get(slot)
        assert task is not None
        return task

    def hear(
        self,
        slot: Slot,
        epoch: int,
        phase: TaskPhase = TaskPhase.LIVE,
        unreadable: tuple[str, ...] = (),
        boot: str = "first",
    ) -> None:
        ref = TaskRef(segment=slot.segment, partition=slot.partition, replica=0, incarnation=1)
        response = PollResponse(
            task=ref,
            boot_id=boot,
            fence=1,
            phase=phase,
            stable_epoch=epoch,
            unreadable=unreadable,
        )
        self.membership.answered(self.task(slot), response, self.now)

    def pass_time(self, seconds: float, batch: int = 1, stops_at: float = 1e9) -> None:
        """The reader reads what the sources release until `stops_at`, `batch` epochs at once."""
        until = self.now + seconds
        while self.now < until:
            self.now += POLL_S
            released = int((min(self.now, stops_at) - self.cut_at) / self.interval_s)
            self.hear(READER, 100 + released // batch * batch)
            self.membership.woken(self.now)
            self.was_isolated.append(self.is_isolated())

    def is_isolated(self) -> bool:
        readable = {partition_of(READER): SOURCES}
        return coordinator_is_isolated(self.membership, readable, self.interval_s, self.now)


def pod(slot: Slot) -> Pod:
    return Pod(f"{slot.key}-1", slot, 1, slot.key, may_be_running=True, was_ready=True)


@pytest.mark.parametrize(
    ("interval_s", "batch"), [(0.1, 1), (0.1, 64), (1.0, 1), (1.0, 8), (10.0, 1), (60.0, 1)]
)
def test_isolation_does_not_end_while_a_reader_advances(interval_s: float, batch: int) -> None:
    cluster = Cluster(interval_s)
    cluster.pass_time(MAX_SILENCE_S + 3 * interval_s * batch, batch)
    assert cluster.is_isolated()
    cluster.was_isolated.clear()
    cluster.pass_time(max(60.0, 6 * interval_s * batch), batch)
    assert all(cluster.was_isolated)


def test_isolation_ends_when_no_reader_advances() -> None:
    cluster = Cluster()
    cluster.pass_time(10.0)
    assert cluster.is_isolated()
    stopped_at = cluster.now
    cluster.pass_time(60.0, stops_at=stopped_at)
    assert not cluster.is_isolated()


def test_dead_sources_are_no_isolation() -> None:
    cluster = Cluster()
    cluster.pass_time(60.0, stops_at=cluster.now)
    assert not any(cluster.was_isolated)


def test_epochs_read_before_the_last_response_prove_nothing() -> None:
    """The reader has read another incarnation, and has got no row since."""
    cluster = Cluster()
    for slot in SOURCES:
        cluster.task(slot).response = None
        cluster.hear(slot, 20)
    cluster.pass_time(10.0, stops_at=cluster.now)
    assert not any(cluster.was_isolated)


@pytest.mark.parametrize("phase", [p for p in TaskPhase if p is not TaskPhase.LIVE])
def test_tasks_that_were_not_live_prove_nothing(phase: TaskPhase) -> None:
    """The reader may process what it has read ahead from an earlier incarnation."""
    cluster = Cluster(phase=phase)
    cluster.pass_time(60.0)
    assert not any(cluster.was_isolated)


def test_a_source_that_its_reader_cannot_read_is_dead() -> None:
    cluster = Cluster()
    cluster.pass_time(10.0)
    cluster.hear(READER, 200, unreadable=(f"{SOURCES[0].key}:{STREAM_PORT}",))
    assert not cluster.is_isolated()


def test_a_reader_that_has_restarted_proves_nothing_before_it_is_live() -> None:
    cluster = Cluster()
    cluster.pass_time(10.0)
    other = Slot("right", 0, 0)
    cluster.membership.pods_listed((pod(s) for s in (*SOURCES, READER, other)), cluster.now)
    sources = {Slot("src", 2, 0), *SOURCES}
    cluster.membership.pods_listed((pod(s) for s in (*sources, READER, other)), cluster.now)
    cluster.hear(Slot("src", 2, 0), 110)
    readable = {partition_of(READER): SOURCES, partition_of(other): SOURCES}
    for number in range(40):
        cluster.now += POLL_S
        cluster.hear(READER, 111 + number)
        cluster.hear(other, 20 + number, TaskPhase.CATCHING_UP, boot="second")
        cluster.membership.woken(cluster.now)
    args = cluster.membership, readable, cluster.interval_s
    assert coordinator_is_isolated(*args, cluster.now)
    cluster.hear(
        other, 70, TaskPhase.CATCHING_UP, (f"{SOURCES[0].key}:{STREAM_PORT}",), boot="second"
    )
    assert not coordinator_is_isolated(*args, cluster.now)
    cluster.hear(other, 71, boot="second")
    assert not coordinator_is_isolated(*args, cluster.now), "it is Live, and behind them"


def test_a_pause_puts_no_response_into_the_future() -> None:
    cluster = Cluster()
    cluster.membership.woken(cluster.now)
    cluster.now += 40.0
    cluster.hear(READER, 140)
    cluster.membership.woken(cluster.now)
    reader = cluster.task(READER)
    assert (reader.last_response_at, reader.advanced_at) == (cluster.now, cluster.now)


def test_the_coordinators_own_pause_ends_no_isolation() -> None:
    cluster = Cluster()
    cluster.pass_time(10.0)
    silences = [cluster.task(s).silence_s for s in SOURCES]
    assert all(s > 1.5 for s in silences)
    cluster.now += 40.0
    cluster.membership.woken(cluster.now)
    assert cluster.is_isolated()
    assert [cluster.task(s).silence_s for s in SOURCES] == silences
