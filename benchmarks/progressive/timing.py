"""When queries answer again, and how late: from arrivals of nodes and a policy. Pure.

Seconds since the failure. Tasks that start on a node at once share its cores. A query's last tasks
restore a checkpoint and replay what has come since, from the logs of tasks before them; until then
its results are late by what is left to replay. Left out, since it is the same for all policies:
what a pass of the operator, the scheduler and the kubelet take, some tenths of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from progressive.experiment import LostQuery
from progressive.policies import Policy

THRESHOLD = 1.2
"""Of the relative latency, below which a query is available."""
INTERVAL_S = 5
"""Over which relative latencies are averaged."""


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Measured ones: docs/performance.md. `start_s`: from a container's start until a task works;
    `start_cpu_s`: what that takes of a core. `replay_speed`: times the live rate, of one task that
    has a node's cores to itself, in calls of ten epochs. `latency_s`: mean age of a row in results
    with epochs of a second. `since_checkpoint_s`: half of the default interval."""

    start_s: float = 4.0
    start_cpu_s: float = 3.4
    restore_s: float = 0.5
    replay_speed: float = 205.0
    latency_s: float = 0.66
    since_checkpoint_s: float = 5.0
    cores: int = 2


@dataclass(frozen=True, slots=True)
class Answering:
    """A query from when its last task has restored its state."""

    since_s: float
    backlog_s: float
    catch_up_speed: float  # seconds of backlog that a second removes

    def relative_latency(self, at_s: float, latency_s: float) -> float:
        left_s = self.backlog_s - self.catch_up_speed * (at_s - self.since_s)
        return 1.0 + max(left_s, 0.0) / latency_s


@dataclass(frozen=True, slots=True)
class Interval:
    at_s: float  # its end
    available: int
    available_priority: int
    relative_latency: float | None  # mean of the queries that answer; None: none does


def placements(
    policy: Policy, arrivals: Sequence[float]
) -> Iterator[tuple[float, Mapping[str, str]]]:
    """What starts at each arrival: partition -> node."""
    placed: dict[str, str] = {}
    nodes: list[str] = []
    for number, at_s in enumerate(arrivals, start=1):
        nodes.append(f"new-{number}")
        if number < len(arrivals) and arrivals[number] == at_s:
            continue
        started = policy.place(placed, nodes)
        placed |= started
        assert max(Counter(placed.values()).values(), default=0) <= policy.slots
        yield at_s, started


def answering(
    queries: Sequence[LostQuery],
    policy: Policy,
    arrivals: Sequence[float],
    times: RecoveryTimes,
) -> dict[str, Answering]:
    """By query, of those that come back at all."""
    ready: dict[str, tuple[float, int]] = {}  # by partition: when, and how many start beside it
    for at_s, started in placements(policy, arrivals):
        beside = Counter(started.values())
        for name, node in started.items():
            number = beside[node]
            start_s = max(times.start_s, number * times.start_cpu_s / times.cores)
            ready[name] = at_s + start_s + times.restore_s, number
    found = {}
    for query in queries:
        if query.partitions <= ready.keys():
            since_s = max(ready[name][0] for name in query.partitions)
            last = [ready[name] for name in query.partitions if ready[name][0] == since_s]
            speed = times.replay_speed / max(number for _, number in last) - 1
            found[query.name] = Answering(since_s, since_s + times.since_checkpoint_s, speed)
    return found


def intervals(
    queries: Sequence[LostQuery],
    answers: Mapping[str, Answering],
    times: RecoveryTimes,
    until_s: int,
) -> list[Interval]:
    found = []
    for begin_s in range(0, until_s, INTERVAL_S):
        available = priority = 0
        latencies = []
        for query in queries:
            answer = answers.get(query.name)
            if answer is None or answer.since_s > begin_s:
                continue
            seconds = range(begin_s + 1, begin_s + INTERVAL_S + 1)
            of = [answer.relative_latency(at_s, times.latency_s) for at_s in seconds]
            mean = sum(of) / len(of)
            latencies.append(mean)
            if mean < THRESHOLD:
                available += 1
                priority += query.priority
        mean_latency = sum(latencies) / len(latencies) if latencies else None
        found.append(Interval(begin_s + INTERVAL_S, available, priority, mean_latency))
    return found
