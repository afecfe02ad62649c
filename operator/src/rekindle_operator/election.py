"""Leader election with one Lease (docs/decisions/0030). Pure: no I/O, no clocks.

At most one candidate leads at any moment, whatever clocks show and however long a process was
paused, if all clocks run at about the same rate:

- A leader leads for `renew_deadline_s` after its last successful renewal *began*.
- Another candidate takes the Lease only after it has itself seen the same version of it for
  `lease_s`, which is longer than `renew_deadline_s`, and only if the version is still the same.
- A deleted Lease proves nothing about the leader. A candidate that creates a new one leads only
  by a renewal that begins `lease_s` after it first saw the new Lease. By then, a leader by the
  deleted one has stopped.

A read that is slow or fails proves nothing about the leader, so its time does not count as silence:
while the API server is slow or unavailable, the leader does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

_LONGEST_LEASE_S = 60.0  # even if someone edits the Lease


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    lease_s: int = 2  # silence after which another may lead; whole seconds in the API
    renew_deadline_s: float = 1.6  # shorter than `lease_s` by the time of one call
    renew_s: float = 0.4
    retry_s: float = 0.25
    slow_call_s: float = 0.5  # a longer call is a sign of a slow API server, not of a lost leader

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.renew_deadline_s < self.lease_s:
            raise ValueError(
                f"leader election: renewSeconds ({self.renew_s}) must be less than "
                f"renewDeadlineSeconds ({self.renew_deadline_s}), and that less than leaseSeconds "
                f"({self.lease_s})"
            )


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Content of the Lease. `process` distinguishes two processes with one name. `version` is the
    object's resourceVersion. An empty `holder` means that the last leader released the Lease."""

    holder: str
    process: str
    lease_s: float
    transitions: int
    version: str
    uid: str = ""


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Begin and end of a call by the candidate's clock."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process. `term` counts how often it became the leader: actions that were decided in one
    term are not executed in another."""

    identity: str
    process: str
    timing: ElectionTiming
    seen: LeaseRecord | None = None
    lease_is_absent: bool = False  # as of the last read
    known_uid: str | None = None  # of the Lease that it read or wrote last
    known_since: float = -inf
    led_uid: str | None = None  # of the Lease by which it led last
    unchanged_s: float = 0.0  # of the Lease, as it was read; 0: it was renewed since the last read
    last_read_ended: float | None = None
    renewed_at: float | None = None  # begin of the last renewal by which it leads
    term: int = 0

    def leads(self, now: float) -> bool:
        return self.renewed_at is not None and now - self.renewed_at < self.timing.renew_deadline_s

    @property
    def is_holder(self) -> bool:
        """It is the holder in the Lease that it saw last; its renewal may be too old to act."""
        return self.seen is not None and self._is_mine(self.seen)

    @property
    def has_led_by_its_lease(self) -> bool:
        """It was the leader by the Lease that it holds."""
        return self.is_holder and self.led_uid == self.known_uid

    def wants_to_write(self) -> bool:
        """Whether the next call is a write: to renew the Lease, or to take a free one."""
        return self.is_holder or self.lease_is_absent or self._is_free()

    def _is_free(self) -> bool:
        if self.seen is None:
            return False
        if not self.seen.holder:
            return True
        claimed_s = min(self.seen.lease_s, _LONGEST_LEASE_S)  # by a holder with other settings
        return self.unchanged_s >= max(self.timing.lease_s, claimed_s)

    def record_to_write(self) -> LeaseRecord:
        """`version`: the version to be replaced; empty if the Lease is to be created."""
        found = self.seen
        changes = found.transitions + (not self.is_holder) if found is not None else 0
        version = found.version if found is not None else ""
        return LeaseRecord(self.identity, self.process, self.timing.lease_s, changes, version)

    def pause_s(self) -> float:
        """Until the next call."""
        return self.timing.renew_s if self.is_holder else self.timing.retry_s

    # --- results of calls -------------------------------------------------------

    def after_read(self, record: LeaseRecord | None, span: CallSpan) -> Candidate:
        """`record` is None if there is no Lease."""
        if record is None:
            return replace(
                self, seen=None, lease_is_absent=True, unchanged_s=0.0, last_read_ended=span.ended
            )
        known_since = span.ended if record.uid != self.known_uid else self.known_since
        if not record.holder:
            known_since = -inf  # it was released: its leader has stopped
        same = self.seen is not None and self.seen.version == record.version
        unchanged_s = 0.0
        if same and self.last_read_ended is not None:
            quick = span.ended - span.began <= self.timing.slow_call_s
            until = span.ended if quick else span.began
            # In a gap longer than its own pause, this process did not watch the Lease.
            watched_s = min(until - self.last_read_ended, self.pause_s() + self.timing.slow_call_s)
            unchanged_s = self.unchanged_s + max(0.0, watched_s)
        kept = replace(
            self,
            seen=record,
            lease_is_absent=False,
            known_uid=record.uid,
            known_since=known_since,
            unchanged_s=unchanged_s,
            last_read_ended=span.ended,
        )
        return kept if self._is_mine(record) else replace(kept, renewed_at=None)

    def after_write(self, written: LeaseRecord, span: CallSpan) -> Candidate:
        """The API server has stored `written`, which has the new version."""
        kept = replace(
            self, seen=written, lease_is_absent=False, unchanged_s=0.0, last_read_ended=span.ended
        )
        if written.uid != self.known_uid:
            return replace(kept, known_uid=written.uid, known_since=span.ended)
        if span.began - self.known_since < self.timing.lease_s:
            return kept
        is_new_term = self.renewed_at is None or self.led_uid != written.uid
        return replace(
            kept, renewed_at=span.began, led_uid=written.uid, term=self.term + is_new_term
        )

    def after_conflict(self) -> Candidate:
        """The Lease has changed (perhaps by an own write whose response was lost): it must be read
        next. The earlier renewal still counts."""
        return replace(
            self, seen=None, lease_is_absent=False, unchanged_s=0.0, last_read_ended=None
        )

    def after_failure(self, span: CallSpan) -> Candidate:
        """No response: the time of the call does not count as silence. A holder does not know
        whether its write was stored; its earlier renewal still counts."""
        return replace(self, last_read_ended=span.ended)

    def _is_mine(self, record: LeaseRecord) -> bool:
        return (record.holder, record.process) == (self.identity, self.process)
