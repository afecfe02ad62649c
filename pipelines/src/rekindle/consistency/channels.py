"""What a task knows of each channel: what it has received, and what the upstream has. Pure.

Design: docs/design/consistency.md#channels.
Paper: DPC (Balazinska et al. 2005), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.streams.epochs import NO_EPOCH


@dataclass(slots=True)
class ChannelState:
    """The state of one channel. A channel has a stable subscription, which delivers stable epochs
    only, and sometimes a live one, which delivers the newest version of each epoch.

    `received`: the newest stable epoch of the stable subscription; `stable`, `tentative`: the
    newest ones that the upstream can deliver; `corrected_through`: of its newest REC_DONE;
    `failed`: an epoch had to be processed without it, and no batch of it has been in time since;
    `live_next`: the next epoch of the live subscription, None if there is none.
    """

    received: int
    stable: int
    tentative: int = NO_EPOCH
    corrected_through: int = NO_EPOCH
    failed: bool = False
    live_next: int | None = None

    @property
    def is_tentative(self) -> bool:
        """Whether the upstream has tentative epochs that are not corrected yet."""
        return self.tentative > self.stable

    def tentative_received(self, epoch: int) -> None:
        self.tentative = max(self.tentative, epoch)

    def undone(self, from_epoch: int) -> None:
        self.tentative = min(self.tentative, from_epoch - 1)

    def corrected(self, through: int) -> None:
        self.corrected_through = max(self.corrected_through, through)
        self.stable = max(self.stable, through)

    def reported(self, stable: int, tentative: int) -> None:
        """The upstream may be another replica than before, which has fewer epochs."""
        self.stable = max(self.received, stable)
        self.tentative = tentative

    def forget_reported(self) -> None:
        """The epochs that the upstream has reported did not arrive."""
        self.stable = self.received

    def is_corrected(self, through: int, next_epoch: int) -> bool:
        """Whether the upstream has all stable epochs through `through`, or has ended a correction
        that contains `next_epoch`, and still has all of it (the upstream may be another replica by
        now)."""
        return self.stable >= through or self.stable >= self.corrected_through >= next_epoch
