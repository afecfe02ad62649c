"""A coordinator's process with simulated tasks and a fake API server, both behind real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from rekindle import names
from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.kube_access import Access, Token
from rekindle.coordinator.shell.process import Process
from rekindle.coordinator.shell.settings import Settings
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Slot
from rekindle_testing.embedded.process_node.indexes import IndexReservation
from rekindle_testing.fixtures.fleet import Fleet

EXAMPLE = Path(__file__).parents[2] / "examples/flights/topology.yaml"
UID = "0000-1111"


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
        self.too_old = False  # the version from which a watch begins, until the next list
        self.refuses_status = False
        self._version = 1

    def add_pod(
        self, name: str, slot: Slot, incarnation: int, address: str, owner: str = UID
    ) -> None:
        labels = {
            names.LABEL_SEGMENT: slot.segment,
            names.LABEL_PARTITION: str(slot.partition),
            names.LABEL_REPLICA: str(slot.replica),
            names.LABEL_INCARNATION: str(incarnation),
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
            return web.json_response({"message": "a webhook does not respond"}, status=500)
        fence = self.topology["status"].get("dataPlane", {}).get("fence", 0)
        if body["status"]["dataPlane"]["fence"] < fence:
            return web.json_response({"message": "the fence cannot decrease"}, status=422)
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


class RunningCoordinator:
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
) -> AsyncIterator[RunningCoordinator]:
    network = IndexReservation(None)
    net = f"{network.index}.0"
    resource = yaml.safe_load(EXAMPLE.read_text())
    resource["spec"]["epochInterval"] = "200ms"
    resource["spec"]["checkpoint"] = {
        "interval": "1s",
        "store": f"file://{directory}",
        "volume": "v",
    }
    name, spec = load_topology(resource)
    api = FakeApi()
    api.topology["status"] = status or {}
    record = {"name": name, "uid": UID, "generation": 1, "spec": resource["spec"]}
    meta = {"name": "flights-g1", "resourceVersion": "1"}
    api.config_map = {"metadata": meta, "data": {"topology.json": json.dumps(record)}}
    runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, f"127.{net}.250", 0)
    await site.start()
    port = runner.addresses[0][1]
    settings = Settings("flights", "n", UID, incarnation, bind=f"127.{net}.251", token=token)
    kube = KubeApi(Access(f"http://127.{net}.250:{port}", None, Token(value="secret")))
    topology = compile_topology(spec, name, skip_cluster_checks=True)
    with Fleet(topology, net, directory, UID, tasks_token) as fleet:
        for slot, task in fleet.tasks.items():
            pod = f"flights-{slot.key.replace('/', '-')}-{task.incarnation}"
            api.add_pod(pod, slot, task.incarnation, fleet.addresses[slot])
        coordinator = RunningCoordinator(api, fleet, Process(settings, kube), net)
        try:
            yield coordinator
        finally:
            coordinator.process.stop()
            await coordinator.ended
            api.break_watches(too_old=False)
            await runner.cleanup()
            network.release()


async def until(condition: Callable[[], Any], within_s: float = 15.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)
    return found


async def all_live(coordinator: RunningCoordinator) -> None:
    await until(lambda: {t.phase for t in coordinator.fleet.tasks.values()} == {"Live"})
    await until(
        lambda: all(coordinator.row(s).get("phase") == "Live" for s in coordinator.fleet.tasks)
    )


def problems(coordinator: RunningCoordinator) -> str:
    return " ".join(coordinator.api.topology["status"].get("dataPlane", {}).get("problems", []))
