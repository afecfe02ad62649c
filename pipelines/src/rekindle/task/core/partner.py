"""Messages between the replicas of a partition before they stabilize; polls carry them. Pure.

A replica asks its partner to postpone its own stabilization and serve readers meanwhile, for a time
(the lease); a request with a lease of 0 ends that. The answer is a promise or a refusal.

Each poll response contains a task's newest request to its partner, and its newest answer; each poll
contains those of the partner. Both are repeated until they change, so requests are numbered: a
repeated request is not answered again, and an answer to an older request is ignored, since its
lease would be counted from the newer one.

Design: docs/design/consistency.md#one-partner-stabilizes-at-a-time.
Paper: DPC (Balazinska et al. 2005), section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencyEffect,
    EndPostponement,
    RequestPostponement,
)
from rekindle.protocol import Partner, Postponement, PostponementAnswer

PartnerEvent = Callable[[ConsistencyCore, float], list[ConsistencyEffect]]
"""A call of a method of the consistency manager, at a time."""


class PartnerMessages:
    """The messages of one task. `asks`: its newest request, `answer`: its newest answer, for its
    poll responses."""

    def __init__(self) -> None:
        self.asks: Postponement | None = None
        self.answer: PostponementAnswer | None = None
        self._partner: tuple[int, str] | None = None  # replica and boot
        self._last_partner: tuple[int, str] | None = None  # the same, also while it does not serve
        self._received: Postponement | None = None  # the newest request of `_last_partner`
        self._waits = False  # for the answer to `asks`

    @property
    def partner(self) -> tuple[int, str] | None:
        """Replica and boot of the partner; None if there is none that serves."""
        return self._partner

    def send(self, effect: RequestPostponement | EndPostponement | AnswerPartner) -> None:
        """Send a message with the next responses."""
        number = self.asks.number if self.asks is not None else 0
        match effect:
            case RequestPostponement(lease_s):
                self.asks = Postponement(number=number + 1, lease_s=lease_s)
                self._waits = True
            case EndPostponement():
                self.asks = Postponement(number=number + 1, lease_s=0.0)
                self._waits = False
            case AnswerPartner(promised):
                assert self._received is not None, "an answer follows a request"
                assert self._partner is not None, "of the partner"
                _, boot = self._partner
                number = self._received.number
                self.answer = PostponementAnswer(boot=boot, number=number, promised=promised)

    def receive(self, partner: Partner | None, boot: str) -> list[PartnerEvent]:
        """The partner and its messages in a poll; `boot`: of this task."""
        events: list[PartnerEvent] = []
        identity = None if partner is None else (partner.replica, partner.boot)
        if identity != self._partner:
            if self._partner is not None:
                events.append(lambda core, now: core.partner_changed(False, now))
            if identity is not None:
                events.append(lambda core, now: core.partner_changed(True, now))
            self._partner, self._waits = identity, False
            if identity is not None and identity != self._last_partner:
                self._last_partner, self._received, self.answer = identity, None, None
            if self.asks is not None:  # a promise of the previous partner does not count any more
                self.asks = Postponement(number=self.asks.number + 1, lease_s=0.0)
        if partner is None:
            return events
        asks, answer = partner.asks, partner.answer
        if asks is not None and asks != self._received:
            self._received = asks
            replica, lease_s = partner.replica, asks.lease_s
            if lease_s:
                events.append(lambda core, now: core.postponement_requested(replica, lease_s, now))
            else:
                events.append(lambda core, now: core.promise_ended(now))
        own = self.asks
        if (
            answer is not None
            and own is not None
            and self._waits
            and (answer.boot, answer.number) == (boot, own.number)
        ):
            self._waits = False
            if answer.promised:
                events.append(lambda core, now: core.partner_promised(own.lease_s, now))
            else:
                events.append(lambda core, now: core.partner_refused(now))
        return events
