"""One pod of a task: its disk, its address, and one container after another."""

from __future__ import annotations

from rekindle.protocol import PollRequest
from rekindle.topology.model import Segment, Slot
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.inputs import ReadRequest
from rekindle_testing.simulation.network import Reply
from rekindle_testing.simulation.scheduler import Process
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.task import TaskProcess

_RESTART_S = (0.5, 2.0)


class SimulatedPod:
    """A pod of a task. `address` is its host, and `skew_s` how far the clock of its node is
    ahead."""

    def __init__(
        self,
        surroundings: Surroundings,
        slot: Slot,
        segment: Segment,
        incarnation: int,
        address: str,
        skew_s: float,
    ) -> None:
        self.slot = slot
        self.segment = segment
        self.incarnation = incarnation
        self.address = address
        self.skew_s = skew_s
        self.was_ready = False
        self.slowness = 1.0  # of its engine
        self.disk = Disk()
        self.boots = 0
        self.boot: TaskProcess | None = None
        self._surroundings = surroundings
        self._gone = False
        self._frozen = False
        surroundings.network.servers[address] = self
        surroundings.scheduler.after(surroundings.scheduler.between(0.1, 1.0), self._start)

    @property
    def process(self) -> Process | None:
        return self.boot.process if self.boot is not None else None

    def serve(self, request: PollRequest | ReadRequest, reply: Reply) -> None:
        if self.boot is not None:
            self.boot.serve(request, reply)

    def _start(self) -> None:
        if not self._gone:
            self.boots += 1
            self.boot = TaskProcess(self, self._surroundings)
            if self._frozen:
                self.boot.process.freeze()

    def restart(self, down_s: float = 0.0) -> None:
        """Kill -9 the container, or it has ended: the kubelet starts it again, after `down_s`."""
        if self.boot is None or self._gone:
            return
        self.boot.process.die()
        self.boot = None
        scheduler = self._surroundings.scheduler
        scheduler.after(down_s + scheduler.between(*_RESTART_S), self._start)

    def freeze(self) -> None:
        self._frozen = True
        if self.boot is not None:
            self.boot.process.freeze()

    def thaw(self) -> None:
        self._frozen = False
        if self.boot is not None:
            self.boot.process.thaw()

    def remove(self) -> None:
        """The pod ends, with its disk."""
        self._gone = True
        if self.boot is not None:
            self.boot.process.die()
        self.boot = None
        if self._surroundings.network.servers.get(self.address) is self:
            del self._surroundings.network.servers[self.address]
