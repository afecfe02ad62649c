"""One newcomer as the coordinator sees it: its session, its attempts, when it is given up. Pure.

Design: docs/design/state-movement.md#the-coordinators-side.
Paper: Flux (Shah et al. 2004), section 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.coordinator.model import Partition, partition_of
from rekindle.coordinator.movement.phases import TRANSITIONS, MovementEvent, MovementPhase
from rekindle.coordinator.movement.views import DonorBoot, ReplicaView, ReplicaViews
from rekindle.exchange.state_mover.messages import Order, Progress, Replica, Session, SessionVersion
from rekindle.exchange.state_mover.phases import NewcomerPhase
from rekindle.protocol import TaskPhase
from rekindle.transitions import StateMachine

_DONOR_PHASES = (TaskPhase.LIVE, TaskPhase.CATCHING_UP)


@dataclass(frozen=True, slots=True)
class MovementLimits:
    """When an attempt, and when all of them, end.

    Maxima. `confirm_holds_s`: time until all upstream replicas have confirmed. `stall_s`: time
    without progress, until all is stored. `session_s`: time of one attempt. `attempts`: of a slot,
    until a newcomer is Live. `wait_s`: after it, counted from `known_since`, no attempt begins,
    whatever it waited for. `suspected_donor_s`: for so long, counted in the same way, replicas that
    do not respond may still become donors. `per_donor`: sessions of a donor at a time."""

    confirm_holds_s: float = 15.0
    stall_s: float = 30.0
    session_s: float = 600.0
    attempts: int = 2
    wait_s: float = 900.0
    suspected_donor_s: float = 5.0
    per_donor: int = 1


@dataclass(slots=True)
class Movement:
    """One boot of a newcomer. `known_since`: when the coordinator first observed it. `abandoned`:
    it must not start from sessions up to this version. `needed`: the first epoch that all upstream
    replicas hold; None before they have confirmed. `failed`: donors of earlier attempts. `reason`:
    why the last attempt was given up. `attempts`: of the slot, with those of earlier boots that
    never were Live."""

    replica: Replica
    boot: str
    known_since: float
    abandoned: SessionVersion | None = None
    session: Session | None = None
    donor: Replica | None = None
    donor_boot: str | None = None
    needed: int | None = None
    attempts: int = 0
    failed: list[DonorBoot] = field(default_factory=list)
    began_at: float = 0.0
    progress_at: float = 0.0
    reason: str = ""
    was_live: bool = False
    machine: StateMachine[MovementPhase, MovementEvent] = field(init=False)
    _last_progress: tuple[NewcomerPhase, int, int] | None = None

    def __post_init__(self) -> None:
        name = f"newcomer {self.replica.slot.key}, incarnation {self.replica.incarnation}"
        self.machine = StateMachine(name, TRANSITIONS, MovementPhase.QUEUED)

    @property
    def phase(self) -> MovementPhase:
        return self.machine.state

    @property
    def partition(self) -> Partition:
        return partition_of(self.replica.slot)

    @property
    def order(self) -> Order | None:
        if self.phase not in (MovementPhase.HOLDING, MovementPhase.MOVING):
            return None
        assert self.session is not None
        assert self.donor is not None
        return Order(self.session, self.boot, self.donor, self.needed)

    def begin(self, donor: ReplicaView, version: SessionVersion, now: float) -> None:
        self.machine.step(MovementEvent.BEGUN)
        self.session = Session(self.replica.slot, self.replica.incarnation, version)
        self.donor, self.donor_boot, self.needed = donor.replica, donor.boot, None
        self._begun(now)

    def adopt(self, progress: Progress, donor: ReplicaView | None, now: float) -> None:
        """Continue a session of an earlier coordinator."""
        self.machine.step(MovementEvent.ADOPTED)
        self.session, self.donor = progress.session, progress.donor
        self.donor_boot = donor.boot if donor is not None else None
        self._begun(now)
        if progress.needed is not None:
            self.confirmed(progress.needed, now)

    def confirmed(self, needed: int, now: float) -> None:
        self.machine.step(MovementEvent.CONFIRMED)
        self.needed, self.progress_at = needed, now

    def give_up(self, reason: str) -> None:
        self.machine.step(MovementEvent.GIVEN_UP)
        assert self.session is not None
        assert self.donor is not None
        self.abandoned, self.reason = self.session.version, reason
        self.failed.append((self.donor, self.donor_boot))

    def why_give_up(
        self, view: ReplicaView, views: ReplicaViews, limits: MovementLimits, now: float
    ) -> str | None:
        """Why the session in progress should end; None: it goes on."""
        progress = self.progress_of(view)
        if progress is not None and progress.phase is NewcomerPhase.FAILED:
            return progress.message
        if self.phase is MovementPhase.MOVING:
            made = None
            if progress is not None:
                made = progress.phase, progress.stored, progress.prepared
            if made != self._last_progress:
                self._last_progress, self.progress_at = made, now
        installs = progress is not None and progress.phase is NewcomerPhase.INSTALLING
        if (lost := self._why_donor_is_lost(views, installs)) is not None:
            return lost
        if (missing := self._why_unreadable(views, progress)) is not None:
            return missing
        if self.phase is MovementPhase.HOLDING and now - self.began_at >= limits.confirm_holds_s:
            return (
                f"not all upstream replicas confirmed its hold within {limits.confirm_holds_s:g} s"
            )
        moves = self.phase is MovementPhase.MOVING and not installs
        if moves and now - self.progress_at >= limits.stall_s:
            return f"no progress for {limits.stall_s:g} s"
        if now - self.began_at >= limits.session_s:
            return f"it is not complete after {limits.session_s:g} s"
        return None

    def progress_of(self, view: ReplicaView) -> Progress | None:
        """The progress of this session that the newcomer reports."""
        progress = view.newcomer.progress if view.newcomer is not None else None
        return progress if progress is not None and progress.session == self.session else None

    def _why_unreadable(self, views: ReplicaViews, progress: Progress | None) -> str | None:
        """No replica of an input has the first epoch that the newcomer would read."""
        first = self.needed
        if progress is not None and progress.epoch is not None:
            first = progress.epoch + 1
        sources = views.inputs.get(self.partition, ())
        for source, replicas in zip(sources, views.upstream(self.partition), strict=True):
            bases = [view.log_base for view in replicas if view.log_base is not None]
            if first is not None and bases and min(bases) > first and len(bases) == len(replicas):
                return f"input {source.key} begins at epoch {min(bases)}, and it needs {first}"
        return None

    def _why_donor_is_lost(self, views: ReplicaViews, installs: bool) -> str | None:
        """`installs`: the newcomer has got everything from the donor."""
        assert self.donor is not None
        name = f"donor {self.donor.slot.key}, incarnation {self.donor.incarnation},"
        donor = views.get(self.donor)
        if donor is not None and not donor.trusted:
            return f"{name} has diverged or is in a dispute"
        if installs:
            return None
        if donor is None or not views.is_current(donor):
            return f"{name} is gone"
        if donor.boot is None or donor.phase is None:
            return None  # the donor has not responded to this coordinator yet
        if self.donor_boot is None:
            self.donor_boot = donor.boot
        if donor.boot != self.donor_boot or donor.phase not in _DONOR_PHASES:
            return f"{name} has restarted or stops"
        return None

    def _begun(self, now: float) -> None:
        self.attempts += 1
        self.began_at = self.progress_at = now
        self._last_progress = None


def has_left(view: ReplicaView, session: Session) -> bool:
    """Whether a newcomer's response proves that it will not start from a session any more, or that
    it has started, so that its position is its hold."""
    if view.restored_from is not None:
        return True
    report = view.newcomer
    if report is None:
        return False
    if report.abandoned is not None and report.abandoned >= session.version:
        return True
    progress = report.progress
    if progress is None:
        return False
    newer = progress.session.version > session.version
    return newer or (progress.session == session and progress.phase.over)
