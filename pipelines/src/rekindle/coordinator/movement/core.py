"""State movements as one pure state machine: `step(event, now) -> effects`, `directive_for`.

A session is one attempt to move state from a donor to a newcomer; a directive is the part of a
replica's next polls that is about sessions.

Decides which newcomers get their state from a donor and which restore from a checkpoint, in which
order, from which donor, and when a session is given up. Nothing is stored: sessions of an earlier
coordinator are adopted from what newcomers report. A hold is kept after its session has ended,
until the newcomer's own response proves that it is not needed, or its process cannot be running any
more.

Design: docs/design/state-movement.md#the-coordinators-side.
Paper: Flux (Shah et al. 2004), sections 3.5, 5.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from rekindle.coordinator.checkpoints.retention import Progress as RetentionProgress
from rekindle.coordinator.model import PollNow, ReportMovementPhase, partition_of
from rekindle.coordinator.movement.choice import choose_donor, usable_donors, waits_for_inputs
from rekindle.coordinator.movement.phases import MovementEvent, MovementPhase
from rekindle.coordinator.movement.session import Movement, MovementLimits, has_left
from rekindle.coordinator.movement.views import ReplicaView, ReplicaViews
from rekindle.exchange.state_mover.messages import Directive, Replica, Session, SessionVersion
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot

_IN_SESSION = (
    MovementPhase.QUEUED,
    MovementPhase.HOLDING,
    MovementPhase.MOVING,
    MovementPhase.ABANDONING,
)


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicasObserved:
    """All replicas that may be running. Not before all that were ready have responded, or the
    coordinator no longer waits for them."""

    views: ReplicaViews


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


MovementCoreEvent = ReplicasObserved | TimePassed


MovementEffect = PollNow | ReportMovementPhase


class MovementCore:
    """All state movements of one topology. `fence`: of this coordinator."""

    def __init__(
        self, fence: int, limits: MovementLimits | None = None, last_session_number: int = 0
    ) -> None:
        """`last_session_number`: not below those of sessions that an earlier process of this
        coordinator, which had the same fence, has begun."""
        self._fence = fence
        self._limits = limits or MovementLimits()
        self._last_session_number = last_session_number
        self._views = ReplicaViews()
        self._movements: dict[Replica, Movement] = {}
        self._failed_attempts: dict[Slot, int] = {}  # of boots that ended before they were Live
        self._directives: dict[Replica, Directive] = {}

    def step(self, event: MovementCoreEvent, now: float) -> list[MovementEffect]:
        """Raises InvalidTransition."""
        match event:
            case ReplicasObserved(views):
                self._views = views
                self._note_numbers()
            case TimePassed():
                pass
            case _:
                assert_never(event)
        before = {r: m.phase for r, m in self._movements.items() if m.attempts}
        self._update(now)
        effects = [*self._phase_changes(before)]
        directives = self._make_directives()
        changed = {r for r in directives if directives[r] != self._directives.get(r, Directive())}
        self._directives = directives
        return [*effects, *(PollNow(r.slot) for r in sorted(changed, key=lambda r: r.slot.key))]

    # -- read when a poll is made, and for floors and manifests ------------------------------------

    def directive_for(self, replica: Replica) -> Directive:
        """The directive of a replica's next poll; may be empty."""
        return self._directives.get(replica, Directive())

    def with_holds(self, progress: RetentionProgress) -> RetentionProgress:
        """The progress from which floors and manifests are computed, with the holds of sessions: a
        newcomer counts as if it had the position that it may start from, and as unknown while that
        is not known."""
        if not self._movements and not any(view.holds for view in self._views):
            return progress
        positions = {p: [*at] for p, at in progress.positions.items()}
        for view in self._views:
            for hold in view.holds:
                if self._is_needed(hold.session):
                    positions.setdefault(partition_of(hold.session.slot), []).append(hold.base - 1)
        for movement in self._movements.values():
            if movement.phase.holds and movement.needed is not None:
                positions.setdefault(movement.partition, []).append(movement.needed - 1)
        unknown = {
            m.partition for m in self._movements.values() if m.phase.holds and m.needed is None
        }
        return replace(
            progress,
            positions={p: tuple(at) for p, at in positions.items()},
            unknown=progress.unknown | unknown,
        )

    def phase_of(self, replica: Replica) -> MovementPhase | None:
        """None if the replica has had state since this coordinator first observed it."""
        movement = self._movements.get(replica)
        return movement.phase if movement is not None else None

    @property
    def active(self) -> bool:
        """Whether a newcomer is queued or in a session."""
        return any(m.phase in _IN_SESSION for m in self._movements.values())

    def may_restore(self, replica: Replica, boot: str) -> bool | None:
        """Whether this boot of a newcomer may get a restore point; None if it is not known."""
        movement = self._movements.get(replica)
        if movement is None or movement.boot != boot:
            return None
        return movement.phase is MovementPhase.RESTORING

    # -- update from what replicas report ----------------------------------------------------------

    def _update(self, now: float) -> None:
        self._end_gone()
        for view in self._views:
            if view.boot is not None and view.is_newcomer and self._views.is_current(view):
                attempts = self._failed_attempts.get(view.slot, 0)
                # Not below the versions of all sessions that other coordinators, or an earlier
                # process of this one, may have begun for it.
                earlier = SessionVersion(self._fence, self._last_session_number)
                new = Movement(view.replica, view.boot, now, abandoned=earlier, attempts=attempts)
                self._movements.setdefault(view.replica, new)
        for movement, view in self._with_views():
            self._update_movement(movement, view, now)
        self._begin_sessions(now)

    def _note_numbers(self) -> None:
        """They begin with the time at which the process began. Numbers of an earlier process of
        this coordinator are not used again, even if the clock was set back since then."""
        for view in self._views:
            sessions = [hold.session for hold in view.holds] + [*view.donates]
            versions = [session.version for session in sessions]
            if (report := view.newcomer) is not None:
                versions += [report.abandoned] if report.abandoned is not None else []
                versions += [report.progress.session.version] if report.progress is not None else []
            own = (version.number for version in versions if version.fence == self._fence)
            self._last_session_number = max(self._last_session_number, *own, 0)

    def _end_gone(self) -> None:
        for movement in [*self._movements.values()]:
            view = self._views.get(movement.replica)
            other_boot = view is not None and view.boot not in (None, movement.boot)
            if view is None or other_boot or not self._views.is_current(view):
                if not movement.was_live and movement.attempts:
                    self._failed_attempts[movement.replica.slot] = movement.attempts
                movement.machine.step(MovementEvent.ENDED)
                del self._movements[movement.replica]

    def _with_views(self) -> Iterator[tuple[Movement, ReplicaView]]:
        """Movements and the views of their newcomers, ordered by partition, sources first."""
        order = {partition: at for at, partition in enumerate(self._views.inputs)}
        movements = sorted(
            self._movements.values(),
            key=lambda m: (order.get(m.partition, len(order)), m.replica.slot.key),
        )
        for movement in movements:
            view = self._views.get(movement.replica)
            if view is not None and view.boot is not None:
                yield movement, view

    def _update_movement(self, movement: Movement, view: ReplicaView, now: float) -> None:
        has_started = movement.phase in (MovementPhase.STARTED, MovementPhase.REDUNDANT)
        if not has_started and view.restored_from is not None:
            movement.machine.step(MovementEvent.STARTED)
            has_started = True
        if has_started:
            is_live = view.phase is TaskPhase.LIVE
            if is_live and movement.phase is MovementPhase.STARTED:
                movement.machine.step(MovementEvent.CAUGHT_UP)
                movement.was_live = True
                self._failed_attempts.pop(movement.replica.slot, None)
            elif not is_live and movement.phase is MovementPhase.REDUNDANT:
                movement.machine.step(MovementEvent.FELL_BEHIND)
            return
        if movement.phase is MovementPhase.QUEUED:
            self._adopt(movement, view, now)
        if movement.phase is MovementPhase.RESTORING:
            _abandon_late_order(movement, view)
        if movement.phase is MovementPhase.HOLDING:
            self._confirm(movement, now)
        if movement.phase in (MovementPhase.HOLDING, MovementPhase.MOVING):
            reason = movement.why_give_up(view, self._views, self._limits, now)
            if reason is not None:
                movement.give_up(reason)
        if movement.phase is MovementPhase.ABANDONING:
            assert movement.session is not None
            if has_left(view, movement.session):
                movement.machine.step(MovementEvent.LEFT)

    def _adopt(self, movement: Movement, view: ReplicaView, now: float) -> None:
        """Continue the session that the newcomer reports, if it may still start from it."""
        report = view.newcomer
        if report is None or report.progress is None or report.progress.phase.over:
            return
        if has_left(view, report.progress.session):
            return
        movement.abandoned = report.abandoned
        movement.adopt(report.progress, self._views.get(report.progress.donor), now)

    def _confirm(self, movement: Movement, now: float) -> None:
        """Confirm the holds if all upstream replicas have them, at least one of each input."""
        upstream = self._views.upstream(movement.partition)
        if not all(upstream):
            return
        bases: list[int] = []
        for view in (view for views in upstream for view in views):
            base = next((h.base for h in view.holds if h.session == movement.session), None)
            if base is None:
                return
            bases.append(base)
        movement.confirmed(max(bases, default=0), now)

    # -- beginning sessions ------------------------------------------------------------------------

    def _begin_sessions(self, now: float) -> None:
        for movement, view in self._with_views():
            if movement.phase is not MovementPhase.QUEUED:
                continue
            donors = usable_donors(view, self._views, movement.failed)
            if now - movement.known_since >= self._limits.suspected_donor_s:
                donors = [donor for donor in donors if not donor.suspected]
            exhausted = movement.attempts >= self._limits.attempts or not donors
            if exhausted or now - movement.known_since >= self._limits.wait_s:
                movement.machine.step(MovementEvent.EXHAUSTED)
                continue
            in_session = {m.partition for m in self._movements.values() if m.phase in _IN_SESSION}
            if waits_for_inputs(movement.partition, self._views, in_session):
                continue
            busy = Counter(m.donor for m in self._movements.values() if m.phase.holds and m.donor)
            donor = choose_donor(donors, busy, self._limits.per_donor, movement.failed)
            if donor is not None:
                self._last_session_number += 1
                movement.begin(donor, SessionVersion(self._fence, self._last_session_number), now)

    # -- directives --------------------------------------------------------------------------------

    def _make_directives(self) -> dict[Replica, Directive]:
        """Newcomers get orders; upstream replicas register holds; they and donors release sessions
        that are not needed."""
        found: dict[Replica, Directive] = {}
        for movement in self._movements.values():
            if movement.phase in (MovementPhase.STARTED, MovementPhase.REDUNDANT):
                continue
            restores = movement.phase is MovementPhase.RESTORING
            abandoned = None if movement.order is not None else movement.abandoned
            found[movement.replica] = Directive(
                order=movement.order, abandoned=abandoned, may_restore=restores
            )
        register: dict[Replica, list[Session]] = {}
        for movement in self._movements.values():
            if movement.phase.holds and movement.session is not None:
                for view in (
                    v for views in self._views.upstream(movement.partition) for v in views
                ):
                    register.setdefault(view.replica, []).append(movement.session)
        for view in self._views:
            known = [hold.session for hold in view.holds] + [*view.donates]
            release = tuple(s for s in dict.fromkeys(known) if not self._is_needed(s))
            registered = tuple(register.get(view.replica, ()))
            if registered or release:
                mine = found.get(view.replica, Directive())
                found[view.replica] = replace(mine, register=registered, release=release)
        return found

    def _is_needed(self, session: Session) -> bool:
        """Whether the newcomer of a session may still start from it, as far as is known."""
        view = self._views.get(Replica(session.slot, session.incarnation))
        if view is None or not self._views.is_current(view):
            return False
        movement = self._movements.get(view.replica)
        if movement is not None and movement.session == session:
            return movement.phase.holds
        return view.boot is None or not has_left(view, session)

    def _phase_changes(
        self, before: Mapping[Replica, MovementPhase]
    ) -> Iterator[ReportMovementPhase]:
        """Phase changes of newcomers that have, or had, a session."""
        for replica, movement in self._movements.items():
            if movement.attempts and before.get(replica) is not movement.phase:
                yield _report_phase(replica, movement.phase, movement.reason)
        for replica in before.keys() - self._movements.keys():
            yield _report_phase(replica, MovementPhase.GONE)


def _abandon_late_order(movement: Movement, view: ReplicaView) -> None:
    """An order of an earlier process may arrive after the first poll of this one: the newcomer must
    leave that session, too, before it may restore from a checkpoint."""
    progress = view.newcomer.progress if view.newcomer is not None else None
    if progress is not None and movement.abandoned is not None:
        movement.abandoned = max(movement.abandoned, progress.session.version)


def _report_phase(replica: Replica, phase: MovementPhase, reason: str = "") -> ReportMovementPhase:
    return ReportMovementPhase(replica.slot, replica.incarnation, phase, reason)
