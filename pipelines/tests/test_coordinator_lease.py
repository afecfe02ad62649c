"""A coordinator's Lease: a renewal that is lost does not cost the coordinator its place."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.objects import lease
from rekindle.coordinator.shell.reporting import LeaseKeeper
from rekindle.coordinator.shell.settings import Settings

SETTINGS = Settings("t", "ns", "u", 3, "127.0.0.1:0")
SHORT = Settings("t", "ns", "u", 3, "127.0.0.1:0", lease_renew_s=0.01, lease_timeout_s=0.05)


class LosesFirst:
    """The API server never replies to the first renewal."""

    def __init__(self) -> None:
        self.renewals = 0

    async def get(self, path: str) -> dict[str, Any]:
        return lease("ns", "t", "u", 3, 6, "2026-01-01T00:00:00.000000Z", None)

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.renewals += 1
        if self.renewals == 1:
            await asyncio.Event().wait()
        return body


def test_a_lost_renewal_is_followed_by_another() -> None:
    api = LosesFirst()
    keeper = LeaseKeeper(cast(KubeApi, api), SHORT, lambda event: None, lambda: 1, lambda: False)

    async def renewed() -> None:
        runs = asyncio.create_task(keeper.run())
        async with asyncio.timeout(5.0):
            while api.renewals < 2:
                await asyncio.sleep(0.01)
        runs.cancel()

    asyncio.run(renewed())


def test_there_is_time_for_another_before_the_coordinator_is_replaced() -> None:
    lost_after_s = SETTINGS.lease_renew_s + SETTINGS.lease_timeout_s
    assert lost_after_s + SETTINGS.lease_renew_s < SETTINGS.lease_duration_s
