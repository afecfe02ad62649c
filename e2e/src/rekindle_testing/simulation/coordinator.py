"""The process of a coordinator: polls, timers, store and watch of pods around a real core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.model import (
    ApplyStatus,
    CollectGarbage,
    Effect,
    EntriesRefused,
    Event,
    FenceRaised,
    GarbageCollected,
    Generation,
    GenerationSeen,
    ManifestRaceLost,
    ManifestRead,
    ManifestWritten,
    Pod,
    PodsListed,
    PollAnswered,
    PollFailed,
    PollNow,
    ReadNewestManifest,
    StepDown,
    StoreFailed,
    Ticked,
    WriteManifest,
)
from rekindle.protocol import PollResponse
from rekindle.topology.model import Slot
from rekindle_testing.simulation.checks import Checks
from rekindle_testing.simulation.network import STORE, Network, Refused, TimedOut
from rekindle_testing.simulation.outside import Down, SimulatedStore
from rekindle_testing.simulation.scheduler import Process, Scheduler

_POLL_INTERVAL_S = 0.25
_POLL_DEADLINE_S = 1.0
_TICK_S = 0.1
_STORE_DEADLINE_S = 10.0
_NEWER_COORDINATOR = 409


class CoordinatorProcess:
    """One incarnation. `fence` is its number."""

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        store: SimulatedStore,
        checks: Checks,
        generation: Generation,
        fence: int,
        address: str,
    ) -> None:
        self.fence = fence
        self.process = Process(scheduler, address)
        self.core = Coordinator(fence, wall_s=0.0)
        self._scheduler = scheduler
        self._network = network
        self._store = store
        self._checks = checks
        self._polling: dict[Slot, int] = {}  # number of the loop of each slot
        self._calling: set[Slot] = set()  # slots whose poll has not ended
        self._store_calls: list[Callable[[], None]] = []  # one after another
        wait_s = scheduler.between(0.05, 1.0)
        self.process.after(wait_s, lambda: self.feed(GenerationSeen(generation)))
        self.process.every(_TICK_S, lambda: self.feed(Ticked()))

    @property
    def retired(self) -> bool:
        return self.process.dead

    def pods_listed(self, pods: Sequence[Pod]) -> None:
        """What the watch of the API server has delivered."""
        self.process.do(lambda: self._pods_listed(tuple(pods)))

    def _pods_listed(self, pods: tuple[Pod, ...]) -> None:
        self.feed(PodsListed(pods))
        slots = {t.slot for t in self.core.membership if t.pod.may_be_running}
        for slot in self._polling.keys() - slots:
            del self._polling[slot]
        for slot in sorted(slots - self._polling.keys(), key=lambda s: s.key):
            self._polling[slot] = 0
            self._poll_again(slot, 0.0)

    def feed(self, event: Event) -> None:
        if self.process.dead:
            return
        for effect in self.core.step(event, self._scheduler.now):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ReadNewestManifest():
                self._call_store(lambda: self._store.newest, self._read)
            case WriteManifest():
                self._write(effect)
            case CollectGarbage(retain=retain):
                self._collect(retain)
            case ApplyStatus():
                pass  # nobody reads it: the operator is a stand-in
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
        incarnation = poll.task.incarnation
        self._calling.add(slot)

        def ended(result: PollResponse | int | Refused | TimedOut) -> None:
            self._calling.discard(slot)
            if isinstance(result, PollResponse) and result.task == poll.task:
                self.feed(PollAnswered(slot, incarnation, result))
            elif result == _NEWER_COORDINATOR:
                self.feed(FenceRaised(slot.key))
            else:
                self.feed(PollFailed(slot, incarnation, repr(result)))
            if slot in self._polling:
                self._poll_again(slot, _POLL_INTERVAL_S)

        self._network.call(self.process, task.pod.address, poll, ended, _POLL_DEADLINE_S)

    # -- the store -------------------------------------------------------------------------------

    def _call_store(self, request: Callable[[], Any], ended: Callable[[Any], None]) -> None:
        """One call after another, as in the coordinator's thread for the store."""

        def call() -> None:
            self._network.call(self.process, STORE, request, done, _STORE_DEADLINE_S)

        def done(result: Any) -> None:
            ended(result)
            self._store_calls.pop(0)
            if self._store_calls:
                self._store_calls[0]()

        self._store_calls.append(call)
        if len(self._store_calls) == 1:
            call()

    def _read(self, result: Any) -> None:
        failed = isinstance(result, (Down, Refused, TimedOut))
        self.feed(StoreFailed("down") if failed else ManifestRead(result, "store-1"))

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
                self.feed(StoreFailed("down"))
            elif result:
                self.feed(ManifestWritten(effect.manifest))
            else:
                self.feed(ManifestRaceLost(effect.manifest.seq))

        def looked_up(result: Any) -> None:
            if isinstance(result, (Down, Refused, TimedOut)):
                self.feed(StoreFailed("down"))
            elif result:
                self.feed(EntriesRefused(result, f"{result[0]} is missing"))
            else:
                self._call_store(commit, written)

        self._call_store(partial(self._store.missing, effect.new_entries), looked_up)

    def _collect(self, retain: int) -> None:
        def collect() -> None:
            self._store.collect_garbage(retain)
            self._checks.retained()

        def ended(result: Any) -> None:
            failed = isinstance(result, (Down, Refused, TimedOut))
            self.feed(GarbageCollected("down" if failed else None))

        self._network.call(self.process, STORE, collect, ended, _STORE_DEADLINE_S)
