"""A coordinator's Lease: a renewal that is lost does not cost the coordinator its place. Its
reports: however often there is a new one, the operator has time to write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.objects import lease
from rekindle.coordinator.shell.reporting import LeaseKeeper, StatusWriter
from rekindle.coordinator.shell.settings import Settings
from rekindle.report import Report

SETTINGS = Settings("t", "ns", "u", incarnation=3, bind="127.0.0.1:0")
SHORT = replace(SETTINGS, lease_renew_s=0.01, lease_timeout_s=0.05)


class LosesFirst:
    """The API server never replies to the first renewal."""

    def __init__(self) -> None:
        self.renewals = 0

    async def get(self, path: str) -> dict[str, Any]:
        now = "2026-01-01T00:00:00.000000Z"
        return lease("ns", "t", "u", incarnation=3, duration_s=6, now=now, report=None)

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.renewals += 1
        if self.renewals == 1:
            await asyncio.Event().wait()
        return body


def keeper_of(
    api: LosesFirst, settings: Settings, knows_generation: Callable[[], bool]
) -> LeaseKeeper:
    return LeaseKeeper(
        cast(KubeApi, api),
        settings,
        feed=lambda event: None,
        valid_report_number=lambda: 1,
        suspecting=lambda: False,
        knows_generation=knows_generation,
    )


class RecordsStatus:
    """An API server that records the head epoch of each status that is written."""

    def __init__(self) -> None:
        self.written: list[int] = []

    async def get(self, path: str) -> dict[str, Any]:
        return {"metadata": {"uid": "u"}}

    async def apply(self, path: str, body: dict[str, Any], manager: str) -> None:
        self.written.append(body["status"]["dataPlane"]["headEpoch"])


def test_there_is_a_pause_between_reports_and_the_newest_is_written() -> None:
    api = RecordsStatus()
    writer = StatusWriter(
        cast(KubeApi, api), replace(SETTINGS, report_pause_s=0.15), lambda event: None
    )

    async def report_often() -> None:
        runs = asyncio.create_task(writer.run())
        for epoch in range(20):
            report = Report(3, {}, {}, (), (), (), (), head_epoch=epoch)  # of fence 3, empty
            writer.offer(report)
            await asyncio.sleep(0.02)
        async with asyncio.timeout(10.0):
            while api.written[-1:] != [19]:
                await asyncio.sleep(0.02)
        runs.cancel()

    began = time.monotonic()
    asyncio.run(report_often())
    assert api.written[0] == 0, "at once"
    assert len(api.written) <= 2 + (time.monotonic() - began) / 0.15


def test_a_lost_renewal_is_followed_by_another() -> None:
    api = LosesFirst()
    keeper = keeper_of(api, SHORT, knows_generation=lambda: True)

    async def renewed() -> None:
        runs = asyncio.create_task(keeper.run())
        async with asyncio.timeout(5.0):
            while api.renewals < 2:
                await asyncio.sleep(0.01)
        runs.cancel()

    asyncio.run(renewed())


@pytest.mark.parametrize(("waits_s", "taken"), [(60.0, False), (0.05, True)])
def test_a_lease_is_left_to_a_predecessor_but_not_for_long(waits_s: float, taken: bool) -> None:
    api = LosesFirst()
    keeper = keeper_of(api, replace(SHORT, lease_wait_s=waits_s), knows_generation=lambda: False)

    async def run_for_a_while() -> None:
        runs = asyncio.create_task(keeper.run())
        until = time.monotonic() + (5.0 if taken else 0.2)
        while time.monotonic() < until and not api.renewals:
            await asyncio.sleep(0.01)
        runs.cancel()

    asyncio.run(run_for_a_while())
    assert bool(api.renewals) is taken


def test_a_second_renewal_fits_before_the_coordinator_is_replaced() -> None:
    lost_after_s = SETTINGS.lease_renew_s + SETTINGS.lease_timeout_s
    assert lost_after_s + SETTINGS.lease_renew_s < SETTINGS.lease_duration_s
