"""The level-triggered control loop: snapshot, reconcile, execute; on changes and at intervals.

Design: docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.convert import parse_time
from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.execute import Executor
from rekindle_operator.leader import Leader
from rekindle_operator.metrics import (
    RECONCILE_ERRORS,
    RECONCILE_SECONDS,
    RECOVERY_SECONDS,
    observe,
    observe_ages,
)
from rekindle_operator.pacing import StandbyPasses, wait_s
from rekindle_operator.reconcile.actions import TopologyActions
from rekindle_operator.reconcile.conditions import OperatorProblem
from rekindle_operator.reconcile.core import reconcile_all, report_undecided
from rekindle_operator.settings import OperatorSettings
from rekindle_operator.topology_status import RecoveryEntry
from rekindle_operator.uncached_check import UncachedCheck

_PAUSE_S = 3.0  # a longer gap between two passes: this process itself was paused
_STUCK_S = 60.0  # after the last pass; then the loop is not alive
_MAX_DECISIONS = 3  # of a pass, while caches are found to be behind
_RELIST_RETRY_S = 0.25
_COALESCE_S = 0.02  # changes come in bursts

logger = logging.getLogger(__name__)


def decide(
    take_snapshot: Callable[[], Snapshot],
    uncached_check: UncachedCheck,
    clock: Callable[[], float],
    settings: OperatorSettings,
) -> tuple[Snapshot, list[TopologyActions]]:
    """The decisions, and the snapshot that they are made from.

    A decision that deletes or replaces something for a reason that the API server does not confirm
    is made again, and postponed to the next pass if that does not help. Where the API server cannot
    be read, no actions are taken for the topology, and its status has the reason.
    """
    read_failures: dict[str, str] = {}  # topology key -> why
    for _ in range(_MAX_DECISIONS):
        snapshot = take_snapshot()
        decisions = [
            d
            for d in reconcile_all(snapshot, clock(), settings)
            if d.topology_key not in read_failures
        ]
        # Topology key -> why it cannot be read, or "": the decision was made from old objects.
        unconfirmed = uncached_check.unconfirmed(decisions, snapshot)
        read_failures |= {topology_key: why for topology_key, why in unconfirmed.items() if why}
        if unconfirmed.keys() <= read_failures.keys():
            break
    confirmed = [decision for decision in decisions if decision.topology_key not in unconfirmed]
    for view in snapshot.topologies:
        if why := read_failures.get(view.key):
            problem = OperatorProblem("ReadFailed", why)
            confirmed.append(report_undecided(view, problem, clock(), snapshot.crd_missing_fields))
    return snapshot, confirmed


class ControlLoop:
    """`on_new_term`: called when this replica has become the leader, and its caches are current."""

    def __init__(
        self,
        cluster: ClusterCache,
        executor: Executor,
        uncached_check: UncachedCheck,
        settings: OperatorSettings,
        leader: Leader,
        clock: Callable[[], float],
        on_new_term: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self._on_new_term = on_new_term
        self._uncached_check = uncached_check
        self._leader = leader
        self._term: int | None = None  # in which the last pass was
        self._cluster = cluster
        self._executor = executor
        self._settings = settings
        self._passed_at: float | None = None  # monotonic
        self._wait_s = settings.timing.tick_s
        self._standby_passes = StandbyPasses()
        self._observed_recoveries: set[tuple[str, str]] = set()  # (topology uid, start)
        self._has_seen_history = False
        self._errors: dict[str, str] = {}  # topology -> error that was logged last
        self._passing = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether passes are made when they are due; True for a replica that does not lead."""
        return self._passed_at is None or self._monotonic() - self._passed_at < _STUCK_S

    def run(self) -> None:
        """Once all mirrors are synchronised."""
        while True:
            if not self._leader.wait_leading(self._settings.timing.tick_s):
                self._passed_at = None
                self._run_standby_pass()
                continue
            if self._passed_at is not None:
                self._cluster.wait_for_pass_request(self._wait_s)
            self._sleep(_COALESCE_S)
            if not self._begin_pass():
                self._sleep(_RELIST_RETRY_S)
                continue
            with self._passing:
                self.run_pass()
            self._passed_at = self._monotonic()

    def end(self, timeout_s: float) -> None:
        """At shutdown: wait for the pass in progress; no other one begins."""
        self._passing.acquire(timeout=timeout_s)

    def _begin_pass(self) -> bool:
        """False: this replica has just become the leader, and cannot list objects."""
        if self._passed_at is None:  # from now on `alive` expects passes
            self._passed_at = self._monotonic()
        term = self._leader.begin_pass()
        if term != self._term:
            # Its caches may have stalled while it was not the leader.
            if not self._cluster.relist_mirrors():
                return False
            self._term, self._passed_at = term, self._monotonic()
            self._cluster.forget_uncreated_pods()
            self._executor.forget_events()
            self._errors.clear()
            self._on_new_term()
        self._reset_timers_after_pause()
        return True

    def _run_standby_pass(self) -> None:
        began = self._monotonic()
        if not self._standby_passes.is_due(began):
            return
        try:
            reconcile_all(self._cluster.snapshot(), self._clock(), self._settings)
        except Exception:  # reported once this replica leads
            logger.debug("a standby pass failed", exc_info=True)
        self._standby_passes.record_pass(began=began, ended=self._monotonic())

    def run_pass(self) -> None:
        with RECONCILE_SECONDS.time():
            snapshot = self._cluster.snapshot()
            try:
                snapshot, decisions = decide(
                    self._cluster.snapshot, self._uncached_check, self._clock, self._settings
                )
                self._log_errors(decisions)
                self._executor.run(decisions)
            except Exception:
                RECONCILE_ERRORS.inc()
                logger.exception("a reconcile pass failed")
                self._sleep(1.0)
        self._wait_s = wait_s(snapshot, self._clock(), self._settings.timing)
        try:
            observe(snapshot)
            observe_ages(snapshot, self._cluster.mirror_ages, self._clock())
            self._observe_recoveries(snapshot)
        except Exception:
            RECONCILE_ERRORS.inc()
            logger.exception("the metrics of a reconcile pass are incomplete")

    def _log_errors(self, decisions: Iterable[TopologyActions]) -> None:
        """With the traceback; an error that repeats is logged once."""
        errors = {
            decision.topology_key: decision.error
            for decision in decisions
            if decision.error is not None
        }
        for topology_key, error in errors.items():
            RECONCILE_ERRORS.inc()
            if self._errors.get(topology_key) != repr(error):
                logger.error(
                    "reconcile of %s failed, no actions taken", topology_key, exc_info=error
                )
        self._errors = {topology_key: repr(error) for topology_key, error in errors.items()}

    def _reset_timers_after_pause(self) -> None:
        if self._passed_at is not None and self._monotonic() - self._passed_at > _PAUSE_S:
            logger.warning("this process was paused; timers of silence are reset")
            self._cluster.reset_timers()

    def _observe_recoveries(self, snapshot: Snapshot) -> None:
        for topology in snapshot.topologies:
            for entry in topology.operator_status.recovery.history:
                key = (topology.uid, entry.started_at)
                if entry.finished_at and key not in self._observed_recoveries:
                    self._observed_recoveries.add(key)
                    if self._has_seen_history:  # not those of an earlier leader
                        RECOVERY_SECONDS.labels(entry.mode).observe(_duration_s(entry))
        self._has_seen_history = True


def _duration_s(entry: RecoveryEntry) -> float:
    return parse_time(entry.finished_at) - parse_time(entry.started_at)
