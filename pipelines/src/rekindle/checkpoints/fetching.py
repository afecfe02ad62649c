"""Fetches the state objects of an entry: those that are read first, the others in the background.

`FetchQueue` decides what is fetched when, and is pure; `Fetch` has the threads. A failed fetch is
repeated after a back-off, without a limit, and is reported, as is a call that does not return.
Only an object that is missing, or damaged in each of several reads, is given up: then the state is
lost, reading it raises `StateLost`, and the task has to be restored again.

Design: docs/decisions/0048-lazy-restore.md.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from weakref import ref

from rekindle.backoff import BackoffPolicy
from rekindle.checkpoints.store import UnreadableObject
from rekindle.engine.failure import DiskFull
from rekindle.engine.state.remote import AwaitedRun, RunFetcher
from rekindle.errors import ObjectMissing, StateLost, StoreError
from rekindle.workers import CallTimer, Worker

PARALLEL = 4
"""Maximum of objects that are fetched at a time, by background threads and by readers of state."""
PARALLEL_BYTES = 64 << 20
"""Default maximum of their bytes in memory; a larger object is fetched alone."""
READS = 3
"""An object counts as damaged after so many damaged reads: a single read may be truncated."""
_BACKOFF = BackoffPolicy(first_s=0.25, longest_s=5.0)

AwaitedRuns = Mapping[int, AwaitedRun]
"""By number of the record batch in an object, which is an Arrow IPC file with a batch for each
run."""


class BadRead(StoreError):
    """What was read is damaged. It is read again."""


@dataclass(frozen=True, slots=True)
class LostObject:
    """A state object that is missing or damaged, and what was found."""

    name: str
    message: str

    def error(self) -> StateLost:
        return StateLost(self.message, self.name)


class FetchPhase(StrEnum):
    """Of one object. A failure leads back from `IN_FLIGHT` to `WAITING`."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    FETCHED = "fetched"


class FetchQueue:
    """Which object is fetched next. `sizes`: bytes by name, in the order in which they are
    fetched; `most_bytes`: of those that are fetched at a time. Pure; times are seconds. The cost of
    a call does not depend on the number of waiting objects, except of those that have failed."""

    def __init__(self, sizes: Mapping[str, int], most_bytes: int = PARALLEL_BYTES) -> None:
        self._sizes = dict(sizes)
        self._most_bytes = most_bytes
        self._waiting = OrderedDict.fromkeys(sizes)  # in order
        self._in_flight: dict[str, int] = {}  # with their sizes
        self._failures = 0  # in a row, of any object
        self._retry_at = float("-inf")
        self._failed: dict[str, _Failed] = {}  # the objects whose last attempt has failed
        self.unfetched_bytes = sum(self._sizes.values())
        self.lost: LostObject | None = None

    def phase(self, name: str) -> FetchPhase:
        if name in self._in_flight:
            return FetchPhase.IN_FLIGHT
        return FetchPhase.WAITING if name in self._waiting else FetchPhase.FETCHED

    @property
    def complete(self) -> bool:
        """Whether all objects are fetched."""
        return not self._waiting and not self._in_flight

    @property
    def unfetched(self) -> list[str]:
        """The objects that are not fetched: first those in flight, then the others in order."""
        return [*self._in_flight, *self._waiting]

    @property
    def problem(self) -> str | None:
        """Why the last attempt to fetch an object failed, if it is not fetched yet."""
        newest = next(reversed(self._failed.values()), None)
        return newest.message if newest is not None else None

    @property
    def wake_at(self) -> float | None:
        """When `take` may return an object; None if it cannot before another event."""
        if self.lost is not None or self._is_full():
            return None
        name, due_at = self._next()
        if name is None or not self.has_room(name):
            return None
        return max(due_at, self._retry_at)

    def has_room(self, name: str) -> bool:
        """Whether this object may be fetched beside those that are being fetched."""
        size = self._sizes[name] + sum(self._in_flight.values())
        return not self._in_flight or (not self._is_full() and size <= self._most_bytes)

    def _is_full(self) -> bool:
        return len(self._in_flight) >= PARALLEL

    def _next(self, now: float = float("-inf")) -> tuple[str | None, float]:
        """The first waiting object that is due at `now`, otherwise the one that is due next; and
        its time."""
        name: str | None = None
        earliest = float("inf")
        for other in self._waiting:
            failed = self._failed.get(other)
            due_at = failed.retry_at if failed is not None else float("-inf")
            if due_at <= now:
                return other, due_at
            if due_at < earliest:
                name, earliest = other, due_at
        return name, earliest

    def prioritize(self, names: Iterable[str]) -> None:
        """Fetch these first, in this order."""
        for name in reversed([name for name in names if name in self._waiting]):
            self._waiting.move_to_end(name, last=False)

    def take(self, now: float) -> str | None:
        """The next object to fetch; None if there is none, the last attempt has just failed, or the
        maximum is being fetched. Smaller ones do not overtake one that has no room yet."""
        if self.lost is not None or now < self._retry_at or self._is_full():
            return None
        name, due_at = self._next(now)
        if name is None or due_at > now or not self.has_room(name):
            return None
        self.claim(name)
        return name

    def claim(self, name: str) -> None:
        """The caller fetches this object, which waits and has room."""
        del self._waiting[name]
        self._in_flight[name] = self._sizes[name]

    def fetched(self, name: str) -> None:
        self.unfetched_bytes -= self._in_flight.pop(name)
        self._failures, self._retry_at = 0, float("-inf")
        self._failed.pop(name, None)

    def failed(self, name: str, message: str, now: float, bad_read: bool = False) -> None:
        """The object is queued again behind the others, with a back-off. Until a fetch succeeds, a
        back-off delays the other objects too. After READS bad reads it is lost."""
        before = self._failed.pop(name, _Failed("", now))
        times, bad_reads = before.times + 1, before.bad_reads + bad_read
        self._failed[name] = _Failed(message, now + _BACKOFF.wait_s(times), times, bad_reads)
        if bad_reads >= READS:
            self.mark_lost(name, message)
            return
        del self._in_flight[name]
        self._waiting[name] = None
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)

    def mark_lost(self, name: str, message: str) -> None:
        """The object is missing or damaged: nothing more is fetched. It stays in `unfetched`."""
        del self._in_flight[name]
        self._waiting[name] = None
        self.lost = self.lost or LostObject(name, message)


@dataclass(frozen=True, slots=True)
class _Failed:
    """Failed attempts to fetch an object: their number, the last one's message."""

    message: str
    retry_at: float
    times: int = 0
    bad_reads: int = 0


class Fetch:
    """The objects of one entry. `load(name, awaited)` fetches an object, and calls `arrive` of its
    awaited runs. `start` begins to fetch all in the background; without it, an object is fetched
    when its state is read. `most_bytes`: of the objects that are fetched at a time, in memory."""

    def __init__(
        self, load: Callable[[str, AwaitedRuns], None], most_bytes: int = PARALLEL_BYTES
    ) -> None:
        self._load = load
        self._most_bytes = most_bytes
        self._queue = FetchQueue({})
        self._awaited: dict[str, dict[int, ref[AwaitedRun]]] = {}
        self._changed = threading.Condition()
        self._calls: dict[str, CallTimer] = {}
        self._workers: list[Worker] = []
        self._stopping = False
        self.during_wait: Callable[[], AbstractContextManager[object]] = nullcontext
        """A thread enters this context while it waits for an object."""

    def expect(self, objects: Mapping[str, tuple[AwaitedRuns, int]]) -> None:
        """Set the objects: runs and bytes by name, in the order in which they are fetched. An
        object is skipped if no state refers to its runs any more."""
        sizes = {name: size for name, (_, size) in objects.items()}
        self._queue = FetchQueue(sizes, self._most_bytes)
        self._awaited = {
            name: {batch: ref(run) for batch, run in awaited.items()}
            for name, (awaited, _) in objects.items()
        }

    def fetcher(self, name: str) -> RunFetcher:
        return _ObjectFetcher(self, name)

    def start(self) -> None:
        numbers = range(min(PARALLEL, len(self._awaited)))
        self._workers = [Worker(f"restore-{n}", partial(self._run, n)) for n in numbers]
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """Begin no further fetch. A running call is not interrupted."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.stop()

    @property
    def complete(self) -> bool:
        """Whether all objects are fetched."""
        with self._changed:
            return self._queue.complete

    @property
    def unfetched(self) -> list[str]:
        """The objects that are not fetched."""
        with self._changed:
            return self._queue.unfetched

    @property
    def unfetched_bytes(self) -> int:
        """Memory that the objects will take that are not fetched."""
        with self._changed:
            return self._queue.unfetched_bytes

    @property
    def problem(self) -> str | None:
        calls = [timer.problem for timer in self._calls.copy().values()]
        workers = [worker.problem for worker in self._workers]
        with self._changed:
            failed = self._queue.problem
        return next((p for p in (failed, *calls, *workers) if p is not None), None)

    @property
    def lost(self) -> StateLost | None:
        """Why the state cannot be completed."""
        lost = self._queue.lost
        return lost.error() if lost is not None else None

    def prioritize(self, name: str) -> None:
        with self._changed:
            self._queue.prioritize([name])

    def get(self, name: str) -> None:
        """Return when this object is fetched: by this thread, or by another one if it does already,
        or if the maximum is being fetched (then this object is next). Raises StoreError, DiskFull,
        StateLost."""
        with self._changed:
            if self._queue.phase(name) is FetchPhase.FETCHED:
                return
        with self.during_wait():
            if self._claim(name):
                self._fetch(name)

    def _claim(self, name: str) -> bool:
        """Wait until this object is fetched (False), or this thread has to fetch it (True)."""
        with self._changed:
            while (phase := self._queue.phase(name)) is not FetchPhase.FETCHED:
                if self._stopping:
                    raise StoreError(f"{name} is not fetched any more: the task stops")
                if phase is FetchPhase.WAITING:
                    if self._queue.lost is not None:
                        raise self._queue.lost.error()
                    if self._queue.has_room(name):
                        self._queue.claim(name)
                        return True
                    self._queue.prioritize([name])
                self._changed.wait()
            return False

    def finish(self) -> None:
        """Fetch all objects, in parallel. Raises what `get` does."""
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(self._get_with_retries, self.unfetched))

    def _get_with_retries(self, name: str) -> None:
        for reads in range(1, READS):
            try:
                self.get(name)
                return
            except BadRead:
                time.sleep(_BACKOFF.wait_s(reads))
        self.get(name)

    def _run(self, number: int) -> None:
        while (name := self._next()) is not None:
            with suppress(StoreError, DiskFull):  # recorded in the queue
                self._fetch(name)
                self._workers[number].progressed()

    def _next(self) -> str | None:
        with self._changed:
            while not self._stopping and self._queue.lost is None and not self._queue.complete:
                now = time.monotonic()
                if (name := self._queue.take(now)) is not None:
                    return name
                wake_at = self._queue.wake_at
                self._changed.wait(None if wake_at is None else max(0.0, wake_at - now))
        return None

    def _fetch(self, name: str) -> None:
        timer = self._calls[name] = CallTimer()
        try:
            with timer.during(f"reading the state object {name}"):
                found = {batch: weak() for batch, weak in self._awaited[name].items()}
                awaited = {batch: run for batch, run in found.items() if run is not None}
                if awaited:
                    self._load(name, awaited)
        except ObjectMissing as error:
            with self._changed:
                self._queue.mark_lost(name, str(error))
            raise StateLost(str(error), name) from error
        except UnreadableObject as error:
            with self._changed:
                self._queue.failed(name, str(error), time.monotonic(), bad_read=True)
                lost = self._queue.lost
            if lost is not None and lost.name == name:
                raise lost.error() from error
            raise BadRead(str(error)) from error
        except BaseException as error:
            with self._changed:
                self._queue.failed(name, str(error) or repr(error), time.monotonic())
            raise
        else:
            with self._changed:
                self._queue.fetched(name)
        finally:
            del self._calls[name]
            with self._changed:
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _ObjectFetcher:
    owner: Fetch
    name: str

    def fetch(self) -> None:
        self.owner.get(self.name)

    def prioritize(self) -> None:
        self.owner.prioritize(self.name)
