"""Leader election: at most one leader, whatever calls, clocks and processes do."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_operator.election import CallSpan, Candidate, ElectionTiming, LeaseRecord
from rekindle_operator.lease import lease_body, read_lease, released

TIMING = ElectionTiming()
_TIMEOUT_S = 1.0


class Conflict(Exception):
    """The version to be replaced is not the current one."""


@dataclass
class Server:
    """The Lease in the API server."""

    record: LeaseRecord | None = None
    versions: int = 0

    def write(self, wanted: LeaseRecord) -> LeaseRecord:
        current = self.record.version if self.record is not None else ""
        if wanted.version != current:
            raise Conflict
        self.versions += 1
        uid = self.record.uid if self.record is not None else f"made as {self.versions}"
        self.record = replace(wanted, version=str(self.versions), uid=uid)
        return self.record


@dataclass
class Faults:
    """Probabilities of what may happen to a call or a process."""

    lost_request: float = 0.0
    lost_response: float = 0.0
    slow: float = 0.0
    pause: float = 0.0
    deletion_s: float = 0.0  # mean time between two; 0: the Lease is not deleted


@dataclass
class Process:
    """A candidate with its own clock, which has any offset and runs slightly fast or slow."""

    name: str
    offset_s: float
    rate: float
    candidate: Candidate = field(init=False)
    dead: bool = False

    def __post_init__(self) -> None:
        self.candidate = Candidate(self.name, f"process of {self.name}", TIMING)

    def clock(self, at: float) -> float:
        return self.offset_s + at * self.rate

    def leads(self, at: float) -> bool:
        return not self.dead and self.candidate.leads(self.clock(at))


class World:
    """Discrete events: each process calls, the server responds, calls and processes fail."""

    def __init__(self, seed: int, processes: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.server = Server()
        self.now = 0.0
        self.history: list[tuple[float, str]] = []
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.processes = [
            Process(str(n), self.random.uniform(0, 1e6), self.random.uniform(0.97, 1.03))
            for n in range(processes)
        ]
        for process in self.processes:
            self.after(self.random.uniform(0, 1), partial(self.call, process))
        self.after(0.0, lambda: self.delete(is_first=True))

    def delete(self, is_first: bool = False) -> None:
        """By a user, whoever leads."""
        if self.faults.deletion_s == 0:
            return
        if not is_first:
            self.server.record = None
            self.history.append((self.now, "the Lease is deleted"))
        self.after(self.random.expovariate(1 / self.faults.deletion_s), self.delete)

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
            leaders = [p.name for p in self.processes if p.leads(self.now)]
            assert len(leaders) <= 1, f"at {self.now}: {leaders} lead, by {self.history[-9:]}"
        self.now = until

    def leaders(self) -> list[str]:
        return [p.name for p in self.processes if p.leads(self.now)]

    def call(self, process: Process) -> None:
        if process.dead:
            return
        began, before = self.now, process.candidate
        request_delay_s = self.delay()
        if self.happens(self.faults.lost_request):
            self.response_at(began + _TIMEOUT_S, process, began, None)
            return

        def serve() -> None:
            response: Callable[[Candidate, CallSpan], Candidate]
            if before.wants_to_write():
                try:
                    written = self.server.write(before.record_to_write())
                    response = lambda c, span: c.after_write(written, span)  # noqa: E731
                    self.history.append((self.now, f"{process.name} writes {written.version}"))
                except Conflict:
                    response = lambda c, span: c.after_conflict()  # noqa: E731
            else:
                found = self.server.record
                response = lambda c, span: c.after_read(found, span)  # noqa: E731
            if self.happens(self.faults.lost_response):
                self.response_at(began + _TIMEOUT_S, process, began, None)
            else:
                self.response_at(self.now + self.delay(), process, began, response)

        self.after(request_delay_s, serve)

    def response_at(
        self,
        at: float,
        process: Process,
        began: float,
        response: Callable[[Candidate, CallSpan], Candidate] | None,
    ) -> None:
        if at - began > _TIMEOUT_S:
            at, response = began + _TIMEOUT_S, None  # the server may still do it later

        def take() -> None:
            if process.dead:
                return
            span = CallSpan(process.clock(began), process.clock(self.now))
            before = process.candidate
            process.candidate = response(before, span) if response else before.after_failure(span)
            self.after(process.candidate.pause_s() + self.pause(), lambda: self.call(process))

        self.after(max(0.0, at - self.now) + self.pause(), take)

    def delay(self) -> float:
        if self.happens(self.faults.slow):
            return self.random.uniform(0.1, 3.0)
        return self.random.uniform(0.001, 0.02)

    def pause(self) -> float:
        """A process that gets no CPU, or is stopped."""
        return self.random.uniform(0.1, 10.0) if self.happens(self.faults.pause) else 0.0

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability


FAULTS = st.builds(
    Faults,
    lost_request=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    lost_response=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    slow=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    pause=st.sampled_from([0.0, 0.02, 0.1]),
    deletion_s=st.sampled_from([0.0, 0.2, 1.0, 3.0, 10.0]),
)


@given(seed=st.integers(0, 2**32), processes=st.integers(2, 4), faults=FAULTS)
def test_at_most_one_process_leads(seed: int, processes: int, faults: Faults) -> None:
    World(seed, processes, faults).run(until=60)  # asserts after each event


@pytest.mark.parametrize("seed", range(20))
def test_after_the_lease_is_deleted_one_leads_within_three_seconds(seed: int) -> None:
    world = World(seed, processes=3, faults=Faults())
    world.run(until=10 + seed / 50)
    world.server.record = None
    world.run(until=world.now + 3)
    assert len(world.leaders()) == 1


@given(seed=st.integers(0, 2**32), faults=FAULTS)
def test_one_leads_after_calls_succeed_again(seed: int, faults: Faults) -> None:
    world = World(seed, processes=3, faults=faults)
    world.run(until=30)
    world.faults = Faults()
    world.run(until=50)
    assert len(world.leaders()) == 1


@pytest.mark.parametrize("seed", range(20))
def test_another_leads_three_seconds_after_a_crash(seed: int) -> None:
    world = World(seed, processes=3, faults=Faults())
    world.run(until=10)
    (leader,) = world.leaders()
    world.processes[int(leader)].dead = True
    world.run(until=13)
    assert len(world.leaders()) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_api_server_does_not_change_the_leader(seed: int) -> None:
    world = World(seed, processes=3, faults=Faults())
    world.run(until=10)
    (leader,) = world.leaders()
    term = world.processes[int(leader)].candidate.term
    world.delay = lambda: world.random.uniform(0.2, 0.45)  # type: ignore[method-assign]
    world.run(until=60)
    assert world.server.record is not None
    assert world.server.record.holder == leader
    assert world.processes[int(leader)].candidate.term == term


def candidate(name: str = "a", seen: LeaseRecord | None = None) -> Candidate:
    new = Candidate(name, f"process of {name}", TIMING)
    return new if seen is None else new.after_read(seen, CallSpan(0.0, 0.01))


def record(holder: str = "b", version: str = "1", lease_s: float = 2.0) -> LeaseRecord:
    return LeaseRecord(
        holder, f"process of {holder}", lease_s, transitions=0, version=version, uid="uid"
    )


def leading(name: str = "a") -> Candidate:
    """It took a released Lease; its renewal lasted from 0 to 0.1 s."""
    free = candidate(name, released(record()))
    return free.after_write(record(name, "2"), CallSpan(0.0, 0.1))


def watched(watching: Candidate, for_s: float, version: str = "1") -> Candidate:
    """It reads the same version repeatedly."""
    at = watching.last_read_ended or 0.0
    while at < for_s:
        watching = watching.after_read(
            replace(watching.seen or record(), version=version), CallSpan(at, at + 0.01)
        )
        at += 0.25
    return watching


def test_a_released_lease_is_free_at_once() -> None:
    assert candidate(seen=released(record())).wants_to_write()


def test_time_without_a_response_is_no_silence() -> None:
    waiting = candidate(seen=record())
    for second in range(10):
        waiting = waiting.after_failure(CallSpan(second, second + 1))
    waiting = waiting.after_read(record(), CallSpan(10, 10.01))
    assert not waiting.wants_to_write()


def test_a_pause_of_the_candidate_is_no_silence() -> None:
    waiting = candidate(seen=record()).after_read(record(), CallSpan(60, 60.01))
    assert not waiting.wants_to_write()


def test_a_longer_lease_of_the_holder_is_respected() -> None:
    assert watched(candidate(seen=record(lease_s=2)), 3).wants_to_write()
    assert not watched(candidate(seen=record(lease_s=8)), 7).wants_to_write()
    assert watched(candidate(seen=record(lease_s=8)), 9).wants_to_write()


def test_a_holder_of_the_same_name_is_another_process() -> None:
    other = LeaseRecord("a", "an earlier process", lease_s=2.0, transitions=0, version="1")
    assert not candidate("a", other).is_holder


def test_a_leader_that_cannot_renew_stops_acting_first() -> None:
    leader = leading()
    leader = leader.after_failure(CallSpan(0.5, 1.5))
    assert leader.leads(1.5)
    assert not leader.leads(TIMING.renew_deadline_s)
    assert leader.is_holder
    again = leader.after_write(record("a", "3"), CallSpan(5.0, 5.1))
    assert again.leads(5.2)
    assert again.term == leader.term, "no other leader in between"


def test_leading_again_after_another_is_a_new_term() -> None:
    first = leading()
    lost = first.after_conflict().after_read(record("b", "2"), CallSpan(0.5, 0.6))
    assert not lost.leads(0.6)
    again = watched(lost, 4, version="2").after_write(record("a", "3"), CallSpan(5.0, 5.1))
    assert again.term == first.term + 1


def test_a_new_lease_counts_once_earlier_leaders_have_stopped() -> None:
    leader = candidate().after_read(None, CallSpan(0.0, 0.1))
    assert leader.wants_to_write()
    leader = leader.after_write(record("a", "1"), CallSpan(0.2, 0.3))
    for at, leads in ((0.7, False), (2.2, False), (2.4, True)):
        leader = leader.after_write(record("a", str(at)), CallSpan(at, at + 0.1))
        assert leader.leads(at + 0.1) == leads
    assert leader.term == 1


def test_a_leader_creates_a_deleted_lease_again() -> None:
    deleted = leading().after_conflict().after_read(None, CallSpan(0.5, 0.6))
    assert deleted.leads(0.6)
    renewed = deleted.after_write(replace(record("a", "9"), uid="new"), CallSpan(0.6, 0.7))
    assert renewed.leads(0.8), "by its last renewal"
    assert not renewed.leads(TIMING.renew_deadline_s), "another may have led by a third Lease"
    assert not renewed.has_led_by_its_lease


def test_timing_that_allows_two_leaders_is_refused() -> None:
    with pytest.raises(ValueError, match="must be less than"):
        ElectionTiming(lease_s=2, renew_deadline_s=2.0)


def test_a_lease_is_read_as_it_was_written() -> None:
    written = LeaseRecord("a", "p", lease_s=2.0, transitions=3, version="7")
    assert read_lease(lease_body("ns", "name", written, 5.0, 4.0)) == written
