"""The node agent: does the work of a kubelet on one process node.

Has a worker for each pod that is bound to the node, maintains the Node and its Lease,
serves logs.  Its persistent state is in the node's directory, so it can be killed at
any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rekindle_testing.embedded.process_node import admission
from rekindle_testing.embedded.process_node.admission import PodRefusal
from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError, Unreachable
from rekindle_testing.embedded.process_node.events import EventRecorder
from rekindle_testing.embedded.process_node.fields import Json
from rekindle_testing.embedded.process_node.memory import ProcessTree
from rekindle_testing.embedded.process_node.node_object import NodeObject
from rekindle_testing.embedded.process_node.objects import ObjectReader, TokenReader
from rekindle_testing.embedded.process_node.pod_worker import PodWorker, WorkerContext
from rekindle_testing.embedded.process_node.probe_executor import ProbeExecutor
from rekindle_testing.embedded.process_node.quantities import parse_rounded_up
from rekindle_testing.embedded.process_node.server import KubeletServer
from rekindle_testing.embedded.process_node.settings import NodeSettings

log = logging.getLogger(__name__)

_RETRY_S = 0.5
# The last two bytes of pod addresses.
_FIRST_ADDRESS, _LAST_ADDRESS = 0x0100, 0xFFFE


class Agent:
    """All pods of one node."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._directory = Path(settings.directory) / "pods"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._api = ApiClient(Path(settings.kubeconfig))
        self._node = NodeObject(self._api, settings)
        self._probe_executor = ProbeExecutor()
        self._last_address = _FIRST_ADDRESS - 1
        self.workers: dict[str, PodWorker] = {}
        url = urlsplit(self._api.url)
        self._worker_context = WorkerContext(
            settings=settings,
            api=self._api,
            events=EventRecorder(self._api, settings.name),
            objects=ObjectReader(self._api, settings.timing.volume_refresh_interval_s / 2),
            tokens=TokenReader(self._api),
            probe_executor=self._probe_executor,
            admit=self._admit,
            service_variables={
                "KUBERNETES_SERVICE_HOST": url.hostname or "",
                "KUBERNETES_SERVICE_PORT": str(url.port),
                "KUBERNETES_SERVICE_PORT_HTTPS": str(url.port),
            },
        )

    async def run(self) -> None:
        await self._register()
        server = KubeletServer(self._settings, self.workers)
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._node.keep_lease())
            tasks.create_task(self._node.keep_reporting())
            tasks.create_task(self._follow_pods())
            tasks.create_task(self._enforce_memory_limits())

    async def _register(self) -> None:
        while True:
            try:
                return await self._node.register()
            except (NodeApiError, Unreachable) as error:
                log.warning("node %s not registered: %s", self._settings.name, error)
                await asyncio.sleep(_RETRY_S)

    # --- pods -------------------------------------------------------------

    async def _follow_pods(self) -> None:
        while True:
            try:
                await self._list_and_watch()
            except (NodeApiError, Unreachable) as error:
                log.warning("pods of %s: %s", self._settings.name, error)
                await asyncio.sleep(_RETRY_S)

    async def _list_and_watch(self) -> None:
        selector = f"spec.nodeName={self._settings.name}"
        listed = await self._api.get("/api/v1/pods", fieldSelector=selector)
        present = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
        for pod in present.values():
            self._handle_pod(pod)
        for uid in [uid for uid in self.workers if uid not in present]:
            self.workers[uid].object_deleted()
        self._end_orphans(set(present))
        log.info("node %s has %d pods", self._settings.name, len(present))
        version = listed["metadata"]["resourceVersion"]
        while True:
            # When the server ends a watch, it is opened again; 410 is an ApiError.
            watch = self._api.watch("/api/v1/pods", version, fieldSelector=selector)
            async for event in watch:
                version = event["object"]["metadata"]["resourceVersion"]
                match event["type"]:
                    case "ADDED" | "MODIFIED":
                        self._handle_pod(event["object"])
                    case "DELETED":
                        if worker := self.workers.get(event["object"]["metadata"]["uid"]):
                            worker.object_deleted()

    def _handle_pod(self, pod: Json) -> None:
        self._forget_removed()
        uid = pod["metadata"]["uid"]
        if worker := self.workers.get(uid):
            worker.update(pod)
            return
        directory = self._directory / uid
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if ended and not directory.exists() and "deletionTimestamp" not in pod["metadata"]:
            # It ended on an earlier node of this name; only its object is left.
            return
        self._start_worker(pod, directory)

    def _start_worker(self, pod: Json, directory: Path) -> PodWorker:
        worker = PodWorker(pod, directory, self._address(directory), self._worker_context)
        self.workers[worker.uid] = worker
        return worker

    def _end_orphans(self, present: set[str]) -> None:
        """End pods whose object was deleted while no agent was running."""
        for directory in self._directory.iterdir():
            if directory.name in present or directory.name in self.workers:
                continue
            saved = directory / "pod.json"
            if saved.exists():
                self._start_worker(json.loads(saved.read_text()), directory).object_deleted()

    def _forget_removed(self) -> None:
        for uid in [uid for uid, worker in self.workers.items() if worker.removed]:
            del self.workers[uid]

    def _admit(self, pod: Json) -> PodRefusal | None:
        others = [w.pod for w in self.workers.values() if w.uses_capacity]
        return admission.admit(pod, others, self._settings.capacity)

    def _address(self, directory: Path) -> str:
        saved = directory / "pod.json"
        if saved.exists():
            return str(json.loads(saved.read_text())["ip"])
        taken = {worker.pod_ip for worker in self.workers.values()}
        taken |= {json.loads(path.read_text())["ip"] for path in self._directory.glob("*/pod.json")}
        for address in self._candidates():
            if address not in taken:
                return address
        raise RuntimeError(f"no address left in {self._settings.address_prefix}.0.0/16")

    def _candidates(self) -> Iterator[str]:
        # Round-robin, so that an address is not reused immediately.
        for _ in range(_LAST_ADDRESS - _FIRST_ADDRESS):
            self._last_address += 1
            if self._last_address > _LAST_ADDRESS:
                self._last_address = _FIRST_ADDRESS
            high, low = divmod(self._last_address, 256)
            if low not in (0, 255):
                yield f"{self._settings.address_prefix}.{high}.{low}"

    # --- memory -----------------------------------------------------------

    async def _enforce_memory_limits(self) -> None:
        """Kill containers whose processes use more than their limit, as the kernel would."""
        while True:
            await asyncio.sleep(self._settings.timing.memory_sample_interval_s)
            limited = [
                (container, (container.spec.get("resources") or {}).get("limits", {}).get("memory"))
                for worker in self.workers.values()
                for container in worker.containers
                if container.running
            ]
            limited = [(container, limit) for container, limit in limited if limit]
            if not limited:
                continue
            tree = ProcessTree()
            for container, limit in limited:
                if container.attempt is None:
                    continue
                if tree.exceeds(
                    tree.descendants(container.attempt.shim_pid), parse_rounded_up(limit)
                ):
                    container.kill("OOMKilled")


def main(settings_path: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    asyncio.run(_run(NodeSettings.read(Path(settings_path))))


async def _run(settings: NodeSettings) -> None:
    await Agent(settings).run()
