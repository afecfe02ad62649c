"""State movements of a simulated task: what its shells do, on either side.

State and log are lines of text, cut into chunks of a few lines, so that a process can die between
any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from rekindle.backoff import BackoffPolicy
from rekindle.exchange.state_mover import donor as donors
from rekindle.exchange.state_mover import newcomer as newcomers
from rekindle.exchange.state_mover.chunks import Slice
from rekindle.exchange.state_mover.donor import DonorCoreEvent, DonorEffect, DonorLimits
from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    MessageToDonor,
    Offer,
    Preparing,
    Refusal,
    Session,
)
from rekindle.exchange.state_mover.newcomer import NewcomerCoreEvent, NewcomerEffect, NewcomerLimits
from rekindle.task.core.messages import TaskCoreEvent
from rekindle.task.core.task import TaskCore
from rekindle.task.state import TaskState
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.network import Network, Refused, Reply, TimedOut
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess
from rekindle_testing.simulation.values import FoldedState

DONOR = DonorLimits(chunk_bytes=128, chunks_at_once=3, lease_s=20.0)
NEWCOMER = NewcomerLimits(
    chunk_bytes=128, chunks_at_once=3, retry=BackoffPolicy(first_s=0.5, longest_s=2.0)
)
_DISK_S = (0.001, 0.2)
"""The least and the most time that an access of the disk takes."""
_PIN_S = (_DISK_S, _DISK_S, (0.2, 6.0))
"""The same of pinning a snapshot: one of these at random, of which the last is slow."""
_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class MovedState:
    """What a newcomer starts from: its state, and its log from `base` on."""

    state: TaskState
    base: int
    log: dict[int, str]

    @property
    def lines(self) -> list[str]:
        """What is sent, each line a piece: the state, then the epochs of the log."""
        state, fold = self.state, self.state.operators
        assert isinstance(fold, FoldedState)
        first = (
            f"S {state.epoch} {state.watermark} {self.base} {state.chained_digest} {fold.fold}\n"
        )
        return [first, *(f"L {epoch} {value}\n" for epoch, value in sorted(self.log.items()))]

    @property
    def digest(self) -> str:
        return blake2b("".join(self.lines).encode(), digest_size=8).hexdigest()

    @staticmethod
    def of(text: str) -> MovedState:
        first, *lines = text.splitlines()
        _, epoch, watermark, base, chained, fold = first.split(" ")
        log = {int(e): value for _, e, value in (line.split(" ") for line in lines)}
        state = TaskState(int(epoch), int(watermark), FoldedState(fold=fold), chained)
        return MovedState(state, int(base), log)


class SimulatedMover:
    """State movements of one process of a task. `step` performs the effects of what happened to its
    `core`; `newest`: the state after its newest epoch."""

    def __init__(
        self,
        process: SimulatedProcess,
        scheduler: Scheduler,
        network: Network,
        core: TaskCore,
        step: Callable[[TaskCoreEvent], None],
        newest: Callable[[], TaskState],
        disk: Disk,
    ) -> None:
        self.installed: MovedState | None = None
        self.donor_address = ""
        self._process = process
        self._scheduler = scheduler
        self._network = network
        self._core = core
        self._step = step
        self._newest = newest
        self._disk = disk
        self._stored: dict[Session, list[bytes]] = {}
        self._pinned: dict[Session, list[bytes]] = {}
        # By the number of a chunk, or None for an offer.
        self._replies: dict[tuple[Session, int | None], list[Reply]] = {}

    def perform(self, effect: NewcomerEffect | DonorEffect) -> None:
        match effect:
            case newcomers.SendToDonor(_, message):
                self._ask(message)
            case newcomers.StoreChunk(session, number, data):
                if number == 0:
                    self._stored[session] = []
                self._later(partial(self._store, session, number, data))
            case newcomers.InstallState(session, _):
                self._later(partial(self._install, session))
            case newcomers.DiscardState(session):
                self._stored.pop(session, None)
            case newcomers.StartFrom():
                raise AssertionError("the core starts the task")
            case donors.PinSnapshot(session):
                delay_s = self._scheduler.between(*self._scheduler.random.choice(_PIN_S))
                self._process.after(delay_s, partial(self._pin, session))
            case donors.UnpinSnapshot(session):
                self._pinned.pop(session, None)
            case donors.ReadChunk(session, number, slices):
                self._later(partial(self._read, session, number, slices))
            case donors.Reply(message):
                self._reply(message)

    def _tell_newcomer(self, event: NewcomerCoreEvent) -> None:
        self._step(partial(self._core.newcomer_event_received, event))

    def _tell_donor(self, event: DonorCoreEvent) -> None:
        self._step(partial(self._core.donor_event_received, event))

    def _later(self, action: Callable[[], None]) -> None:
        self._process.after(self._scheduler.between(*_DISK_S), action)

    # -- the newcomer ------------------------------------------------------------------------------

    def _ask(self, message: MessageToDonor) -> None:
        def ended(result: Any) -> None:
            if not isinstance(result, (Refused, TimedOut)):
                self._tell_newcomer(newcomers.MessageReceived(result))

        host = self.donor_address.rpartition(":")[0]
        self._network.call(self._process, host, message, ended, _TIMEOUT_S)

    def _store(self, session: Session, number: int, data: bytes) -> None:
        chunks = self._stored.get(session)
        if chunks is None:
            return  # discarded
        if self._disk.access_fails():
            self._not_stored(session, "the disk failed")
            return
        assert len(chunks) == number, "chunks are stored in order"
        chunks.append(data)
        self._tell_newcomer(newcomers.ChunkStored(session, number))

    def _install(self, session: Session) -> None:
        chunks = self._stored.get(session)
        if chunks is None:
            return  # discarded
        if self._disk.access_fails():
            self._not_stored(session, "the disk failed")
            return
        moved = MovedState.of(b"".join(chunks).decode())
        if self._disk.contradicts(moved.base, moved.log):
            self._not_stored(session, "its own log has another result")
            return
        self.installed = moved
        digest = self.installed.digest
        self._tell_newcomer(newcomers.StateInstalled(session, digest))

    def _not_stored(self, session: Session, why: str) -> None:
        self._tell_newcomer(newcomers.StoringFailed(session, why))

    # -- the donor ---------------------------------------------------------------------------------

    def serve(self, message: MessageToDonor, reply: Reply) -> None:
        number = message.number if isinstance(message, ChunkRequest) else None
        self._replies.setdefault((message.session, number), []).append(reply)
        self._tell_donor(donors.MessageReceived(message))

    def _reply(self, message: Preparing | Offer | Chunk | Refusal) -> None:
        match message:
            case Preparing(session) | Offer(session):
                keys: list[tuple[Session, int | None]] = [(session, None)]
            case Chunk(session, _, number):
                keys = [(session, number)]
            case Refusal(session):
                keys = [key for key in self._replies if key[0] == session]
        for key in keys:
            for reply in self._replies.pop(key, ()):
                reply(message)

    def _pin(self, session: Session) -> None:
        if self._disk.access_fails():
            self._tell_donor(donors.PinFailed(session, "the disk failed"))
            return
        state, disk = self._newest(), self._disk
        log = {e: value for e, value in disk.values.items() if e <= state.epoch}
        moved = MovedState(state, disk.base, log)
        lines = [line.encode() for line in moved.lines]
        self._pinned[session] = lines
        sizes = [len(line) for line in lines]
        pinned = donors.SnapshotPinned(session, state.epoch, moved.base, sizes, moved.digest)
        self._tell_donor(pinned)

    def _read(self, session: Session, number: int, slices: Sequence[Slice]) -> None:
        lines = self._pinned.get(session)
        if lines is None:
            return
        if self._disk.access_fails():
            unreadable = donors.ChunkUnreadable(session, number, "the disk failed")
            self._tell_donor(unreadable)
            return
        data = b"".join(lines[s.piece][s.offset : s.offset + s.nbytes] for s in slices)
        self._tell_donor(donors.ChunkRead(session, number, data))
