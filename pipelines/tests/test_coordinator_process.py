"""The coordinator's process with fake tasks and a fake API server, both behind real sockets.

What only the real API server can say (the CRD, RBAC, managed fields) is in e2e.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import aiohttp
import pytest
from coordinator_process import UID, all_live, problems, running, until

from rekindle import names
from rekindle.coordinator.edge.process import FENCED

pytestmark = pytest.mark.process


def test_a_frozen_task_is_suspected_in_time_and_delays_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            slot = next(s for s in scene.fleet.tasks if s.replica == 1)
            scene.fleet.tasks[slot].frozen = True
            began = time.monotonic()
            longest = 0.0
            while not scene.row(slot).get("suspected"):
                assert time.monotonic() - began < 2.0
                others = [at for s, at in scene.fleet.heard_at.items() if s != slot]
                longest = max(longest, time.monotonic() - min(others))
                await asyncio.sleep(0.02)
            print(f"in the status after {time.monotonic() - began:.2f} s; others {longest:.2f} s")
            assert longest < 1.0
            scene.fleet.tasks[slot].frozen = False
            await until(lambda: scene.row(slot)["suspected"] is False)

    asyncio.run(scenario())


def test_the_watch_survives_a_version_that_is_too_old_and_a_broken_connection(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            slot = next(iter(scene.fleet.tasks))
            for incarnation, too_old in ((7, True), (8, False)):
                lists = scene.api.lists
                await until(lambda: scene.api.watches)
                scene.api.break_watches(too_old)
                if too_old:
                    await until(lambda before=lists: scene.api.lists > before)
                await until(lambda: scene.api.watches)
                scene.api.add_pod(f"new-{incarnation}", slot, incarnation, "127.9.9.9")
                await until(lambda i=incarnation: scene.row(slot).get("incarnation") == i)
                assert scene.api.lists == lists + too_old

    asyncio.run(scenario())


def test_a_pod_of_the_topology_that_had_the_name_before_is_not_taken_for_a_task(
    tmp_path: Path,
) -> None:
    """It ends within its grace, and its incarnation may be higher than any that there is now."""

    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            slot, task = next(iter(scene.fleet.tasks.items()))
            await until(lambda: scene.api.watches)
            scene.api.add_pod("ending", slot, 99, "127.9.9.9", owner="of the topology before")
            other = next(s for s in scene.fleet.tasks if s != slot)
            scene.api.add_pod("next", other, 7, "127.9.9.9")
            await until(lambda: scene.row(other).get("incarnation") == 7)
            assert scene.row(slot)["incarnation"] == task.incarnation

    asyncio.run(scenario())


def test_the_status_is_applied_to_the_uid_and_by_its_own_manager(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            query, body = scene.api.applied[-1]
            assert query == {"fieldManager": "rekindle-coordinator", "force": "true"}
            assert body["metadata"] == {"name": "flights", "namespace": "n", "uid": UID}
            assert body["status"].keys() == {"dataPlane"}
            assert scene.api.lease is not None
            assert scene.api.lease["spec"]["holderIdentity"] == "1"

    asyncio.run(scenario())


def test_the_lease_names_the_report_that_still_holds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)

            def named() -> str:
                meta = (scene.api.lease or {}).get("metadata", {})
                return str(meta.get("annotations", {}).get(names.ANNOTATION_REPORT))

            def written() -> str:
                return str(scene.api.topology["status"]["dataPlane"]["report"])

            await until(lambda: named() == written())
            scene.api.refuses_status = True
            await until(lambda: named() == "none")
            scene.api.refuses_status = False
            await until(lambda: named() == written())

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["uid", "fence"])
def test_a_coordinator_that_is_not_in_charge_ends_with_code_3(tmp_path: Path, change: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            if change == "uid":
                scene.api.topology["metadata"]["uid"] = "another"
            else:
                scene.api.topology["status"]["dataPlane"]["fence"] = 9
            assert await asyncio.wait_for(scene.ended, 10) == FENCED

    asyncio.run(scenario())


def test_a_task_that_refuses_the_fence_ends_the_coordinator(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            next(iter(scene.fleet.tasks.values())).fence = 99
            assert await asyncio.wait_for(scene.ended, 5) == FENCED

    asyncio.run(scenario())


def test_a_coordinator_makes_no_store_in_the_place_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorded = {"dataPlane": {"fence": 1, "store": "away"}}
        async with running(tmp_path / "new", incarnation=2, status=recorded) as scene:
            await until(lambda: "another store" in problems(scene))
            assert scene.api.topology["status"]["dataPlane"]["store"] == "away"
            assert {t.phase for t in scene.fleet.tasks.values()} == {"Waiting"}

    asyncio.run(scenario())


def test_the_status_says_which_store_the_topology_has_run_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            found = json.loads((tmp_path / "_rekindle_store.json").read_text())
            assert scene.api.topology["status"]["dataPlane"]["store"] == found["store"]

    asyncio.run(scenario())


def test_tasks_that_refuse_the_token_are_said_in_problems(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, token="of another") as scene:
            await until(lambda: scene.api.applied)
            await until(lambda: "HTTP 401" in problems(scene))
            assert not any(task.polls for task in scene.fleet.tasks.values())
            assert not scene.ended.done()

    asyncio.run(scenario())


def test_probes_and_metrics(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            await until(lambda: scene.process.core.committer.own_manifest.epoch >= 4)
            async with aiohttp.ClientSession(f"http://127.{scene.net}.251:8080") as session:
                for path in ("/livez", "/startupz", "/readyz"):
                    assert (await session.get(path)).status == 200
                text = await (await session.get("/metrics")).text()
            for name in ("heartbeat_age_seconds", "suspected", "checkpoint_epoch", "poll_seconds"):
                assert f"rekindle_coordinator_{name}" in text

    asyncio.run(scenario())


def test_a_broken_generation_is_said_in_the_status(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as scene:
            await all_live(scene)
            text = {"name": "flights", "uid": UID, "generation": 2, "spec": {"sources": []}}
            data = {"topology.json": json.dumps(text)}
            meta = {"name": "flights-g2", "resourceVersion": "2"}
            scene.api.config_map = {"metadata": meta, "data": data}
            await until(lambda: "checkpoint" in problems(scene))
            scene.api.config_map = {}
            await until(lambda: "no ConfigMap" in problems(scene))

    asyncio.run(scenario())
