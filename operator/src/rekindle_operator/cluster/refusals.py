"""Pods that the API server refused to create (a quota, a policy). Pure.

A refused pod was never made, so the incarnation that was reserved for it is still to be had: the
slot does not take another one with each try. Forgotten with the process, which costs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle_operator.cluster.model import Refusal, SlotRef

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Refusals:
    by_ref: Mapping[SlotRef, Refusal]

    def with_one(self, ref: SlotRef, message: str, now: float, lost_at: float | None) -> Refusals:
        """Each further one of the same incarnation doubles the wait."""
        known = self.by_ref.get(ref)
        tries = known.tries + 1 if known is not None else 1
        wait_s = min(_FIRST_WAIT_S * 2 ** min(tries - 1, 10), _LONGEST_WAIT_S)
        fresh = Refusal(message, tries, now + wait_s, lost_at)
        return Refusals({**self.without(ref).by_ref, ref: fresh})

    def without(self, ref: SlotRef) -> Refusals:
        """Whatever is known of the slot, by any incarnation."""
        slot = ref.topology_uid, ref.slot
        return Refusals({r: x for r, x in self.by_ref.items() if (r.topology_uid, r.slot) != slot})

    def without_topology(self, uid: str) -> Refusals:
        return Refusals({r: x for r, x in self.by_ref.items() if r.topology_uid != uid})
