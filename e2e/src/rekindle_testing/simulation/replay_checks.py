"""`checkpoint.replayTarget`: once nothing fails any more, a restart replays no longer than that.

For a while each task is asked what it would replay if it restarted now; then one of them is killed,
and its replay is measured. Bounds from above only make checkpoints more frequent, so the one thing
that may make a replay longer than the target is that checkpoint epochs are an interval apart.

Design: docs/design/checkpoints.md#how-often.
"""

from __future__ import annotations

from random import Random

from rekindle.coordinator.checkpoints.policy import replay_target_s
from rekindle.protocol import MAX_INTERVALS
from rekindle.topology.model import Slot, Topology, partition_of
from rekindle_testing.simulation.checks import Violation
from rekindle_testing.simulation.cluster import SimulatedCluster

_LOOK_S = 0.5
_WATCHED_S = 60.0
"""Longer than the time between two checkpoints with most targets."""
_COMMIT_S = 1.5
"""Of a replay: the epochs that are computed until the state of a checkpoint epoch is saved, sinks
have written it, and a manifest has it; and what takes longer than the mean."""
_BACK_WITHIN_S = 30.0
_LEAST_EPOCH_S = 0.03
"""The mean time of many epochs is not shorter."""


def max_left_out_epochs(topology: Topology) -> int:
    """So many epochs in a row may have no checkpoint because of the targets."""
    targets = [replay_target_s(topology, segment) for segment in topology.segments]
    known = [target for target in targets if target is not None]
    most = MAX_INTERVALS * topology.spec.checkpoint_interval_epochs
    return min(most, int(min(known) / _LEAST_EPOCH_S)) if known else 0


class ReplayChecks:
    """Of a cluster in which all is done. `run` raises `Violation`."""

    def __init__(self, cluster: SimulatedCluster, seed: int) -> None:
        self._cluster = cluster
        self._scheduler = cluster.scheduler
        self._seed = seed

    def run(self) -> None:
        self._await_checkpoint()
        end_at = self._scheduler.now + _WATCHED_S
        while self._scheduler.now < end_at:
            self._scheduler.run_until(self._scheduler.now + _LOOK_S)
            for slot in self._slots():
                self._require_short_replay(slot, self._replay_now_s(slot), "would replay")
        killed = Random(f"replay {self._seed}").choice(self._slots())
        self._require_short_replay(killed, self._measured_s(killed), "has replayed")

    def _await_checkpoint(self) -> None:
        """Until all partitions have saved the same epoch since nothing fails any more."""
        cluster, scheduler = self._cluster, self._scheduler
        epoch_s = cluster.topology.spec.epoch_interval / 1e6
        began = int(scheduler.now / epoch_s)
        every = cluster.topology.spec.checkpoint_interval_epochs
        end_at = scheduler.now + (max_left_out_epochs(cluster.topology) + 3 * every) * epoch_s
        while cluster.store.newest is None or cluster.store.newest.epoch < began:
            if scheduler.now > end_at:
                raise Violation(f"no checkpoint is committed for {end_at / epoch_s - began:g} s")
            scheduler.run_until(scheduler.now + _LOOK_S)

    def _slots(self) -> list[Slot]:
        slots = self._cluster.topology.slots()
        return sorted((s for s in slots if s in self._cluster.pods), key=lambda s: s.key)

    def _epoch_s(self, slot: Slot) -> float:
        boot = self._cluster.pods[slot].boot
        return boot.core.status.epoch_mean_s() if boot is not None else 0.0

    def _replay_now_s(self, slot: Slot) -> float:
        """By the mean time of an epoch."""
        pod, newest = self._cluster.pods[slot], self._cluster.store.newest
        if newest is None or not pod.is_live or pod.boot is None or pod.boot.epoch is None:
            return 0.0
        oldest = newest.entries[partition_of(slot).key][-1]
        return (pod.boot.epoch - oldest.epoch) * self._epoch_s(slot)

    def _measured_s(self, slot: Slot) -> float:
        """From when the killed task begins to compute until it has computed what it had before."""
        pod, scheduler = self._cluster.pods[slot], self._scheduler
        before = pod.boot.epoch if pod.boot is not None else None
        pod.restart()
        began_at, end_at = None, scheduler.now + _BACK_WITHIN_S
        while scheduler.now < end_at:
            scheduler.run_until(scheduler.now + 0.02)
            boot = pod.boot
            if boot is None or boot.core.parts is None or boot.epoch is None:
                continue
            began_at = scheduler.now if began_at is None else began_at
            if before is None or boot.epoch >= before:
                return scheduler.now - began_at
        raise Violation(f"{slot.key} is not back {_BACK_WITHIN_S:g} s after it was killed")

    def _require_short_replay(self, slot: Slot, replay_s: float, what: str) -> None:
        topology = self._cluster.topology
        segment = next(s for s in topology.segments if s.id == slot.segment)
        target_s = replay_target_s(topology, segment)
        if target_s is None:
            return
        interval_s = topology.spec.checkpoint_interval_epochs * self._epoch_s(slot)
        if replay_s > max(target_s, interval_s) + _COMMIT_S:
            raise Violation(
                f"{slot.key} {what} for {replay_s:.1f} s, and its target is {target_s:g} s"
            )
