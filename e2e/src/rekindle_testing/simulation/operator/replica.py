"""One replica of the operator: its real cache, election, control loop and executor.

Simulated are what is around them: the client's connections, watches, probes, threads and clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle import names
from rekindle_operator.clock import SteadyClock
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.calls import call
from rekindle_operator.cluster.convert import Json
from rekindle_operator.cluster.mirror import Mirror
from rekindle_operator.cluster.probes import ProbeState
from rekindle_operator.execute import Executor
from rekindle_operator.leader import Leader
from rekindle_operator.loop import ControlLoop
from rekindle_operator.probe import start_due_probes
from rekindle_operator.settings import Election, OperatorSettings
from rekindle_operator.uncached_check import UncachedCheck
from rekindle_testing.simulation.kube.objects import (
    BEGIN_UNIX_S,
    DELETED,
    LEASES,
    NODES,
    OWNED,
    PODS,
    RECORDS,
    TOPOLOGIES,
    ApiEvent,
    ApiRequest,
)
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.network import LivenessProbe, Network
from rekindle_testing.simulation.operator.client import SimulatedClient
from rekindle_testing.simulation.operator.program import InlinePool, Program, SimulatedEvent
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

_PROBE_TICK_S = 0.25
_MAX_OVERSLEEP_S = 0.3
_LIST_RETRY_S = 1.0
_PATHS = {
    PODS: "/api/v1/pods",
    NODES: "/api/v1/nodes",
    RECORDS: "/api/v1/configmaps",
    LEASES: "/apis/coordination.k8s.io/v1/leases",
    TOPOLOGIES: f"/apis/{names.API_VERSION}/{names.PLURAL}",
    "secrets": "/api/v1/secrets",
    "serviceaccounts": "/api/v1/serviceaccounts",
    "roles": "/apis/rbac.authorization.k8s.io/v1/roles",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "poddisruptionbudgets": "/apis/policy/v1/poddisruptionbudgets",
}
_SELECTED = (RECORDS, LEASES, *OWNED)  # only those with the label of a topology

OnWrite = Callable[["OperatorReplica", ApiRequest], None]


class OperatorReplica:
    """A process; the one that replaces it begins with an empty memory."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        server: SimulatedApiServer,
        settings: OperatorSettings,
        host: str,
        skew_s: float,
        on_write: OnWrite,
    ) -> None:
        self.process = SimulatedProcess(scheduler, host)
        self._scheduler = scheduler
        self._network = network
        self._server = server
        settings = replace(settings, election=Election(identity=host))
        self._clock = SteadyClock(
            lambda: BEGIN_UNIX_S + scheduler.now + skew_s, lambda: scheduler.now
        )
        self._timing = settings.timing
        self._api = SimulatedClient(
            self.process, network, lambda: self._control, lambda request: on_write(self, request)
        )
        election_api = SimulatedClient(self.process, network, lambda: self._election)
        self.cache = _Cache(self._api, self._clock, self.process, lambda: self._control)
        self.leader = _Leader(
            election_api,
            settings.election,
            self.cache.reset_timers,
            ready=lambda: self.cache.synced,
            healthy=lambda: self._loop.alive,
            clock=lambda: scheduler.now,
        )
        self.leader.sleep = self._sleep
        executor = Executor(
            self._api,
            self.cache,
            host,
            settings.timing.status_interval_s,
            self._clock,
            self.leader.may_act,
            draw=scheduler.random.random,
            pool=InlinePool(),
        )
        uncached = UncachedCheck(
            self._api, self.cache, monotonic=lambda: scheduler.now, pool=InlinePool()
        )
        self._loop = ControlLoop(
            self.cache,
            executor,
            uncached,
            settings,
            self.leader,
            self._clock,
            monotonic=lambda: scheduler.now,
            sleep=self._sleep,
        )
        self._control = Program(self.process, self._run)
        self._election = Program(self.process, self._elect)

    def _sleep(self, seconds: float) -> None:
        """A sleep takes longer than requested, because the machine is busy."""
        self._control.sleep(seconds + self._scheduler.between(0.0, _MAX_OVERSLEEP_S))

    def _elect(self) -> None:
        while True:
            self._election.sleep(self.leader.call_once())

    def _run(self) -> None:
        while not self.cache.relist_mirrors():
            self._control.sleep(_LIST_RETRY_S)
        for plural, mirror in self.cache.mirrors.items():
            self._watch(plural, mirror)
        self.process.every(_PROBE_TICK_S, self._probe)
        self._loop.run()

    def _watch(self, plural: str, mirror: Mirror[Any]) -> None:
        def deliver(event: ApiEvent) -> None:
            if event.type == DELETED:
                mirror.remove_deleted(event.raw)
            else:
                mirror.put(event.raw)

        programs: list[Program] = []  # each lists all objects after an expired version

        def list_again() -> None:
            program = programs[-1]
            api = SimulatedClient(self.process, self._network, lambda: program)
            while (listed := self.cache.list_all(plural, api)) is None:
                program.sleep(_LIST_RETRY_S)
            mirror.replace(*listed)
            mirror.record_response()
            watch.resume(listed[1])

        def expired() -> None:
            programs.append(Program(self.process, list_again))

        watch = self._server.watch(
            self.process,
            plural,
            self.cache.listed_at[plural],
            deliver,
            mirror.record_response,
            names.LABEL_TOPOLOGY if plural in _SELECTED else "",
            expired,
        )

    # --- probes -----------------------------------------------------------------

    def _probe(self) -> None:
        now = self._clock()
        pods, nodes = start_due_probes(self.cache, now, self._timing)
        for pod in pods:
            self._send_probe(pod.ip, self.cache.pod_probes, pod.uid, now)
        for node in nodes:
            if node.kubelet is not None:
                self._send_probe(node.kubelet.host, self.cache.kubelet_probes, node.uid, now)

    def _send_probe(self, host: str, probes: ProbeState, uid: str, now: float) -> None:
        def ended(result: Any) -> None:
            if result is None:  # the response; otherwise Refused or TimedOut
                probes.responded(uid, now)
            probes.ended(uid, now)

        timeout_s = 2 * self._timing.kubelet_silent_s
        self._network.call(self.process, host, LivenessProbe(), ended, timeout_s)


class _Leader(Leader):
    sleep: Callable[[float], None]

    def wait_leading(self, timeout_s: float) -> bool:
        if not self.leading:
            self.sleep(timeout_s)
        return self.leading

    @property
    def no_other_can_lead(self) -> bool:
        """For the check of I9: nobody else leads before the Lease that it renewed last ends, so a
        request that it began may still be sent."""
        candidate = self._candidate
        renewed_at, lease_s = candidate.renewed_at, candidate.timing.lease_s
        return renewed_at is not None and self._clock() - renewed_at < lease_s


class _Cache(ClusterCache):
    """`listed_at`: version of the last list of each kind."""

    def __init__(
        self,
        api: SimulatedClient,
        clock: Callable[[], float],
        process: SimulatedProcess,
        program: Callable[[], Program],
    ) -> None:
        super().__init__(api, None, clock, monotonic=lambda: process.scheduler.now)
        self.listed_at: dict[str, int] = {}
        self.mirrors: dict[str, Mirror[Any]] = {
            TOPOLOGIES: self.topologies,
            PODS: self.pods,
            NODES: self.nodes,
            RECORDS: self.generation_records,
            LEASES: self.leases,
            **{plural: self.owned[kind] for plural, kind in OWNED.items()},
        }
        self._api = api
        self._requested = SimulatedEvent(process)
        self._program = program

    def request_pass(self) -> None:
        self._requested.set()

    def wait_for_pass_request(self, timeout_s: float) -> bool:
        woken = self._requested.wait(self._program(), timeout_s)
        self._requested.clear()
        return woken

    def relist_mirrors(self) -> bool:
        for plural, mirror in self.mirrors.items():
            listed = self.list_all(plural)
            if listed is None:
                return False
            mirror.replace(*listed)
            mirror.record_response()
        return True

    def list_all(
        self, plural: str, api: SimulatedClient | None = None
    ) -> tuple[list[Json], int] | None:
        """None if the call failed. `api`: that of the control loop if None."""
        query = [("labelSelector", names.LABEL_TOPOLOGY)] if plural in _SELECTED else []
        try:
            found = call(api or self._api, "GET", _PATHS[plural], query=query)
        except (ApiException, HTTPError):
            return None
        assert found is not None
        version = int(found["metadata"]["resourceVersion"])
        self.listed_at[plural] = version
        return list(found["items"]), version
