"""What replicas of a partition say to each other before they stabilize, as the coordinator carries
it. Pure.

Each response to a poll says what a task asks of its partner, and its newest answer; each poll says
the partner's. Both are repeated until they change, so requests are numbered: one that is heard
again is not answered again, and an answer to an older request, whose lease would be counted from
the newer one, is ignored.

Design: docs/design/consistency.md#replicas.
Paper: DPC (Balazinska et al. 2005), section 3.4.
"""

from __future__ import annotations

from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencyInput,
    EndPostponement,
    PartnerChanged,
    PartnerPromised,
    PartnerRefused,
    PostponementRequested,
    PromiseEnded,
    RequestPostponement,
)
from rekindle.protocol import Partner, Postponement, PostponementAnswer


class PartnerMessages:
    """Of one task. `asks`, `answer`: for its responses."""

    def __init__(self) -> None:
        self.asks: Postponement | None = None
        self.answer: PostponementAnswer | None = None
        self._partner: tuple[int, str] | None = None  # replica and boot
        self._known: tuple[int, str] | None = None  # the newest one: it may be lost for a while
        self._heard: Postponement | None = None  # of it, that was answered
        self._waits = False  # for the answer to `asks`

    @property
    def partner(self) -> tuple[int, str] | None:
        """Replica and boot of the partner; None if there is none that serves."""
        return self._partner

    def said(self, effect: RequestPostponement | EndPostponement | AnswerPartner) -> None:
        number = self.asks.number if self.asks is not None else 0
        match effect:
            case RequestPostponement(lease_s):
                self.asks = Postponement(number=number + 1, lease_s=lease_s)
                self._waits = True
            case EndPostponement():
                self.asks = Postponement(number=number + 1, lease_s=0.0)
                self._waits = False
            case AnswerPartner(promised):
                assert self._heard is not None, "it was asked"
                assert self._partner is not None, "by its partner"
                _, boot = self._partner
                number = self._heard.number
                self.answer = PostponementAnswer(boot=boot, number=number, promised=promised)

    def heard(self, partner: Partner | None, boot: str) -> list[ConsistencyInput]:
        """What a poll says of the partner; `boot`: of this task."""
        events: list[ConsistencyInput] = []
        identity = None if partner is None else (partner.replica, partner.boot)
        if identity != self._partner:
            if self._partner is not None:
                events.append(PartnerChanged(False))
            if identity is not None:
                events.append(PartnerChanged(True))
            self._partner, self._waits = identity, False
            if identity is not None and identity != self._known:
                self._known, self._heard, self.answer = identity, None, None
            if self.asks is not None:  # another partner need not promise what the first one had
                self.asks = Postponement(number=self.asks.number + 1, lease_s=0.0)
        if partner is None:
            return events
        asks, answer = partner.asks, partner.answer
        if asks is not None and asks != self._heard:
            self._heard = asks
            asked = PostponementRequested(partner.replica, asks.lease_s)
            events.append(asked if asks.lease_s else PromiseEnded())
        own = self.asks
        if (
            answer is not None
            and own is not None
            and self._waits
            and (answer.boot, answer.number) == (boot, own.number)
        ):
            self._waits = False
            events.append(PartnerPromised(own.lease_s) if answer.promised else PartnerRefused())
        return events
