"""Pods on simulated nodes: an address, and one container after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from rekindle.protocol import TaskPhase
from rekindle.topology.model import Segment, Slot
from rekindle_testing.simulation.coordinator import CoordinatorProcess, CoordinatorSurroundings
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.network import LivenessProbe, Network, Reply
from rekindle_testing.simulation.overlapping import OverlappingFaults
from rekindle_testing.simulation.scheduler import SimulatedProcess
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.task import TaskBoot
from rekindle_testing.simulation.wrong_results import WrongResult

_START_S = (0.1, 1.0)
_RESTART_S = (0.5, 2.0)


class Boot(Protocol):
    """The process of one container."""

    @property
    def process(self) -> SimulatedProcess: ...
    @property
    def is_ready(self) -> bool: ...
    def serve(self, request: Any, reply: Reply) -> None: ...


B = TypeVar("B", bound=Boot)


class SimulatedPod(ABC, Generic[B]):
    """`address` is its host. `boot`: the container that runs; None while it is down. Its kubelet
    starts it."""

    def __init__(
        self, kubelet: SimulatedProcess, network: Network, name: str, uid: str, address: str
    ) -> None:
        self.name = name
        self.uid = uid
        self.address = address
        self.boot: B | None = None
        self._kubelet = kubelet
        self._network = network
        self._gone = False
        self._stopping = False
        self._freezes = 0
        self._down_s = 0.0
        network.servers[address] = self
        self._start_after(0.0, _START_S)

    @abstractmethod
    def make_boot(self) -> B: ...

    @property
    def process(self) -> SimulatedProcess | None:
        return self.boot.process if self.boot is not None else None

    @property
    def runs(self) -> bool:
        return self.process is not None and not self.process.frozen

    @property
    def is_ready(self) -> bool:
        return self.boot is not None and self.boot.is_ready

    def serve(self, request: Any, reply: Reply) -> None:
        if isinstance(request, LivenessProbe):
            reply(None)
        elif self.boot is not None:
            self.boot.serve(request, reply)

    def _start_after(self, down_s: float, delay_s: tuple[float, float]) -> None:
        kubelet = self._kubelet
        kubelet.after(down_s + kubelet.scheduler.between(*delay_s), self._start)

    def _start(self) -> None:
        if self._gone or self._stopping:
            return
        self.boot = self.make_boot()
        self.boot.process.on_death(self._ended)
        if self._freezes:
            self.boot.process.freeze()

    def _ended(self) -> None:
        self.boot = None
        if not (self._gone or self._stopping):
            down_s, self._down_s = self._down_s, 0.0
            self._start_after(down_s, _RESTART_S)

    def restart(self, down_s: float = 0.0) -> None:
        """Kill -9 the container; it starts again after `down_s` and a little more."""
        if self.boot is not None:
            self._down_s = down_s
            self.boot.process.die()

    def freeze(self) -> None:
        """Until as many calls of `thaw`."""
        self._freezes += 1
        if self._freezes == 1 and self.boot is not None:
            self.boot.process.freeze()

    def thaw(self) -> None:
        self._freezes -= 1
        if not self._freezes and self.boot is not None:
            self.boot.process.thaw()

    def stop(self) -> None:
        """SIGTERM. Its container does not start again."""
        self._stopping = True

    def remove(self) -> None:
        """The pod ends, with its disk."""
        self._gone = True
        if self.boot is not None:
            self.boot.process.die()
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]


class TaskPod(SimulatedPod[TaskBoot]):
    """`skew_s`: how far the clock of its node is ahead. `slow`: its engine.
    `tentative_fails`: whether its next tentative epoch does; `call_fails`: whether its next call of
    the engine or of a restore fails, and is not tried again. `wrong_result`: what it computes
    wrongly."""

    def __init__(
        self,
        surroundings: Surroundings,
        kubelet: SimulatedProcess,
        name: str,
        uid: str,
        slot: Slot,
        segment: Segment,
        incarnation: int,
        address: str,
        skew_s: float,
    ) -> None:
        super().__init__(kubelet, surroundings.network, name, uid, address)
        self.slot = slot
        self.segment = segment
        self.incarnation = incarnation
        self.skew_s = skew_s
        self.slow = OverlappingFaults()
        self.tentative_fails = False
        self.call_fails = False
        self.wrong_result: WrongResult | None = None
        self.disk = Disk()
        self.boots = 0
        self._surroundings = surroundings

    def stop(self) -> None:
        super().stop()
        if self.boot is not None:
            self.boot.stop()

    @property
    def is_live(self) -> bool:
        return self.boot is not None and self.boot.core.status.phase is TaskPhase.LIVE

    def make_boot(self) -> TaskBoot:
        self.boots += 1
        return TaskBoot(self, self._surroundings)


class CoordinatorPod(SimulatedPod[CoordinatorProcess]):
    """`fence`: its incarnation."""

    def __init__(
        self,
        surroundings: CoordinatorSurroundings,
        kubelet: SimulatedProcess,
        name: str,
        uid: str,
        fence: int,
        address: str,
    ) -> None:
        super().__init__(kubelet, surroundings.network, name, uid, address)
        self.fence = fence
        self._surroundings = surroundings

    def make_boot(self) -> CoordinatorProcess:
        return CoordinatorProcess(self._surroundings, self.fence, self.address)
