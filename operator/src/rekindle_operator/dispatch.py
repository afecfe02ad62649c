"""Executes the actions of a pass, several at a time, so that none blocks another.

Each action has its own back-off. A topology gets a few of the workers at most, and each namespace
two of them before any gets more. A call that hangs no longer counts, and a namespace in which
several hang gets no more workers: however many namespaces hang, the others are served. A pass ends
when all actions are done, or when the rest waits for calls that hang. Those continue, and their
actions are not started a second time meanwhile. Actions that have not started, or one on which they
depend has failed, are decided again by the next pass, except Events that only had no time to start:
they are kept, since no later pass finds them again.

Design: docs/design/recovery.md#order-of-actions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, auto

from rekindle_operator.metrics import RECONCILE_ERRORS
from rekindle_operator.reconcile.actions import DeletePod
from rekindle_operator.reconcile.schedule import ActionOrder, ScheduledAction
from rekindle_operator.retries import Retries

WORKERS = 8
_WORKERS_PER_TOPOLOGY = 3
_WORKERS_PER_NAMESPACE = 2  # before another one gets more
_MAX_HANGING = 2  # calls of a namespace, until no more are started in it
_THREADS_PER_WORKER = 16  # all but one may hang: a call ends after 13 s at most (`cluster.calls`)
STALL_S = 1.0  # a pass does not wait for a call that takes longer
_MAX_EVENTS = 5000  # kept for the next pass; the oldest are dropped first

logger = logging.getLogger(__name__)


class Outcome(Enum):
    DONE = auto()
    FAILED = auto()  # retried after its back-off
    # The back-off of these is that of the uncreated pod.
    POD_REFUSED = auto()  # retried once if the pass deletes pods in that namespace
    POD_MAY_EXIST = auto()  # neither created nor refused: the next pass decides


@dataclass(slots=True)
class _RunningAction:
    topology_key: str
    namespace: str
    since: float  # monotonic


class _Queue:
    """Actions that have not started, in order, and their number by namespace."""

    def __init__(self, actions: Iterable[ScheduledAction] = ()) -> None:
        self._actions = list(actions)
        self._by_namespace = Counter(s.namespace for s in self._actions)

    def __iter__(self) -> Iterator[ScheduledAction]:
        return iter(self._actions)

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def namespaces(self) -> Iterable[str]:
        return self._by_namespace.keys()

    def remove(self, action: ScheduledAction) -> None:
        self._actions.remove(action)
        self._by_namespace[action.namespace] -= 1
        if not self._by_namespace[action.namespace]:
            del self._by_namespace[action.namespace]

    def insert(self, action: ScheduledAction) -> None:
        """After all actions of the same order."""
        later = (i for i, s in enumerate(self._actions) if s.sort_key > action.sort_key)
        self._actions.insert(next(later, len(self._actions)), action)
        self._by_namespace[action.namespace] += 1


class NotLeading(Exception):
    """This replica no longer leads, and must not change anything."""


class Dispatcher:
    """`on_skipped` gets each action that is not executed: one that it depends on failed, or the
    pass ended before it could start. In that case not Events, which are kept."""

    def __init__(
        self,
        execute: Callable[[ScheduledAction], Outcome],
        on_skipped: Callable[[ScheduledAction], None],
        clock: Callable[[], float],
        may_act: Callable[[], bool],
        retries: Retries,
        workers: int = WORKERS,
        stall_s: float = STALL_S,
        pool: Executor | None = None,
    ) -> None:
        self._execute = execute
        self._on_skipped = on_skipped
        self._clock = clock
        self._may_act = may_act
        self._retries = retries
        self._workers = workers
        self._stall_s = stall_s
        self._threads = _THREADS_PER_WORKER * workers
        self._pool = pool or ThreadPoolExecutor(self._threads, thread_name_prefix="action")
        self._changed = threading.Condition()
        self._queue = _Queue()
        self._running: dict[str, _RunningAction] = {}
        self._decided: dict[str, ScheduledAction] = {}  # by this pass, by key; empty between passes
        self._not_done: set[str] = set()  # keys of this pass that are not done
        self._deletes_pods_in: set[str] = set()  # namespaces, in this pass
        self._events: deque[ScheduledAction] = deque(maxlen=_MAX_EVENTS)

    def run(self, actions: Iterable[ScheduledAction]) -> None:
        with self._changed:
            self._start_pass(list(actions))
            self._start_actions()
            while not self._is_over():
                self._changed.wait(self._stall_s / 4)
                self._start_actions()  # a call that has begun to hang frees its place
            self._end_pass()
            self._decided = {}

    def _start_pass(self, actions: list[ScheduledAction]) -> None:
        now = self._clock()
        self._retries.forget_old(now)
        waiting = [*actions, *self._events]
        self._events.clear()
        fresh = [s for s in waiting if s.key not in self._running]
        self._queue = _Queue(s for s in fresh if self._retries.is_due(s.key, now))
        due = {s.key for s in self._queue}
        # Actions that run, or wait for their back-off, are not done; nor are their dependents.
        not_due = {s.key for s in actions if s.key not in due}
        self._decided = {s.key: s for s in actions}
        self._not_done = set(self._decided)
        self._deletes_pods_in = {
            s.namespace for s in self._queue if isinstance(s.action, DeletePod)
        }
        for key in not_due:
            self._drop_dependents(key)

    def forget_events(self) -> None:
        """At the start of a term: they are of an earlier one, and another leader has written its
        own."""
        with self._changed:
            self._events.clear()

    def _is_over(self) -> bool:
        """Also when the rest can only wait for calls that hang."""
        now = time.monotonic()
        all_hang = all(now - r.since >= self._stall_s for r in self._running.values())
        return all_hang and (not self._queue or self._next() is None)

    def _end_pass(self) -> None:
        """Actions that have not started are skipped. What they depend on (a status, a Secret) may
        still be written by a call that hangs."""
        for action in self._queue:
            self._skip(action)
        self._queue = _Queue()

    def _skip(self, action: ScheduledAction) -> None:
        if action.order is ActionOrder.EMIT_EVENTS:
            self._keep_event(action)
        else:
            self._on_skipped(action)

    def _keep_event(self, action: ScheduledAction) -> None:
        if len(self._events) == _MAX_EVENTS:
            logger.warning("too many Events are queued; dropped: %s", self._events[0].key)
        self._events.append(replace(action, after=()))

    # --- with the lock --------------------------------------------------------

    def _start_actions(self) -> None:
        while (action := self._next()) is not None:
            self._queue.remove(action)
            running = _RunningAction(action.topology_key, action.namespace, time.monotonic())
            self._running[action.key] = running
            self._pool.submit(self._work, action)

    def _next(self) -> ScheduledAction | None:
        running, now = self._running.values(), time.monotonic()
        hanging = [r for r in running if now - r.since >= self._stall_s]
        if len(running) - len(hanging) >= self._workers or len(running) >= self._threads:
            return None
        hanging_by_namespace = Counter(r.namespace for r in hanging)
        running_by_topology = Counter(r.topology_key for r in running)
        running_by_namespace = Counter(r.namespace for r in running)
        waiting = {n for n in self._queue.namespaces if hanging_by_namespace[n] < _MAX_HANGING}
        first = {n for n in waiting if running_by_namespace[n] < _WORKERS_PER_NAMESPACE}
        other: ScheduledAction | None = None  # if namespaces in `first` have nothing to start
        for action in self._ready():
            if (
                action.namespace not in waiting
                or running_by_topology[action.topology_key] >= _WORKERS_PER_TOPOLOGY
            ):
                continue
            if action.namespace in first:
                return action
            other = other or action
            if not first:
                break
        return other

    def _ready(self) -> Iterator[ScheduledAction]:
        """Actions that depend on nothing unfinished, in order."""
        placing: set[str] = set()  # topologies with replacements that have not started
        for action in self._queue:
            if action.order <= ActionOrder.PLACE_PODS:
                placing.add(action.topology_key)
            elif action.topology_key in placing:
                continue
            if action.key not in self._running and self._not_done.isdisjoint(action.after):
                yield action

    def _drop_dependents(self, key: str) -> None:
        dependents = [s for s in self._queue if key in s.after]
        for action in dependents:
            if action in self._queue:
                self._queue.remove(action)
                self._on_skipped(action)
                self._drop_dependents(action.key)

    # --- a worker -------------------------------------------------------------

    def _work(self, action: ScheduledAction) -> None:
        outcome = self._outcome(action)
        with self._changed:
            del self._running[action.key]
            match outcome:
                case Outcome.DONE:
                    self._retries.succeeded(action.key)
                    self._not_done.discard(action.key)
                case Outcome.FAILED:
                    wait_s = self._retries.failed(action.key, self._clock())
                    logger.info("retrying %s in %.1f s", action.key, wait_s)
                    self._drop_dependents(action.key)
                case Outcome.POD_REFUSED:
                    self._drop_dependents(action.key)
                    self._retry_if_room_was_made(action)
                case Outcome.POD_MAY_EXIST:
                    self._drop_dependents(action.key)
                case None:
                    self._skip(action)
                    self._end_pass()
            self._start_actions()
            self._changed.notify_all()

    def _retry_if_room_was_made(self, action: ScheduledAction) -> None:
        """A quota may count pods that this pass deletes. A call that hung may be of an earlier
        pass: it is retried only if this pass has decided the same."""
        decided = self._decided.get(action.key)
        if decided is None or decided.namespace not in self._deletes_pods_in:
            return
        if action.order is ActionOrder.PLACE_PODS:
            self._queue.insert(replace(decided, order=ActionOrder.CREATE_AGAIN, after=()))

    def _outcome(self, action: ScheduledAction) -> Outcome | None:
        """None: this replica no longer leads."""
        if not self._may_act():
            return None
        try:
            return self._execute(action)
        except NotLeading:
            return None
        except Exception:
            RECONCILE_ERRORS.inc()
            logger.exception("%s failed because of an error in the operator", action.key)
            return Outcome.FAILED
