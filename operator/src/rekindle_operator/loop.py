"""The one level-triggered loop: snapshot, reconcile, execute; woken by changes and by time.

Design: docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle import names
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.convert import parse_time
from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.execute import Executor
from rekindle_operator.leader import Leader
from rekindle_operator.live_check import LiveCheck
from rekindle_operator.metrics import (
    RECONCILE_ERRORS,
    RECONCILE_SECONDS,
    RECOVERY_SECONDS,
    observe,
    observe_ages,
)
from rekindle_operator.pacing import Rehearsals, wait_s
from rekindle_operator.reconcile.actions import TopologyActions
from rekindle_operator.reconcile.conditions import OperatorProblem
from rekindle_operator.reconcile.core import reconcile_all, report_undecided
from rekindle_operator.settings import Settings

_PAUSE_S = 3.0  # a longer gap between two passes was this process's own sleep
_STUCK_S = 60.0
_DECISIONS = 3  # of a pass, while mirrors are found to be behind
_RELIST_AGAIN_S = 0.25
_COALESCE_S = 0.02  # changes come in bursts

logger = logging.getLogger(__name__)


def decide(
    look: Callable[[], Snapshot],
    live: LiveCheck,
    clock: Callable[[], float],
    settings: Settings,
) -> tuple[Snapshot, list[TopologyActions]]:
    """What to do, and what that rests on. Turns that would destroy something for a reason that the
    API server does not confirm are decided anew; if that does not help, they wait for the next
    pass. Where the API server cannot be asked, nobody knows how the topology is: it waits, too."""
    unread: dict[str, str] = {}  # owner -> why
    for _ in range(_DECISIONS):
        snapshot = look()
        decisions = [d for d in reconcile_all(snapshot, clock(), settings) if d.owner not in unread]
        unconfirmed = live.unconfirmed(decisions, snapshot)
        unread |= {owner: why for owner, why in unconfirmed.items() if why}
        if unconfirmed.keys() <= unread.keys():
            break
    confirmed = [decision for decision in decisions if decision.owner not in unconfirmed]
    for view in snapshot.topologies:
        if why := unread.get(view.key):
            confirmed.append(report_undecided(view, OperatorProblem("ReadFailed", why), clock()))
    return snapshot, confirmed


class ControlLoop:
    def __init__(
        self,
        cluster: ClusterCache,
        executor: Executor,
        live: LiveCheck,
        settings: Settings,
        leader: Leader,
        list_topologies: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._live = live
        self._list_topologies = list_topologies
        self._leader = leader
        self._term: int | None = None  # in which the last pass was
        self._cluster = cluster
        self._executor = executor
        self._settings = settings
        self._passed_at: float | None = None  # monotonic
        self._wait_s = settings.timing.tick_s
        self._rehearsals = Rehearsals()
        self._finished: set[tuple[str, str]] = set()
        self._watching_recoveries = False
        self._faults: dict[str, str] = {}  # topology -> what was said last

    @property
    def alive(self) -> bool:
        """A replica that does not lead has no pass to be late with."""
        return self._passed_at is None or time.monotonic() - self._passed_at < _STUCK_S

    def run(self) -> None:
        while not self._cluster.synced:
            self._cluster.wait_dirty(self._settings.timing.tick_s)
        while True:
            if not self._leader.wait_leading(self._settings.timing.tick_s):
                self._passed_at = None
                self._rehearse()
                continue
            if self._passed_at is not None:
                self._cluster.wait_dirty(self._wait_s)
            time.sleep(_COALESCE_S)
            if not self._begin_pass():
                time.sleep(_RELIST_AGAIN_S)
                continue
            self.run_pass()
            self._passed_at = time.monotonic()

    def _begin_pass(self) -> bool:
        """False: this replica leads anew, and cannot list what there is."""
        if self._passed_at is None:  # from now on it is to make progress
            self._passed_at = time.monotonic()
        term = self._leader.begin_pass()
        if term != self._term:
            # Its mirrors may have stalled while nobody used them.
            if not (self._cluster.relist() and self._list_topologies()):
                return False
            self._term, self._passed_at = term, time.monotonic()
            self._cluster.forget_attempts()
            self._faults.clear()
        self._reset_timers_after_pause()
        return True

    def _rehearse(self) -> None:
        began = time.monotonic()
        if not self._rehearsals.is_due(began):
            return
        try:
            reconcile_all(self._cluster.snapshot(), self._clock(), self._settings)
        except Exception:  # said when it matters
            logger.debug("a rehearsal failed", exc_info=True)
        self._rehearsals.done(began, time.monotonic())

    def run_pass(self) -> None:
        with RECONCILE_SECONDS.time():
            snapshot = self._cluster.snapshot()
            try:
                snapshot, decisions = decide(
                    self._cluster.snapshot, self._live, self._clock, self._settings
                )
                self._tell_faults(decisions)
                self._executor.run(decisions)
            except Exception:
                RECONCILE_ERRORS.inc()
                logger.exception("a pass failed")
                time.sleep(1.0)
        self._wait_s = wait_s(snapshot, self._clock(), self._settings.timing)
        try:
            observe(snapshot)
            observe_ages(snapshot, self._cluster.mirror_ages, self._clock())
            self._observe_recoveries(snapshot)
        except Exception:
            RECONCILE_ERRORS.inc()
            logger.exception("the metrics of a pass are not complete")

    def _tell_faults(self, decisions: Iterable[TopologyActions]) -> None:
        """With its trace, and once for as long as it stays the same: passes are many."""
        faults = {
            decision.owner: decision.fault for decision in decisions if decision.fault is not None
        }
        for owner, fault in faults.items():
            RECONCILE_ERRORS.inc()
            if self._faults.get(owner) != repr(fault):
                logger.error("%s gets nothing: deciding it failed", owner, exc_info=fault)
        self._faults = {owner: repr(fault) for owner, fault in faults.items()}

    def _reset_timers_after_pause(self) -> None:
        if self._passed_at is not None and time.monotonic() - self._passed_at > _PAUSE_S:
            logger.warning("this process was paused; timers of silence are reset")
            self._cluster.reset_timers()

    def _observe_recoveries(self, snapshot: Snapshot) -> None:
        for topology in snapshot.topologies:
            for entry in (topology.status.get("recovery") or {}).get("history") or ():
                key = (topology.uid, entry.get("startedAt", ""))
                if entry.get("finishedAt") and key not in self._finished:
                    self._finished.add(key)
                    if self._watching_recoveries:  # not those of an earlier leader
                        RECOVERY_SECONDS.labels(entry.get("mode", "")).observe(_length(entry))
        self._watching_recoveries = True


def _length(entry: Mapping[str, Any]) -> float:
    return parse_time(entry["finishedAt"]) - parse_time(entry["startedAt"])


class Relister:
    """Lists topologies plainly: at the start, when the CRD appears, and now and then."""

    def __init__(self, api: client.ApiClient, cluster: ClusterCache, settings: Settings) -> None:
        self._custom = client.CustomObjectsApi(api)
        self._cluster = cluster
        self._settings = settings

    def wait_for_resource(self) -> None:
        """Return once topologies can be listed, however long the CRD takes to come."""
        while not self.list_once():
            time.sleep(2.0)

    def run(self) -> None:
        while True:
            time.sleep(self._settings.timing.resync_s)
            self.list_once()

    def list_once(self) -> bool:
        place = [names.GROUP, names.VERSION]
        call: Callable[..., Any] = self._custom.list_cluster_custom_object
        if self._settings.namespace is not None:
            place.append(self._settings.namespace)
            call = self._custom.list_namespaced_custom_object
        try:
            listed: Any = call(*place, names.PLURAL, _request_timeout=(5, 30))
        except (ApiException, HTTPError) as error:
            reason = error.reason if isinstance(error, ApiException) else error
            logger.warning("StreamTopologies cannot be listed: %s; is the CRD there?", reason)
            return False
        version = int(listed["metadata"]["resourceVersion"])
        self._cluster.list_topologies(listed["items"], version)
        return True
