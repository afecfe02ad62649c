"""What the coordinator knows of replicas when it decides about state movements. Pure data.

One view for each incarnation that may be running.

Design: docs/design/state-movement.md#the-coordinators-side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rekindle.coordinator.model import Partition, partition_of
from rekindle.exchange.state_mover.messages import (
    Hold,
    NewcomerReport,
    Replica,
    Session,
)
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot

DonorBoot = tuple[Replica, str | None]
"""A replica and which boot of it was the donor; None: it had not responded yet."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One incarnation of a slot, according to its newest response; `boot` and `phase` are None
    before its first response.

    `serves`: readers may read from it; assumed of one that was once ready and has not responded.
    `engine`: its engine's version. `trusted`: it is no party to a dispute and has not diverged.
    `epoch`: of its newest state. `restored_from`: the epoch of the state with which this boot
    started; None while it has none. `log_base`: the lowest epoch of its output log; None if it is
    not known. `holds`: of sessions, on its output log (`state_mover.messages.Hold`); `donates`:
    sessions for which it keeps state.
    """

    slot: Slot
    incarnation: int
    boot: str | None = None
    phase: TaskPhase | None = None
    serves: bool = False
    suspected: bool = False
    trusted: bool = True
    epoch: int = -1
    restored_from: int | None = None
    log_base: int | None = None
    engine: str = ""
    newcomer: NewcomerReport | None = None
    holds: tuple[Hold, ...] = ()
    donates: tuple[Session, ...] = ()

    @property
    def replica(self) -> Replica:
        return Replica(self.slot, self.incarnation)

    @property
    def partition(self) -> Partition:
        return partition_of(self.slot)

    @property
    def is_newcomer(self) -> bool:
        """It runs and has no state."""
        return self.phase is TaskPhase.WAITING and self.restored_from is None


class ReplicaViews:
    """The replicas that may be running, and which partitions read which."""

    def __init__(
        self,
        replicas: Iterable[ReplicaView] = (),
        inputs: Mapping[Partition, Sequence[Partition]] | None = None,
    ) -> None:
        """`inputs`: of each partition, the partitions that it reads; sources first."""
        self._replicas = {view.replica: view for view in replicas}
        self.inputs = inputs or {}
        self._newest: dict[Slot, int] = {}
        self._of: dict[Partition, list[ReplicaView]] = {}
        for view in self._replicas.values():
            self._newest[view.slot] = max(view.incarnation, self._newest.get(view.slot, 0))
            self._of.setdefault(view.partition, []).append(view)

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._replicas.values())

    def get(self, replica: Replica) -> ReplicaView | None:
        return self._replicas.get(replica)

    def of(self, partition: Partition) -> Sequence[ReplicaView]:
        return self._of.get(partition, ())

    def upstream(self, partition: Partition) -> list[list[ReplicaView]]:
        """For each partition that this one reads, its replicas that readers may read from."""
        return [
            [view for view in self.of(source) if view.serves and self.is_current(view)]
            for source in self.inputs.get(partition, ())
        ]

    def is_current(self, view: ReplicaView) -> bool:
        """Whether no newer incarnation has replaced it."""
        return view.incarnation == self._newest[view.slot]
