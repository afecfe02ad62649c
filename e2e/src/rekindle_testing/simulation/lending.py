"""States that simulated tasks lend to partners: who serves them, and who fetches them.

An entry is the state itself; its objects are read one after another while the task works, and each
has the state again, so that one of another state is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rekindle.errors import StateLost
from rekindle.protocol import RestorePoint
from rekindle.task.core.messages import TaskCoreEvent
from rekindle.task.core.task import TaskCore
from rekindle.task.lending import SILENT_S
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.network import Network, Refused, Reply, TimedOut
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess

if TYPE_CHECKING:
    from rekindle_testing.simulation.cluster import SimulatedCluster
    from rekindle_testing.simulation.pod import TaskPod

_OBJECTS = 4
_READ_S = ((0.001, 0.2), (0.001, 0.2), (0.2, 3.0))
"""The least and the most time that reading an object takes: one of these at random."""
_TIMEOUT_S = 3.0
_RETRY_S = (0.25, 2.0)


@dataclass(frozen=True, slots=True)
class LentRequest:
    """For an entry, or an object of it."""

    entry: str


class Unreadable(Exception):
    """The lender could not read its disk; it may succeed the next time."""


class SimulatedLentState:
    """What one process of a task fetches of a partner's state, and what it lends."""

    def __init__(
        self,
        process: SimulatedProcess,
        scheduler: Scheduler,
        network: Network,
        core: TaskCore,
        step: Callable[[TaskCoreEvent], None],
        disk: Disk,
    ) -> None:
        self.unfetched = 0
        """Objects that are not fetched yet."""
        self._process = process
        self._scheduler = scheduler
        self._network = network
        self._core = core
        self._step = step
        self._disk = disk
        self._heard_at: float | None = None

    # -- the lender --------------------------------------------------------------------------------

    def serve(self, request: LentRequest, reply: Reply) -> None:
        delay_s = self._scheduler.between(*self._scheduler.random.choice(_READ_S))
        self._process.after(delay_s, partial(self._read, request, reply))

    def _read(self, request: LentRequest, reply: Reply) -> None:
        if self._disk.access_fails():
            reply(Unreadable())
        else:
            reply(self._core.lending.read(request.entry, self._scheduler.now))

    # -- the newcomer ------------------------------------------------------------------------------

    def fetch_entry(self, point: RestorePoint, ended: Callable[[TaskState | None], None]) -> None:
        """`ended`: with None if the lender may respond later."""

        def received(found: Any) -> None:
            if isinstance(found, TaskState):
                self.unfetched = _OBJECTS
                self._fetch_object(point, found)
            ended(found)

        self._ask(point, received)

    def _fetch_object(self, point: RestorePoint, state: TaskState) -> None:
        def received(found: TaskState | None) -> None:
            if found is None:
                retry_s = self._scheduler.between(*_RETRY_S)
                self._process.after(retry_s, partial(self._fetch_object, point, state))
                return
            assert found == state, f"{point.object} has an object of another state"
            self.unfetched -= 1
            if self.unfetched:
                self._fetch_object(point, state)
            elif self._core.parts is not None:
                self._step(self._core.state_complete)

        self._ask(point, received)

    def _ask(self, point: RestorePoint, received: Callable[[TaskState | None], None]) -> None:
        """`received`: with None if the lender may respond later."""
        assert point.lender is not None
        assert point.object is not None
        name = point.object
        if self._heard_at is None:
            self._heard_at = self._scheduler.now

        def ended(result: Any) -> None:
            assert self._heard_at is not None
            silent = isinstance(result, (Refused, TimedOut))
            if not silent:
                self._heard_at = self._scheduler.now
            if result is None or self._scheduler.now - self._heard_at > SILENT_S:
                error = StateLost(f"{name} is not lent any more", name)
                self._step(partial(self._core.call_failed, error))
            elif silent or isinstance(result, Unreadable):
                received(None)
            else:
                received(result)

        host = point.lender.address.rpartition(":")[0]
        self._network.call(self._process, host, LentRequest(name), ended, _TIMEOUT_S)


class Borrowing:
    """The parties of a state that is lent, as faults look for them."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def replaceable(self) -> list[Slot]:
        """The replicas that have a Live partner."""
        pods = self._cluster.pods
        found = [slot for slot in pods if any(pod.is_live for pod in self._partners(slot))]
        return sorted(found, key=lambda slot: slot.key)

    def newcomer(self, slot: Slot) -> TaskPod | None:
        """The pod of a slot, or of its successor in a planned move, that has begun with a lent
        state and may not be Live yet."""
        for found in (slot, slot.alternate):
            pod = self._cluster.pods.get(found)
            if pod is None or pod.boot is None or pod.is_live:
                continue
            if pod.boot.core.status.lent_from is not None:
                return pod
        return None

    def lender_for(self, slot: Slot) -> TaskPod | None:
        """A pod that lends its state to partners of a slot."""
        for pod in self._partners(slot):
            if pod.boot is not None and pod.boot.core.lending.newest is not None:
                return pod
        return None

    def _partners(self, slot: Slot) -> list[TaskPod]:
        pods = self._cluster.pods
        return [
            pods[other]
            for other in sorted(pods, key=lambda s: s.key)
            if other.first != slot.first  # not the same replica under its other number
            and (other.segment, other.partition) == (slot.segment, slot.partition)
        ]
