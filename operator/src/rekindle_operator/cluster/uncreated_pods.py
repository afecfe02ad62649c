"""Pods that the API server refused to create (a quota, a policy), or may not have created. Pure.

The incarnation that was reserved for such a pod is used again for the next try. That is safe if it
was not created: and if it was after all, the next try fails with a conflict, since pod names are
unique, for as long as it exists. It may have been deleted since then. A task's pod has run only if
this process has seen it, as it has a gate to be opened; what was seen is not remembered here. A
coordinator's pod has none: without a response to its creation, the next try has another
incarnation. All this is remembered while this process leads, since another leader may create the
pod; forgetting it costs one incarnation.

Design: docs/design/recovery.md#replacement.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from rekindle.backoff import BackoffPolicy
from rekindle_operator.cluster.model import IncarnationRef, UncreatedPod

_BACKOFF = BackoffPolicy(first_s=1.0, longest_s=30.0)
_NOT_TRIED = UncreatedPod("no response yet", failures=0, retry_at=0.0, predecessor_lost_at=None)


@dataclass(frozen=True, slots=True)
class UncreatedPods:
    by_ref: Mapping[IncarnationRef, UncreatedPod]

    def with_failed_create(
        self,
        ref: IncarnationRef,
        message: str,
        now: float,
        predecessor_lost_at: float | None,
        *,
        may_exist: bool = False,
        over_quota: bool = False,
    ) -> UncreatedPods:
        """Each further failure doubles the wait. `may_exist`: it was no refusal. `over_quota`: it
        was one because a quota is full."""
        known = self.by_ref.get(ref, _NOT_TRIED)
        failures = known.failures + 1
        since = now if known.over_quota_since is None else known.over_quota_since
        fresh = UncreatedPod(
            message,
            failures,
            retry_at=now + _BACKOFF.wait_s(failures),
            predecessor_lost_at=predecessor_lost_at,
            failed_at=now,
            over_quota_since=since if over_quota else None,
            may_exist=may_exist,
        )
        return UncreatedPods({**self.without_slot(ref).by_ref, ref: fresh})

    def with_create_attempt(
        self, ref: IncarnationRef, now: float, predecessor_lost_at: float | None
    ) -> UncreatedPods:
        """A request was sent; its result is not known. It may be sent again at once. What failed
        while the predecessor worked does not count once it is lost."""
        before = (x for r, x in self.by_ref.items() if x.may_exist and r.is_same_slot(ref))
        known = self.by_ref.get(ref) or next(before, None)
        if known is None or known.is_abandoned(now) or known.is_before_loss(predecessor_lost_at):
            known = _NOT_TRIED
        fresh = replace(
            known, retry_at=now, predecessor_lost_at=predecessor_lost_at, may_exist=False
        )
        return UncreatedPods({**self.without_slot(ref).by_ref, ref: fresh})

    def without_created(self, created: Container[IncarnationRef]) -> UncreatedPods:
        """Without those whose pod exists: its incarnation is used."""
        return UncreatedPods({ref: x for ref, x in self.by_ref.items() if ref not in created})

    def without_slot(self, ref: IncarnationRef) -> UncreatedPods:
        """Without the slot, whatever the incarnation."""
        return UncreatedPods({r: x for r, x in self.by_ref.items() if not r.is_same_slot(ref)})

    def without_topology(self, uid: str) -> UncreatedPods:
        return UncreatedPods({r: x for r, x in self.by_ref.items() if r.topology_uid != uid})
