"""Executes the steps of a pass, several at a time, so that none blocks another.

Each step has its own back-off. A topology, and a namespace while others wait, gets a few of the
workers at most. A call that hangs no longer counts, and a namespace in which several hang gets no
more workers: however many namespaces hang, the others are served. A pass ends when all steps are
done, or when the rest waits for calls that hang. Those continue, and their steps are not started a
second time meanwhile. Steps that have not started are decided again by the next pass, except
Events: they are kept, since no later pass finds them again.

Design: docs/design/recovery.md#order-of-actions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, auto

from rekindle_operator.metrics import RECONCILE_ERRORS
from rekindle_operator.reconcile.schedule import Stage, Step
from rekindle_operator.retries import Retries

WORKERS = 8
_WORKERS_PER_TOPOLOGY = 3
_WORKERS_PER_NAMESPACE = 2  # while another namespace waits
_MAX_HANGING = 2  # calls of a namespace, until no more are started in it
_THREADS_PER_WORKER = 16  # all but one may hang: a call ends after 13 s at most
STALL_S = 1.0  # a pass does not wait for a call that takes longer
_MAX_EVENTS = 5000  # kept for the next pass; the oldest are dropped first

logger = logging.getLogger(__name__)


class Outcome(Enum):
    DONE = auto()
    FAILED = auto()  # retried after its back-off
    REFUSED = auto()  # remembered elsewhere; retried once after the clean-up


@dataclass(slots=True)
class _RunningStep:
    owner: str
    namespace: str
    since: float  # monotonic


class _Queue:
    """Steps that have not started, in order, and their number by namespace."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._steps = list(steps)
        self._by_namespace = Counter(s.namespace for s in self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def namespaces(self) -> Iterable[str]:
        return self._by_namespace.keys()

    def remove(self, step: Step) -> None:
        self._steps.remove(step)
        self._by_namespace[step.namespace] -= 1
        if not self._by_namespace[step.namespace]:
            del self._by_namespace[step.namespace]

    def insert(self, step: Step) -> None:
        """After all steps of the same order."""
        later = (i for i, s in enumerate(self._steps) if s.order > step.order)
        self._steps.insert(next(later, len(self._steps)), step)
        self._by_namespace[step.namespace] += 1


class Dispatcher:
    """`skipped` gets each step that is not executed because one that it depends on failed."""

    def __init__(
        self,
        do: Callable[[Step], Outcome],
        skipped: Callable[[Step], None],
        clock: Callable[[], float],
        allowed: Callable[[], bool],
        retries: Retries,
        workers: int = WORKERS,
        stall_s: float = STALL_S,
    ) -> None:
        self._do = do
        self._skipped = skipped
        self._clock = clock
        self._allowed = allowed
        self._retries = retries
        self._workers = workers
        self._stall_s = stall_s
        self._threads = _THREADS_PER_WORKER * workers
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="action")
        self._changed = threading.Condition()
        self._queue = _Queue()
        self._running: dict[str, _RunningStep] = {}
        self._blocked: set[str] = set()  # keys of this pass that are not done
        self._cleans_up = False
        self._events: deque[Step] = deque(maxlen=_MAX_EVENTS)

    def run(self, steps: Iterable[Step]) -> None:
        with self._changed:
            self._start_pass(list(steps))
            self._start_steps()
            while not self._is_over():
                self._changed.wait(self._stall_s / 4)
                self._start_steps()  # in case a worker did not
            self._keep_events()
            self._queue = _Queue()

    def _start_pass(self, steps: list[Step]) -> None:
        now = self._clock()
        self._retries.forget_old(now)
        waiting = [*steps, *self._events]
        self._events.clear()
        fresh = [s for s in waiting if s.key not in self._running]
        self._queue = _Queue(s for s in fresh if self._retries.is_due(s.key, now))
        due = {s.key for s in self._queue}
        # Steps that run, or wait for their back-off, are not done; nor are their dependents.
        not_done = {s.key for s in steps if s.key not in due}
        self._blocked = {s.key for s in steps}
        self._cleans_up = any(s.stage is Stage.CLEAN_UP for s in self._queue)
        for key in not_done:
            self._drop_dependents(key)

    def _is_over(self) -> bool:
        """Also when the rest can only wait for calls that hang."""
        now = time.monotonic()
        hanging = all(now - r.since >= self._stall_s for r in self._running.values())
        return hanging and (not self._queue or self._next() is None)

    def _keep_events(self) -> None:
        events = [s for s in self._queue if s.stage is Stage.EMIT]
        for step in events:
            if len(self._events) == _MAX_EVENTS:
                logger.warning("too many Events are queued; dropped: %s", self._events[0].key)
            self._events.append(replace(step, after=()))

    # --- with the lock --------------------------------------------------------

    def _start_steps(self) -> None:
        while (step := self._next()) is not None:
            self._queue.remove(step)
            running = _RunningStep(step.owner, step.namespace, time.monotonic())
            self._running[step.key] = running
            self._pool.submit(self._work, step)

    def _next(self) -> Step | None:
        running, now = self._running.values(), time.monotonic()
        hanging = [r for r in running if now - r.since >= self._stall_s]
        if len(running) - len(hanging) >= self._workers or len(running) >= self._threads:
            return None
        hangs = Counter(r.namespace for r in hanging)
        busy = Counter(r.owner for r in running)
        used = Counter(r.namespace for r in running)
        waiting = {name for name in self._queue.namespaces if hangs[name] < _MAX_HANGING}
        first = {name for name in waiting if used[name] < _WORKERS_PER_NAMESPACE}
        other: Step | None = None  # if the namespaces that come first have nothing to start
        for step in self._ready():
            if step.namespace not in waiting or busy[step.owner] >= _WORKERS_PER_TOPOLOGY:
                continue
            if step.namespace in first:
                return step
            other = other or step
            if not first:
                break
        return other

    def _ready(self) -> Iterator[Step]:
        """Steps that depend on nothing unfinished, in order."""
        placing: set[str] = set()  # owners whose replacements wait for a running step
        for step in self._queue:
            if step.stage <= Stage.PLACE:
                placing.add(step.owner)
            elif step.owner in placing:
                continue
            if step.key not in self._running and not any(k in self._blocked for k in step.after):
                yield step

    def _drop_dependents(self, key: str) -> None:
        dependents = [s for s in self._queue if key in s.after]
        for step in dependents:
            if step in self._queue:
                self._queue.remove(step)
                self._skipped(step)
                self._drop_dependents(step.key)

    # --- a worker -------------------------------------------------------------

    def _work(self, step: Step) -> None:
        outcome = self._outcome(step)
        with self._changed:
            del self._running[step.key]
            match outcome:
                case Outcome.DONE:
                    self._retries.succeeded(step.key)
                    self._blocked.discard(step.key)
                case Outcome.FAILED:
                    wait_s = self._retries.failed(step.key, self._clock())
                    logger.warning("retrying %s in %.1f s", step.key, wait_s)
                    self._drop_dependents(step.key)
                case Outcome.REFUSED:
                    self._refused(step)
                case None:
                    self._queue = _Queue()
            self._start_steps()
            self._changed.notify_all()

    def _refused(self, step: Step) -> None:
        """A quota may count pods that this pass deletes."""
        self._drop_dependents(step.key)
        if self._cleans_up and step.stage is Stage.PLACE:
            self._queue.insert(replace(step, stage=Stage.CREATE_AGAIN, after=()))

    def _outcome(self, step: Step) -> Outcome | None:
        """None: this replica no longer leads, and must not change anything."""
        if not self._allowed():
            return None
        try:
            return self._do(step)
        except Exception:
            RECONCILE_ERRORS.inc()
            logger.exception("%s failed because of an error in the operator", step.key)
            return Outcome.FAILED
