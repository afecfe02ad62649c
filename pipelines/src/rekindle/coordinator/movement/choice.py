"""Which replica is the donor, and which newcomers wait for others. Pure.

Design: docs/design/state-movement.md#choosing-a-donor, docs/design/state-movement.md#order.
Paper: Flux (Shah et al. 2004), section 5.3: partitions are recovered one by one, bottom-up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rekindle.coordinator.model import Partition
from rekindle.coordinator.movement.views import DonorBoot, ReplicaView, ReplicaViews
from rekindle.exchange.state_mover.messages import Replica
from rekindle.protocol import TaskPhase


def usable_donors(
    newcomer: ReplicaView, views: ReplicaViews, failed: Collection[DonorBoot]
) -> list[ReplicaView]:
    """Replicas that could give the newcomer their state: Live, trusted, of the same engine version,
    and not in `failed`, the donors of its earlier attempts."""
    return [
        view
        for view in views.of(newcomer.partition)
        if view.replica != newcomer.replica
        and views.is_current(view)
        and view.phase is TaskPhase.LIVE
        and view.trusted
        and view.engine == newcomer.engine
        and (view.replica, view.boot) not in failed
    ]


def choose_donor(
    donors: Collection[ReplicaView],
    busy: Mapping[Replica, int],
    per_donor: int,
    failed: Collection[DonorBoot],
) -> ReplicaView | None:
    """A donor that responds and has no other session. Preferred: one of which no earlier boot was
    a donor that failed, then the one with the newest epoch."""
    restarted = {replica for replica, _ in failed}
    free = [v for v in donors if not v.suspected and busy.get(v.replica, 0) < per_donor]
    return min(free, key=lambda v: (v.replica in restarted, -v.epoch, v.slot.key), default=None)


def waits_for_inputs(
    partition: Partition, views: ReplicaViews, in_session: Collection[Partition]
) -> bool:
    """Whether this partition waits for a newcomer of an input: sources get their state first, sinks
    last."""
    return any(source in in_session for source in views.inputs.get(partition, ()))
