"""The process of a coordinator: polls, timers, store and API calls around a real core."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from rekindle.coordinator.core.state_machine import Coordinator, Event
from rekindle.coordinator.model import (
    ApplyStatus,
    CollectGarbage,
    Effect,
    Pod,
    PollNow,
    ReadNewestManifest,
    StepDown,
    WriteManifest,
)
from rekindle.protocol import PollResponse
from rekindle.topology.model import Slot, partition_of
from rekindle_testing.simulation.checks import Checks
from rekindle_testing.simulation.coordinator_api import (
    ApiAccess,
    SimulatedGenerationReader,
    SimulatedLeaseKeeper,
    SimulatedPodWatcher,
    SimulatedStatusWriter,
)
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.network import STORE, Network, Refused, Reply, TimedOut
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess
from rekindle_testing.simulation.store_and_sinks import Down, SimulatedStore

_POLL_INTERVAL_S = 0.25
_POLL_TIMEOUT_S = 1.0
_TICK_S = 0.1
_STORE_TIMEOUT_S = 10.0
_NEWER_COORDINATOR = 409


@dataclass(frozen=True, slots=True)
class CoordinatorSurroundings:
    """What all coordinators of a simulation share. `uid`: of the topology."""

    scheduler: Scheduler
    network: Network
    server: SimulatedApiServer
    store: SimulatedStore
    checks: Checks
    uid: str


class CoordinatorProcess:
    """The process of one container. `fence`: the incarnation of its pod."""

    def __init__(self, surroundings: CoordinatorSurroundings, fence: int, address: str) -> None:
        scheduler = surroundings.scheduler
        self.fence = fence
        self.process = SimulatedProcess(scheduler, address)
        self.core = Coordinator(fence, wall_s=0.0, started_ms=round(scheduler.now * 1000))
        self._scheduler = scheduler
        self._network = surroundings.network
        self._store = surroundings.store
        self._checks = surroundings.checks
        self._polling: dict[Slot, int] = {}  # the number of each slot's newest planned poll
        self._calling: set[Slot] = set()  # slots whose poll has not ended
        self._store_calls: list[Callable[[], None]] = []  # one after another
        api = ApiAccess(
            self.process, surroundings.network, surroundings.server, surroundings.uid, fence
        )
        self._status = SimulatedStatusWriter(api, self.feed)
        keeper = SimulatedLeaseKeeper(
            api,
            self.feed,
            valid_report_number=lambda: self._status.valid_report_number,
            suspecting=lambda: any(task.suspected for task in self.core.membership),
        )
        for start in (
            SimulatedPodWatcher(api, self._pods_listed).start,
            SimulatedGenerationReader(api, self.feed).start,
            keeper.start,
        ):
            self.process.after(scheduler.between(0.05, 0.5), start)
        self.process.every(_TICK_S, lambda: self.feed(Coordinator.woken))

    @property
    def is_ready(self) -> bool:
        return self.core.ready

    def serve(self, request: object, reply: Reply) -> None:
        """Nobody asks a coordinator for anything but whether it lives."""

    def _poll_only_members(self) -> None:
        slots = {t.slot for t in self.core.membership if t.pod.may_be_running}
        for slot in self._polling.keys() - slots:
            del self._polling[slot]
        for slot in sorted(slots - self._polling.keys(), key=lambda s: s.key):
            self._polling[slot] = 0
            self._poll_again(slot, 0.0)

    def feed(self, event: Event) -> None:
        if not self.process.dead:
            for effect in event(self.core, self._scheduler.now):
                self._perform(effect)

    def _pods_listed(self, pods: Sequence[Pod]) -> None:
        self.feed(lambda core, now: core.pods_listed(pods, now))
        self._poll_only_members()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ReadNewestManifest():
                self._call_store(lambda: self._store.newest, self._manifest_read)
            case WriteManifest():
                self._write(effect)
            case CollectGarbage(retain=retain, in_use=in_use):
                self._collect(retain, in_use)
            case ApplyStatus(report=report):
                self._status.offer(report)
            case PollNow(slot):
                if slot in self._polling and slot not in self._calling:
                    self._poll_again(slot, 0.0)
            case StepDown():
                self.process.die()

    # -- polls -----------------------------------------------------------------------------------

    def _poll_again(self, slot: Slot, wait_s: float) -> None:
        """Poll a slot after a while; what was planned before is not done any more."""
        number = self._polling[slot] = self._polling[slot] + 1

        def poll() -> None:
            if self._polling.get(slot) == number:
                self._poll(slot)

        self.process.after(wait_s, poll)

    def _poll(self, slot: Slot) -> None:
        poll, task = self.core.poll_for(slot), self.core.membership.get(slot)
        if poll is None or task is None or task.pod.address is None:
            self._poll_again(slot, _POLL_INTERVAL_S)
            return
        if self._checks.wrong_result_checks is not None:
            self._checks.wrong_result_checks.polls(self.core, slot, poll)
        incarnation, address = poll.task.incarnation, task.pod.address
        self._calling.add(slot)

        def ended(result: PollResponse | int | Refused | TimedOut) -> None:
            self._calling.discard(slot)
            if isinstance(result, PollResponse) and result.task == poll.task:
                self.feed(lambda core, now: core.poll_answered(slot, incarnation, result, now))
                self._check_comparison(slot)
            elif result == _NEWER_COORDINATOR:
                self.feed(lambda core, now: core.fence_raised(slot.key, now))
            else:
                message = repr(result)
                self.feed(lambda core, now: core.poll_failed(slot, incarnation, message, now))
            if slot in self._polling:
                self._poll_again(slot, _POLL_INTERVAL_S)

        self._network.call(self.process, address, poll, ended, _POLL_TIMEOUT_S)

    def _check_comparison(self, slot: Slot) -> None:
        partition = partition_of(slot)
        epoch = self.core.containment.comparison.witnessed(partition)
        self._checks.witnessed(partition, epoch)
        if self._checks.wrong_result_checks is not None:
            self._checks.wrong_result_checks.compared(self.core, slot)

    # -- the store -------------------------------------------------------------------------------

    def _call_store(self, request: Callable[[], Any], ended: Callable[[Any], None]) -> None:
        """One call after another, as in the coordinator's thread for the store."""

        def call() -> None:
            self._network.call(self.process, STORE, request, done, _STORE_TIMEOUT_S)

        def done(result: Any) -> None:
            ended(result)
            self._store_calls.pop(0)
            if self._store_calls:
                self._store_calls[0]()

        self._store_calls.append(call)
        if len(self._store_calls) == 1:
            call()

    def _manifest_read(self, result: Any) -> None:
        if isinstance(result, (Down, Refused, TimedOut)):
            self.feed(_store_failed)
        else:
            self.feed(lambda core, now: core.manifest_read(result, now, store="store-1"))

    def _write(self, effect: WriteManifest) -> None:
        assert not effect.migrations

        def commit() -> bool:
            before = self._store.manifests.get(effect.manifest.seq)
            done = self._store.write(effect.manifest)
            if done and (before is None or before[0] != effect.manifest):
                self._checks.committed(effect.manifest)
            return done

        def written(result: Any) -> None:
            if isinstance(result, (Down, Refused, TimedOut)):
                self.feed(_store_failed)
            elif result:
                self.feed(lambda core, now: core.manifest_written(effect.manifest, now))
            else:
                self.feed(Coordinator.manifest_race_lost)

        def looked_up(result: Any) -> None:
            if isinstance(result, (Down, Refused, TimedOut)):
                self.feed(_store_failed)
            elif result:
                message = f"{result[0]} is missing"
                self.feed(lambda core, now: core.entries_refused(result, message, now))
            else:
                self._call_store(commit, written)

        self._call_store(partial(self._store.missing, effect.new_entries), looked_up)

    def _collect(self, retain: int, in_use: Set[str]) -> None:
        def collect() -> None:
            deleted = self._store.collect_garbage(retain, in_use)
            self._checks.check_retention()
            self._checks.check_shipped(deleted)

        def ended(result: Any) -> None:
            problem = "down" if isinstance(result, (Down, Refused, TimedOut)) else None
            self.feed(lambda core, now: core.garbage_collected(problem, {}, now))

        self._network.call(self.process, STORE, collect, ended, _STORE_TIMEOUT_S)


def _store_failed(core: Coordinator, now: float) -> list[Effect]:
    return core.store_failed("down", now)
