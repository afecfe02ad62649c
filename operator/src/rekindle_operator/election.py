"""Leader election by one Lease, without I/O and clocks (docs/decisions/0030). Pure.

At any moment at most one candidate leads, whatever the clocks say and however long a process was
paused, as long as all clocks run at about the same rate:

- A leader leads for `act_s` from the moment at which its last successful renewal *began*.
- Another candidate writes its name only after it has itself seen the same version of the Lease for
  `lease_s`, which is longer, and on the condition that the version is still the same.
- A Lease that was deleted says nothing of who leads. Whoever makes a new one leads only by a
  renewal that begins `lease_s` after it first knew of it: by then everyone has ceased whose last
  renewal was of an earlier one.

A read that is slow or fails says nothing about the leader: the time that it took does not count as
silence. So an API server that is slow or away makes nobody a leader, and the old one goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

_LONGEST_LEASE_S = 60.0  # whatever an edited Lease claims


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    lease_s: int = 2  # silence after which another may lead; the API knows whole seconds only
    act_s: float = 1.6  # shorter than `lease_s` by what a call to the API server may take
    renew_s: float = 0.4
    retry_s: float = 0.25
    slow_call_s: float = 0.5  # a call that takes longer tells of the API server, not of the leader

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.act_s < self.lease_s:
            raise ValueError(
                f"leader election: renew ({self.renew_s} s) must be shorter than act "
                f"({self.act_s} s), and that shorter than lease ({self.lease_s} s)"
            )


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the Lease says. `process` tells two processes of one name apart; `version` is the
    object's resourceVersion, `uid` is the object's own. No `holder`: somebody who led by it gave it
    back in order."""

    holder: str
    process: str
    lease_s: float
    transitions: int
    version: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """When a call began and when it ended, by the clock of the candidate."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process. `term` counts the times that it became the leader: what was decided in one term
    is not done in another."""

    identity: str
    process: str
    timing: ElectionTiming
    seen: LeaseRecord | None = None
    absent: bool = False  # the last read found no Lease
    known_uid: str | None = None  # of the Lease that it saw last
    known_since: float = -inf
    led_uid: str | None = None  # by which it led last
    unchanged_s: float = 0.0
    last_read_ended: float | None = None
    renewed_at: float | None = None  # when the last write began by which it leads
    term: int = 0

    def leads(self, now: float) -> bool:
        return self.renewed_at is not None and now - self.renewed_at < self.timing.act_s

    @property
    def holds(self) -> bool:
        """The Lease bears its name, as far as it knows; it may be too old to act on."""
        return self.seen is not None and self._is_mine(self.seen)

    @property
    def has_led(self) -> bool:
        """By the Lease that it holds."""
        return self.holds and self.led_uid == self.known_uid

    def wants_to_write(self) -> bool:
        """Whether the next call is a write: to renew, or to take a Lease that is free."""
        return self.holds or self.absent or self._is_free()

    def _is_free(self) -> bool:
        if self.seen is None:
            return False
        if not self.seen.holder:
            return True
        claimed_s = min(self.seen.lease_s, _LONGEST_LEASE_S)  # by a holder of other settings
        return self.unchanged_s >= max(self.timing.lease_s, claimed_s)

    def record_to_write(self) -> LeaseRecord:
        """`version`: the one that must still stand; empty: the Lease is to be created."""
        found = self.seen
        changes = found.transitions + (not self.holds) if found is not None else 0
        version = found.version if found is not None else ""
        return LeaseRecord(self.identity, self.process, self.timing.lease_s, changes, version)

    def pause_s(self) -> float:
        """Until the next call."""
        return self.timing.renew_s if self.holds else self.timing.retry_s

    # --- what came of a call ----------------------------------------------------

    def after_read(self, record: LeaseRecord | None, span: Span) -> Candidate:
        """`record` None: there is no Lease."""
        if record is None:
            return replace(
                self, seen=None, absent=True, unchanged_s=0.0, last_read_ended=span.ended
            )
        known_since = span.ended if record.uid != self.known_uid else self.known_since
        if not record.holder:
            known_since = -inf  # somebody has led by it, and ceased
        same = self.seen is not None and self.seen.version == record.version
        unchanged_s = 0.0
        if same and self.last_read_ended is not None:
            quick = span.ended - span.began <= self.timing.slow_call_s
            until = span.ended if quick else span.began
            # A gap longer than the pause was this process's own: it watched nobody then.
            watched_s = min(until - self.last_read_ended, self.pause_s() + self.timing.slow_call_s)
            unchanged_s = self.unchanged_s + max(0.0, watched_s)
        kept = replace(
            self,
            seen=record,
            absent=False,
            known_uid=record.uid,
            known_since=known_since,
            unchanged_s=unchanged_s,
            last_read_ended=span.ended,
        )
        return kept if self._is_mine(record) else replace(kept, renewed_at=None)

    def after_write(self, written: LeaseRecord, span: Span) -> Candidate:
        """The API server has stored it. `written` has the new version."""
        kept = replace(
            self, seen=written, absent=False, unchanged_s=0.0, last_read_ended=span.ended
        )
        if written.uid != self.known_uid:
            return replace(kept, known_uid=written.uid, known_since=span.ended)
        if span.began - self.known_since < self.timing.lease_s:
            return kept
        began_term = self.renewed_at is None or self.led_uid != written.uid
        return replace(
            kept, renewed_at=span.began, led_uid=written.uid, term=self.term + began_term
        )

    def after_conflict(self) -> Candidate:
        """The Lease is not what it was thought to be (also if an own write was stored and its
        answer lost): read it before anything else. What was renewed before counts on."""
        return replace(self, seen=None, absent=False, unchanged_s=0.0, last_read_ended=None)

    def after_failure(self, span: Span) -> Candidate:
        """Nobody answered: how long the Lease has stood still is not known for this time. A holder
        does not know either whether its write was stored; its old renewal counts on."""
        return replace(self, last_read_ended=span.ended)

    def _is_mine(self, record: LeaseRecord) -> bool:
        return (record.holder, record.process) == (self.identity, self.process)
