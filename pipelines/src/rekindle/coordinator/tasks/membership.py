"""Which tasks exist, when each responded last, and which are suspected.

Pure. Suspicion only changes the order of routes and the report; it does not start or stop tasks.
The operator decides whether a task is lost.

Design: docs/design/coordinator.md#suspicion.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rekindle.coordinator.model import Pod
from rekindle.identity import STREAM_VERSIONS, stream_conflict
from rekindle.protocol import STREAM_PORT, PollResponse, RestorePoint, TaskPhase
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Slot, partition_of

MIN_SILENCE_S = 1.5
"""No task is suspected before this time."""
MAX_SILENCE_S = 5.0
"""A task that is silent for this long is suspected, regardless of its history."""
START_TIMEOUT_S = 60.0
"""Time for a container's first response, after which nothing is kept for it."""
MAX_TICK_GAP_S = 0.5
"""If two ticks are further apart, the rest of the gap was a pause of the coordinator, not silence
of the tasks."""
_PROOF_MARGIN_S = 0.5
"""A reader must be this far beyond the last response of a silent task to prove that it is alive."""
_PROOF_MAX_AGE_S, _PROOF_MAX_AGE_EPOCHS = 15.0, 3
"""A reader that has not advanced for longer proves nothing. (Within that time it may be that it
processes several epochs at once, and then none for some seconds.)"""
_MAX_REGULAR_GAP_S = 3.0
"""A longer silence was a failure, and is not part of a task's history."""
_HISTORY = 64
_MAX_LISTED = 5  # tasks in a message
_PHASES_BEFORE_START = frozenset({TaskPhase.WAITING, TaskPhase.RESTORING})
_DEVIATIONS = 6.0


@dataclass(slots=True)
class Task:
    """What is known about the highest incarnation of one slot.

    `known_since`: since when its first response is awaited: since its pod was listed, got ready, or
    polling began, and later by each pause of this process. `assigned`: its restore point.
    `position` is the newest epoch of inputs that the task certainly does not need any more; None
    while it has no restore point. `advanced_at`: when its log was last seen to have grown in this
    boot. `silence_s`: how long it had been silent when it was suspected. `failed_to_start`: its
    container does not start (no image, or it crashes at once), so that other tasks do not have to
    keep anything for it.
    """

    pod: Pod
    known_since: float
    last_response_at: float | None = None
    advanced_at: float | None = None
    response: PollResponse | None = None
    assigned: RestorePoint | None = None
    lent_starts: int = 0  # restore points that a partner lent, since it was last Live
    position: int | None = None
    suspected_since: float | None = None
    silence_s: float = 0.0
    refusal: str | None = None  # why it and this coordinator cannot work together
    failed_to_start: bool = False
    # Seconds between its responses.
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    slot: Slot = field(init=False)
    partition: Partition = field(init=False)

    def __post_init__(self) -> None:
        self.slot = self.pod.slot
        self.partition = partition_of(self.pod.slot)

    @property
    def endpoint(self) -> str:
        host = self.pod.address or ""
        return f"[{host}]:{STREAM_PORT}" if ":" in host else f"{host}:{STREAM_PORT}"

    @property
    def suspected(self) -> bool:
        return self.suspected_since is not None

    @property
    def phase(self) -> TaskPhase:
        return self.response.phase if self.response else TaskPhase.WAITING

    @property
    def restores(self) -> bool:
        """Whether it has a restore point, and has not started."""
        return self.assigned is not None and self.phase in _PHASES_BEFORE_START

    @property
    def lent_from(self) -> int | None:
        """The epoch after which it begins, or will begin, with a state that a partner lends."""
        if self.response is not None and self.response.lent_from is not None:
            return self.response.lent_from
        assigned = self.assigned if self.phase is TaskPhase.WAITING else None
        return assigned.epoch if assigned is not None and assigned.lender is not None else None

    @property
    def unknown(self) -> bool:
        """Whether it may be running with unknown progress."""
        return self.pod.may_be_running and self.response is None and not self.failed_to_start

    def tolerated_silence_s(self) -> float:
        """The longest silence that is likely, given its history."""
        if len(self.gaps) < 8:
            return MIN_SILENCE_S
        mean = sum(self.gaps) / len(self.gaps)
        deviation = math.sqrt(sum((g - mean) ** 2 for g in self.gaps) / len(self.gaps))
        return min(MAX_SILENCE_S, max(MIN_SILENCE_S, mean + _DEVIATIONS * deviation))


TaskPredicate = Callable[[Task], bool]


class Membership:
    """The tasks of one topology, by slot; the highest incarnation ever seen of a slot wins."""

    def __init__(self) -> None:
        self._tasks: dict[Slot, Task] = {}
        self._highest: dict[Slot, int] = {}
        self._last_tick: float | None = None

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def get(self, slot: Slot) -> Task | None:
        return self._tasks.get(slot)

    def find(self, slot: Slot, incarnation: int) -> Task | None:
        """None if that incarnation was replaced: its responses are ignored (I9)."""
        task = self._tasks.get(slot)
        return task if task is not None and task.pod.incarnation == incarnation else None

    def pods_listed(self, pods: Iterable[Pod], now: float) -> None:
        best: dict[Slot, Pod] = {}
        for pod in pods:
            if pod.incarnation >= best.get(pod.slot, pod).incarnation:
                best[pod.slot] = pod
        for slot, pod in best.items():
            if pod.incarnation < self._highest.get(slot, pod.incarnation):
                best[slot] = pod = _ended(pod)
            self._highest[slot] = max(pod.incarnation, self._highest.get(slot, 0))
        self._tasks = {slot: self._merge(slot, pod, now) for slot, pod in best.items()}

    def _merge(self, slot: Slot, pod: Pod, now: float) -> Task:
        task = self.find(slot, pod.incarnation)
        if task is None:
            return Task(pod=pod, known_since=now)
        if pod.was_ready and not task.pod.was_ready and task.response is None:
            task.known_since = now
        if not pod.may_be_running:
            task.response, task.position, task.assigned = None, None, None
            task.last_response_at, task.advanced_at = None, None
            task.suspected_since, task.silence_s = None, 0.0
        task.pod = pod
        return task

    def answered(self, task: Task, response: PollResponse, now: float) -> bool:
        """Process a response; True if it must be reported at once (responds again, new phase,
        output of another state)."""
        previous = task.response
        rebooted = previous is not None and previous.boot_id != response.boot_id
        is_urgent = (
            task.suspected
            or rebooted
            or previous is None
            or (previous.phase, previous.consistency) != (response.phase, response.consistency)
        )
        if task.last_response_at is not None and now - task.last_response_at <= _MAX_REGULAR_GAP_S:
            task.gaps.append(now - task.last_response_at)
        task.last_response_at = now
        if rebooted:
            task.advanced_at = None
        elif previous is not None and response.stable_epoch > previous.stable_epoch:
            task.advanced_at = now
        task.suspected_since, task.silence_s = None, 0.0
        task.refusal = None
        if rebooted:
            task.position = None
            if response.phase == TaskPhase.WAITING:
                task.assigned = None
        if response.phase is TaskPhase.LIVE:
            task.lent_starts = 0
        task.response = response
        task.position = _position(task, response)
        return is_urgent

    def poll_refused(self, slot: Slot, incarnation: int, message: str) -> bool:
        """Keep a refusal; True if it is new."""
        task = self.find(slot, incarnation)
        if task is None or task.refusal == message:
            return False
        task.refusal = message
        return True

    def refusals(self) -> list[str]:
        return [f"{t.slot.key}: {t.refusal}" for t in self if t.refusal is not None]

    def stream_conflict(self) -> tuple[int, ...]:
        """The stream protocols of tasks and of this image, with which lost tasks are replaced, if
        some cannot read from others."""
        versions = [t.response.stream_versions() for t in self if t.response is not None]
        return stream_conflict([*versions, STREAM_VERSIONS]) if versions else ()

    def stream_problem(self) -> str | None:
        """A message with the tasks that have an older stream protocol."""
        if not (conflict := self.stream_conflict()):
            return None
        older = sorted(
            task.slot.key
            for task in self
            if task.response is not None and task.response.stream_protocol != conflict[-1]
        )
        listed = ", ".join(older[:_MAX_LISTED]) + (", ..." if len(older) > _MAX_LISTED else "")
        protocols = " and ".join(map(str, conflict))
        return (
            f"tasks and the image of the coordinator have stream protocols {protocols}, and cannot "
            f"read from each other ({len(older)} tasks have an older one: {listed}): a task that "
            f"replaces a lost one cannot become Live. Set spec.suspend to true, and back once all "
            f"tasks have ended: then all start with one image, from the newest checkpoint"
        )

    def started(self) -> tuple[str, ...]:
        """Slots whose task has started from a restore point, of this coordinator or an older
        one."""
        return tuple(
            sorted(t.slot.key for t in self if t.response and t.response.restored_from is not None)
        )

    def newest_epoch(self) -> int:
        """The newest epoch that any task has in its log or as its head (after a restart a log may
        be ahead of the head)."""
        responses = [task.response for task in self if task.response is not None]
        return max((max(r.head_epoch, r.stable_epoch) for r in responses), default=NO_EPOCH)

    def reported_entries(self) -> frozenset[str]:
        """The saved entries in the tasks' last responses."""
        responses = [task.response for task in self if task.response is not None]
        return frozenset(d.object for r in responses for d in r.checkpoints if d.object)

    def entries_in_use(self) -> frozenset[str]:
        """Entries from which tasks are restored, and from which they have yet to read state."""
        points = (t.assigned for t in self if t.assigned is not None and t.restores)
        assigned = (point.object for point in points if point.lender is None)
        fetched = (t.response.restoring for t in self if t.response is not None)
        return frozenset(entry for entry in (*assigned, *fetched) if entry is not None)

    def polling_started(self, now: float) -> None:
        """The first polls are sent now."""
        self._last_tick = now
        for task in self:
            task.known_since = now

    def woken(self, now: float) -> list[Task]:
        """Suspect silent tasks; returns those that became suspected."""
        if self._last_tick is not None and now - self._last_tick > MAX_TICK_GAP_S:
            self._extend_timers(now - self._last_tick - MAX_TICK_GAP_S, now)
        self._last_tick = now
        for task in self:
            age = now - task.known_since
            task.failed_to_start = (
                task.response is None and not task.pod.was_ready and age > START_TIMEOUT_S
            )
        silent = [t for t in self if not t.suspected and _is_silent(t, now)]
        for task in silent:
            since = task.known_since if task.last_response_at is None else task.last_response_at
            task.suspected_since, task.silence_s = now, now - since
        return silent

    def _extend_timers(self, pause_s: float, now: float) -> None:
        """Move the timers by a pause of this process, but not beyond `now`: some were set after
        the pause."""
        for task in self:
            task.known_since = min(now, task.known_since + pause_s)
            if task.last_response_at is not None:
                task.last_response_at = min(now, task.last_response_at + pause_s)
            if task.advanced_at is not None:
                task.advanced_at = min(now, task.advanced_at + pause_s)


def _ended(pod: Pod) -> Pod:
    return Pod(pod.name, pod.slot, pod.incarnation, None, may_be_running=False, was_ready=False)


def _is_silent(task: Task, now: float) -> bool:
    if not task.pod.may_be_running:
        return False
    if task.last_response_at is None:
        return task.pod.was_ready and now - task.known_since > MAX_SILENCE_S
    silence_s = now - task.last_response_at
    return silence_s > MIN_SILENCE_S and silence_s > task.tolerated_silence_s()


def _position(task: Task, response: PollResponse) -> int | None:
    """The epoch at or below which the task certainly needs no input.

    That is the epoch that it was restored from, or the newest one that this boot has computed or
    saved. The end of its log does not count: an earlier boot may have written it, so that the
    engine computes these epochs again from their inputs.
    """
    start = response.restored_from
    if start is None:
        start = task.assigned.epoch if task.assigned else None
    if start is None and response.phase in (TaskPhase.WAITING, TaskPhase.FAILED):
        return task.position
    candidates = [NO_EPOCH if start is None else start, *(c.epoch for c in response.checkpoints)]
    candidates.append(max(response.digests, default=NO_EPOCH))
    if task.position is not None:
        candidates.append(task.position)
    return max(candidates)


def coordinator_is_isolated(
    membership: Membership,
    readable: Mapping[Partition, tuple[Slot, ...]],
    interval_s: float,
    now: float,
) -> bool:
    """Whether most tasks do not respond to the coordinator while their readers still read them.

    A reader that responds proves that a silent task is alive if it is well beyond the epoch in the
    silent task's last response, has advanced since that response and not too long ago, and does not
    report the task as unreadable. If a Live reader has not advanced like this, the silent task is
    taken as lost, and the answer is False; not if the reader is catching up, because it may still
    read older epochs. Silent tasks that prove nothing: one that was not Live (its readers may have
    read an earlier incarnation), and one with a partner that responds (its readers may have read
    the partner). `readable` names, for each partition, the replicas that its tasks read from.
    `interval_s`: of epochs.
    """
    margin = math.ceil(_PROOF_MARGIN_S / interval_s)
    since = now - max(_PROOF_MAX_AGE_S, _PROOF_MAX_AGE_EPOCHS * interval_s)
    running = [t for t in membership if t.pod.may_be_running and t.last_response_at is not None]
    silent = {t.slot: t for t in running if t.suspected}
    if len(silent) < 2 or 2 * len(silent) <= len(running):
        return False
    responding = {t.partition for t in running if not t.suspected}
    proofs = 0
    for task in running:
        if task.suspected or task.advanced_at is None or not task.phase.serves:
            continue
        for slot in readable.get(task.partition, ()):
            peer = silent.get(slot)
            if peer is None or peer.phase is not TaskPhase.LIVE or peer.partition in responding:
                continue
            if _has_read(task, peer, margin, since):
                proofs += 1
            elif task.phase is TaskPhase.LIVE or peer.endpoint in _unreadable(task):
                return False
    return proofs > 0


def _has_read(task: Task, peer: Task, margin: int, since: float) -> bool:
    """Whether a task has read from a silent peer after the peer's last response, and `since`."""
    if task.response is None or peer.response is None or peer.last_response_at is None:
        return False
    if task.advanced_at is None or task.advanced_at <= max(peer.last_response_at, since):
        return False
    is_beyond = task.response.stable_epoch > peer.response.stable_epoch + margin
    return is_beyond and peer.endpoint not in _unreadable(task)


def _unreadable(task: Task) -> tuple[str, ...]:
    return task.response.unreadable if task.response is not None else ()
