"""The coordinator's process with fake tasks and a fake API server, both behind real sockets.

What only the real API server can say (the CRD, RBAC, managed fields) is in e2e.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from test_coordinator_fleet import Fleet

from rekindle.coordinator.kube import KubeApi
from rekindle.coordinator.kube_access import Access, Token
from rekindle.coordinator.process import FENCED, Process
from rekindle.coordinator.settings import Settings, SettingsError, read_settings
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Slot

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).parents[2] / "examples/flights/topology.yaml"
UID = "0000-1111"
_nets = itertools.count(1)


class FakeApi:
    """Pods with a watch, ConfigMaps, one Lease, one topology."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.config_map: dict[str, Any] = {}
        self.lease: dict[str, Any] | None = None
        self.topology: dict[str, Any] = {"metadata": {"uid": UID}, "status": {}}
        self.applied: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.lists = 0
        self.watches: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.too_old = False
        self.refuses_status = False
        self._version = 1

    def add_pod(
        self, name: str, slot: Slot, incarnation: int, address: str, owner: str = UID
    ) -> None:
        labels = {
            "rekindle.dev/segment": slot.segment,
            "rekindle.dev/partition": str(slot.partition),
            "rekindle.dev/replica": str(slot.replica),
            "rekindle.dev/incarnation": str(incarnation),
        }
        self._version += 1
        meta = {
            "name": name,
            "labels": labels,
            "ownerReferences": [{"uid": owner}],
            "resourceVersion": str(self._version),
        }
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": address, "conditions": ready}
        self.pods[name] = {"metadata": meta, "status": status}
        for watch in self.watches:
            watch.put_nowait({"type": "ADDED", "object": self.pods[name]})

    def break_watches(self, too_old: bool) -> None:
        self.too_old = too_old
        for watch in self.watches:
            watch.put_nowait(None)

    async def list_pods(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        self.lists += 1
        self.too_old = False
        meta = {"resourceVersion": str(self._version)}
        return web.json_response({"metadata": meta, "items": list(self.pods.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if self.too_old:
            gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        seen = int(request.query["resourceVersion"])
        for pod in self.pods.values():
            if int(pod["metadata"]["resourceVersion"]) > seen:
                queue.put_nowait({"type": "ADDED", "object": pod})
        self.watches.append(queue)
        while (event := await queue.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        self.watches.remove(queue)
        return response

    async def list_config_maps(self, _: web.Request) -> web.Response:
        return web.json_response({"metadata": {}, "items": [c for c in [self.config_map] if c]})

    async def get_lease(self, _: web.Request) -> web.Response:
        return web.json_response(self.lease or {}, status=200 if self.lease else 404)

    async def put_lease(self, request: web.Request) -> web.Response:
        self.lease = await request.json()
        return web.json_response(self.lease)

    async def get_topology(self, _: web.Request) -> web.Response:
        return web.json_response(self.topology)

    async def apply_status(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuses_status:
            return web.json_response({"message": "a webhook is away"}, status=500)
        fence = self.topology["status"].get("dataPlane", {}).get("fence", 0)
        if body["status"]["dataPlane"]["fence"] < fence:
            return web.json_response({"message": "the fence never falls"}, status=422)
        self.applied.append((dict(request.query), body))
        self.topology["status"] = body["status"]
        return web.json_response(self.topology)

    def app(self) -> web.Application:
        app = web.Application()
        group = "/apis/rekindle.dev/v1alpha1/namespaces/n/streamtopologies/flights"
        leases = "/apis/coordination.k8s.io/v1/namespaces/n/leases"
        app.router.add_get("/api/v1/namespaces/n/pods", self.list_pods)
        app.router.add_get("/api/v1/namespaces/n/configmaps", self.list_config_maps)
        app.router.add_get(f"{leases}/flights-coordinator", self.get_lease)
        app.router.add_put(f"{leases}/flights-coordinator", self.put_lease)
        app.router.add_post(leases, self.put_lease)
        app.router.add_get(group, self.get_topology)
        app.router.add_patch(f"{group}/status", self.apply_status)
        return app


class Scene:
    def __init__(self, api: FakeApi, fleet: Fleet, process: Process, net: str) -> None:
        self.api, self.fleet, self.process, self.net = api, fleet, process, net
        self.ended: asyncio.Task[int] = asyncio.create_task(process.run())

    def row(self, slot: Slot) -> dict[str, Any]:
        rows = self.api.topology["status"].get("dataPlane", {}).get("tasks", [])
        return next((r for r in rows if r["slot"] == slot.key), {})


@asynccontextmanager
async def running(
    directory: Path,
    incarnation: int = 1,
    token: str | None = "of t",
    tasks_token: str = "of t",
    status: dict[str, Any] | None = None,
) -> AsyncIterator[Scene]:
    net = f"88.{next(_nets)}"
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["epochInterval"] = "200ms"
    manifest["spec"]["checkpoint"] = {
        "interval": "1s",
        "store": f"file://{directory}",
        "volume": "v",
    }
    name, spec = load_topology(manifest)
    api = FakeApi()
    api.topology["status"] = status or {}
    text = {"name": name, "uid": UID, "generation": 1, "spec": manifest["spec"]}
    meta = {"name": "flights-g1", "resourceVersion": "1"}
    api.config_map = {"metadata": meta, "data": {"topology.json": json.dumps(text)}}
    runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, f"127.{net}.250", 0)
    await site.start()
    port = runner.addresses[0][1]
    settings = Settings("flights", "n", UID, incarnation, f"127.{net}.251", token)
    kube = KubeApi(Access(f"http://127.{net}.250:{port}", None, Token(value="secret")))
    with Fleet(compile_topology(spec, name), net, directory, UID, tasks_token) as fleet:
        for slot, task in fleet.tasks.items():
            pod = f"flights-{slot.key.replace('/', '-')}-{task.incarnation}"
            api.add_pod(pod, slot, task.incarnation, fleet.addresses[slot])
        scene = Scene(api, fleet, Process(settings, kube), net)
        try:
            yield scene
        finally:
            scene.process.stop()
            await scene.ended
            api.break_watches(too_old=False)
            await runner.cleanup()


async def until(condition: Callable[[], Any], within_s: float = 15.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)
    return found


async def all_live(scene: Scene) -> None:
    await until(lambda: {t.phase for t in scene.fleet.tasks.values()} == {"Live"})
    await until(lambda: all(scene.row(s).get("phase") == "Live" for s in scene.fleet.tasks))


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
                return str(meta.get("annotations", {}).get("rekindle.dev/report"))

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
            await until(lambda: scene.process.core.committer.claimed.epoch >= 4)
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


def problems(scene: Scene) -> str:
    return " ".join(scene.api.topology["status"].get("dataPlane", {}).get("problems", []))


def test_the_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    token = Token(file=file)
    assert token.read() == "one"
    file.write_text("two\n")
    assert token.read() == "one"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert token.read() == "two"


def test_the_token_of_the_topology_is_in_no_repr() -> None:
    found = read_settings(
        {
            "REKINDLE_TOPOLOGY": "t",
            "REKINDLE_NAMESPACE": "n",
            "REKINDLE_TOPOLOGY_UID": "u",
            "REKINDLE_INCARNATION": "1",
            "REKINDLE_BIND": "127.0.0.1",
            "REKINDLE_TOKEN": "hunter2",
        }
    )
    assert found.identity.authorization == "Bearer hunter2"
    assert "hunter2" not in repr(found) + repr(found.identity)


def test_settings_name_the_variable_that_is_missing() -> None:
    with pytest.raises(SettingsError, match="REKINDLE_INCARNATION"):
        read_settings({"REKINDLE_TOPOLOGY": "t"})
