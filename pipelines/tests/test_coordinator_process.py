"""The coordinator's process with simulated tasks and a fake API server, both behind real sockets.

What needs the real API server (the CRD, RBAC, managed fields) is in e2e.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from coordinator_process import UID, all_live, problems, running, until

from rekindle import names
from rekindle.coordinator.shell.process import FENCED

pytestmark = pytest.mark.process


def test_a_frozen_task_is_suspected_in_time_and_delays_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            slot = next(s for s in coordinator.fleet.tasks if s.replica == 1)
            coordinator.fleet.tasks[slot].frozen = True
            began = time.monotonic()
            longest = 0.0
            while not coordinator.row(slot).get("suspected"):
                assert time.monotonic() - began < 2.0
                others = [at for s, at in coordinator.fleet.polled_at.items() if s != slot]
                longest = max(longest, time.monotonic() - min(others))
                await asyncio.sleep(0.02)
            print(f"in the status after {time.monotonic() - began:.2f} s; others {longest:.2f} s")
            assert longest < 1.0
            coordinator.fleet.tasks[slot].frozen = False
            await until(lambda: coordinator.row(slot)["suspected"] is False)

    asyncio.run(scenario())


def test_the_watch_survives_expired_versions_and_disconnects(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            slot = next(iter(coordinator.fleet.tasks))

            def has_listed_since(before: int) -> bool:
                return coordinator.api.lists > before

            def has_incarnation(incarnation: int) -> bool:
                return bool(coordinator.row(slot).get("incarnation") == incarnation)

            for incarnation, too_old in ((7, True), (8, False)):
                lists = coordinator.api.lists
                await until(lambda: coordinator.api.watches)
                coordinator.api.break_watches(too_old)
                if too_old:
                    await until(partial(has_listed_since, lists))
                await until(lambda: coordinator.api.watches)
                coordinator.api.add_pod(f"new-{incarnation}", slot, incarnation, "127.9.9.9")
                await until(partial(has_incarnation, incarnation))
                assert coordinator.api.lists == lists + too_old

    asyncio.run(scenario())


def test_pods_of_an_older_topology_are_ignored(
    tmp_path: Path,
) -> None:
    """Such a pod ends within its grace period; its incarnation may be higher than all current
    ones."""

    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            slot, task = next(iter(coordinator.fleet.tasks.items()))
            await until(lambda: coordinator.api.watches)
            coordinator.api.add_pod("ending", slot, 99, "127.9.9.9", owner="of the topology before")
            other = next(s for s in coordinator.fleet.tasks if s != slot)
            coordinator.api.add_pod("next", other, 7, "127.9.9.9")
            await until(lambda: coordinator.row(other).get("incarnation") == 7)
            assert coordinator.row(slot)["incarnation"] == task.incarnation

    asyncio.run(scenario())


def test_the_status_is_applied_to_the_uid_and_by_its_own_manager(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            query, body = coordinator.api.applied[-1]
            assert query == {"fieldManager": "rekindle-coordinator", "force": "true"}
            assert body["metadata"] == {"name": "flights", "namespace": "n", "uid": UID}
            assert body["status"].keys() == {"dataPlane"}
            assert coordinator.api.lease is not None
            assert coordinator.api.lease["spec"]["holderIdentity"] == "1"

    asyncio.run(scenario())


def test_the_lease_names_the_valid_report(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)

            def named() -> str:
                meta = (coordinator.api.lease or {}).get("metadata", {})
                return str(meta.get("annotations", {}).get(names.ANNOTATION_REPORT))

            def written() -> str:
                return str(coordinator.api.topology["status"]["dataPlane"]["report"])

            await until(lambda: named() == written())
            coordinator.api.refuses_status = True
            await until(lambda: named() == "none")
            coordinator.api.refuses_status = False
            await until(lambda: named() == written())

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["uid", "fence"])
def test_a_replaced_coordinator_exits_with_code_3(tmp_path: Path, change: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            if change == "uid":
                coordinator.api.topology["metadata"]["uid"] = "another"
            else:
                coordinator.api.topology["status"]["dataPlane"]["fence"] = 9
            assert await asyncio.wait_for(coordinator.ended, 10) == FENCED

    asyncio.run(scenario())


def test_a_task_that_refuses_the_fence_ends_the_coordinator(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            next(iter(coordinator.fleet.tasks.values())).fence = 99
            assert await asyncio.wait_for(coordinator.ended, 5) == FENCED

    asyncio.run(scenario())


def test_no_store_is_created_in_the_place_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorded = {"dataPlane": {"fence": 1, "store": "away"}}
        async with running(tmp_path / "new", incarnation=2, status=recorded) as coordinator:
            await until(lambda: "has used store" in problems(coordinator))
            assert coordinator.api.topology["status"]["dataPlane"]["store"] == "away"
            assert {t.phase for t in coordinator.fleet.tasks.values()} == {"Waiting"}

    asyncio.run(scenario())


def test_the_report_names_the_checkpoint_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            found = json.loads((tmp_path / "_rekindle_store.json").read_text())
            assert coordinator.api.topology["status"]["dataPlane"]["store"] == found["store"]

    asyncio.run(scenario())


def test_a_refused_token_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, token="of another") as coordinator:
            await until(lambda: coordinator.api.applied)
            await until(lambda: "HTTP 401" in problems(coordinator))
            assert not any(task.polls for task in coordinator.fleet.tasks.values())
            assert not coordinator.ended.done()

    asyncio.run(scenario())


def test_probes_and_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)

            def has_committed() -> bool:
                newest = coordinator.process.core.committer.own_manifest
                return newest is not None and newest.epoch >= 4

            await until(has_committed)
            async with aiohttp.ClientSession(f"http://127.{coordinator.net}.251:8080") as session:
                for path in ("/livez", "/startupz", "/readyz"):
                    assert (await session.get(path)).status == 200
                text = await (await session.get("/metrics")).text()
            for name in ("heartbeat_age_seconds", "suspected", "checkpoint_epoch", "disputes"):
                assert f"rekindle_coordinator_{name}" in text

    asyncio.run(scenario())


def test_a_broken_generation_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as coordinator:
            await all_live(coordinator)
            text = {"name": "flights", "uid": UID, "generation": 2, "spec": {"sources": []}}
            data = {"topology.json": json.dumps(text)}
            meta = {"name": "flights-g2", "resourceVersion": "2"}
            coordinator.api.config_map = {"metadata": meta, "data": data}
            await until(lambda: "checkpoint" in problems(coordinator))
            coordinator.api.config_map = {}
            await until(lambda: "no ConfigMap" in problems(coordinator))

    asyncio.run(scenario())
