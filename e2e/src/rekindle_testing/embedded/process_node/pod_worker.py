"""Reconciles one pod with its object: level-triggered, one step after another.

Each step considers the whole pod, so a missed event or a restart of the agent does
not matter.  Knows restarts, back-off, termination and status; `container` runs the
containers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rekindle_testing.embedded.process_node import (
    containers,
    environment,
    socket_binds,
    status,
    supported_fields,
    syscalls,
)
from rekindle_testing.embedded.process_node.admission import PodRefusal
from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError, Unreachable
from rekindle_testing.embedded.process_node.container import Container
from rekindle_testing.embedded.process_node.containers import ImageNotFound, PodContext
from rekindle_testing.embedded.process_node.environment import ConfigError
from rekindle_testing.embedded.process_node.events import EventRecorder
from rekindle_testing.embedded.process_node.fields import DownwardValues, Json
from rekindle_testing.embedded.process_node.objects import ObjectReader, TokenReader
from rekindle_testing.embedded.process_node.pod_object import PodObject
from rekindle_testing.embedded.process_node.probe_executor import ProbeExecutor
from rekindle_testing.embedded.process_node.restarts import should_restart
from rekindle_testing.embedded.process_node.settings import NodeSettings
from rekindle_testing.embedded.process_node.status import ObservedPod
from rekindle_testing.embedded.process_node.volume_manager import VolumeManager
from rekindle_testing.embedded.process_node.volumes import Volumes

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_IN_FILES = ("labels", "annotations")  # of a pod, in files of a downwardAPI volume
_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What all workers of an agent share."""

    settings: NodeSettings
    api: ApiClient
    events: EventRecorder
    objects: ObjectReader
    tokens: TokenReader
    probe_executor: ProbeExecutor
    admit: Callable[[Json], PodRefusal | None]
    service_variables: dict[str, str]


class PodWorker:
    """Handles a pod from its first event to the deletion of its object and files."""

    def __init__(
        self, pod: Json, directory: Path, pod_ip: str, worker_context: WorkerContext
    ) -> None:
        self.pod = pod
        self.directory = directory
        self.pod_ip = pod_ip
        self.removed = False
        self.failure: tuple[str, str] | None = None  # reason and message
        self._worker_context = worker_context
        self._wake = asyncio.Event()
        self._deleted_at: float | None = None
        self._stop_began: float | None = None
        self._start_time = time.time()
        self._admitted = False
        self._object = PodObject(worker_context.api, pod)
        self._status_outdated = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._volume_manager = VolumeManager(
            Volumes(directory / "volumes", worker_context.objects, worker_context.tokens),
            worker_context.settings.timing.volume_refresh_interval_s,
            lambda problem: self._event("Warning", "FailedMount", problem),
            lambda problem: self.fail("Evicted", problem),
        )
        spec = pod["spec"]
        self.init = [self._container(c, is_init=True) for c in spec.get("initContainers") or []]
        self.main = [self._container(c, is_init=False) for c in spec["containers"]]
        self.downward_values = DownwardValues(
            pod_ip, worker_context.settings.address, worker_context.settings.capacity
        )
        # Before other pods are admitted, since this one uses capacity.
        self._adopt()
        self._publisher = asyncio.create_task(self._keep_published())
        self._task = asyncio.create_task(self._run())

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def containers(self) -> list[Container]:
        return [*self.init, *self.main]

    @property
    def uses_capacity(self) -> bool:
        """For the admission of others. Not once its object is gone, while its processes still end:
        kubelets count only pods with an object, as the scheduler does."""
        if not self._admitted or self.failure is not None or self._deleted_at is not None:
            return False
        return self._phase() not in ("Succeeded", "Failed")

    def update(self, pod: Json) -> None:
        for change in supported_fields.changes(self.pod, pod):
            self._event("Warning", supported_fields.FIELDS_IGNORED, change)
        if any(pod["metadata"].get(k) != self.pod["metadata"].get(k) for k in _IN_FILES):
            self._volume_manager.refresh_now()  # as a kubelet does
        self.pod = pod
        self._object.republish_if_overwritten(pod)
        self._wake.set()

    def object_deleted(self) -> None:
        """The object was deleted: kill the containers after a short grace period."""
        if self._deleted_at is None:
            self._deleted_at = time.time()
            self._wake.set()

    def fail(self, reason: str, message: str) -> None:
        """Stop the pod permanently: refused or evicted."""
        if self.failure is None:
            self.failure = (reason, message)
            self._worker_context.events.record(self.pod, "Warning", reason, message)
            self._save()
            self._wake.set()

    def find(self, name: str) -> Container | None:
        return next((c for c in self.containers if c.name == name), None)

    # --- the loop ---------------------------------------------------------

    async def _run(self) -> None:
        while not self.removed:
            self._wake.clear()
            try:
                next_at = await self._sync()
            except (NodeApiError, Unreachable) as error:
                log.warning("pod %s: %s", self.pod["metadata"]["name"], error)
                next_at = time.time() + _RETRY_S
            except Exception:
                log.exception("pod %s", self.pod["metadata"]["name"])
                next_at = time.time() + _RETRY_S
            if self.removed:
                return
            with contextlib.suppress(TimeoutError):
                timeout = None if next_at == _NEVER else max(0.0, next_at - time.time())
                await asyncio.wait_for(self._wake.wait(), timeout)

    async def _sync(self) -> float:
        """Bring the pod closer to its object; returns the time of the next call."""
        if self._deleted_at is not None or "deletionTimestamp" in self.pod["metadata"]:
            return await self._terminate()
        if self._admitted and self.failure is None and self._phase() in ("Succeeded", "Failed"):
            self._status_outdated.set()
            return _NEVER
        if not self._admitted and self.failure is None:
            self._admit()
        if self.failure is not None:
            for container in self.containers:
                container.kill()
            self._status_outdated.set()
            return _NEVER
        next_at = await self._advance()
        self._status_outdated.set()
        return next_at

    def _admit(self) -> None:
        if refusal := self._worker_context.admit(self.pod):
            self.fail(refusal.reason, f"Pod was rejected: {refusal.message}")
            return
        self._admitted = True
        self._save()
        if ignored := supported_fields.ignored(self.pod):
            self._event("Warning", supported_fields.FIELDS_IGNORED, "; ".join(ignored))
        (self.directory / "hosts").write_text(containers.hosts(self.pod, self.pod_ip))
        if self._cgroup is not None:
            socket_binds.create_restricted_cgroup(self._cgroup, self.pod_ip)

    async def _advance(self) -> float:
        """Take all steps that are possible now; returns the time of the next call."""
        deadline = self._start_time + (self.pod["spec"].get("activeDeadlineSeconds") or math.inf)
        if time.time() >= deadline:
            self.fail("DeadlineExceeded", "Pod was active on the node longer than its deadline")
            return _NEVER
        return min(deadline, await self._advance_containers())

    async def _advance_containers(self) -> float:
        if (refresh_at := await self._volume_manager.sync(self.pod, self.downward_values)) is None:
            return time.time() + _RETRY_S
        next_at = refresh_at
        for container in self.init:
            ended = container.exit
            if ended is None or ended.exit_code != 0:
                return min(next_at, await self._advance_container(container, retry_failures=True))
        for container in self.main:
            next_at = min(next_at, await self._advance_container(container, retry_failures=False))
        return next_at

    async def _advance_container(self, container: Container, *, retry_failures: bool) -> float:
        """Start or restart a container if needed; returns the time of the next call."""
        if container.running:
            if kind := container.failed_probe():
                message = f"Container {container.name} failed {kind} probe, will be restarted"
                self._event("Normal", "Killing", message)
                deadline = time.time() + self._grace_s(container, f"{kind}Probe")
                container.stop(lambda: deadline)
            return _NEVER
        policy = self.pod["spec"].get("restartPolicy", "Always")
        if ended := container.exit:
            if retry_failures and policy == "Always":
                # An init container that succeeded is done whatever the policy.
                policy = "OnFailure"
            if not should_restart(policy, ended):
                container.waiting = None
                return _NEVER
            backoff = self._worker_context.settings.timing.backoff
            start_at = ended.finished_at + container.consecutive_exits.delay_s(backoff)
            if time.time() < start_at:
                self._back_off(container, container.consecutive_exits.delay_s(backoff))
                return start_at
        return await self._start(container)

    def _back_off(self, container: Container, delay_s: float) -> None:
        name = f"{container.name} in pod {self.pod['metadata']['name']}"
        text = f"back-off {delay_s:g}s restarting failed container={name}"
        if container.waiting is None:
            self._event("Warning", "BackOff", f"Back-off restarting failed container {name}")
        container.waiting = ("CrashLoopBackOff", text)

    async def _start(self, container: Container) -> float:
        namespace = self.pod["metadata"]["namespace"]
        try:
            wanted = environment.references(container.spec)
            objects = await self._worker_context.objects.read(namespace, wanted)
            directory = container.next_directory()
            shim_spec = containers.shim_spec(self._context(), container.spec, objects, directory)
        except ImageNotFound as error:
            again = container.waiting is not None
            self._event("Warning", "Failed", f"Failed to pull image: {error}")
            container.waiting = ("ImagePullBackOff" if again else "ErrImagePull", str(error))
            # A node's images do not change while it runs.
            return time.time() + _RETRY_S if not again else _NEVER
        except (ConfigError, OSError) as error:
            self._event("Warning", "Failed", f"Error: {error}")
            container.waiting = ("CreateContainerConfigError", str(error))
            return time.time() + _RETRY_S
        except (NodeApiError, Unreachable) as error:
            # Objects that this container refers to cannot be read; the others are not affected.
            log.warning("container %s: %s", container.name, error)
            return time.time() + _RETRY_S
        container.start(shim_spec, self.pod_ip)
        return _NEVER

    # --- termination ------------------------------------------------------

    async def _terminate(self) -> float:
        if self._stop_began is None:
            self._stop_began = time.time()
        for container in self.containers:
            container.stop(self._deadline)
        if any(container.running for container in self.containers):
            if self._deleted_at is None:
                await self._publish()
            return _NEVER
        if self._deleted_at is None:
            await self._publish()
            await self._object.delete()
        self._publisher.cancel()
        self._volume_manager.remove()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()
        self._worker_context.events.forget(self.uid)
        self._worker_context.tokens.forget(self.uid)
        self.removed = True
        return _NEVER

    def _deadline(self) -> float:
        assert self._stop_began is not None
        if self._deleted_at is not None:
            return self._deleted_at + self._worker_context.settings.timing.deleted_object_grace_s
        grace_s: float | None = self.pod["metadata"].get("deletionGracePeriodSeconds")
        return self._stop_began + (self._grace_s() if grace_s is None else grace_s)

    def _grace_s(self, container: Container | None = None, probe: str = "") -> float:
        own = (container.spec.get(probe) or {}) if container else {}
        seconds = own.get("terminationGracePeriodSeconds")
        if seconds is None:
            seconds = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        return float(seconds)

    # --- status -----------------------------------------------------------

    async def _keep_published(self) -> None:
        """Publish the status whenever it is outdated, in a task of its own: an unavailable API
        server must not delay the containers."""
        while True:
            await self._status_outdated.wait()
            self._status_outdated.clear()
            try:
                await self._publish()
            except Exception as error:
                log.warning("pod %s: status not published: %r", self.pod["metadata"]["name"], error)
                await asyncio.sleep(_RETRY_S)
                self._status_outdated.set()

    async def _publish(self) -> None:
        # One after another: a late request must not overwrite a newer status.
        async with self._publishing:
            await self._object.publish(status.build(self.pod, self._view(), time.time()))

    def _view(self) -> ObservedPod:
        return ObservedPod(
            init=[c.view() for c in self.init],
            main=[c.view() for c in self.main],
            pod_ip=self.pod_ip,
            host_ip=self._worker_context.settings.address,
            start_time=self._start_time,
            failure=self.failure,
            volumes_ready=bool(self._volume_manager.paths) or not self.pod["spec"].get("volumes"),
            conditions=self._object.conditions,
        )

    def _phase(self) -> str:
        return status.phase(self.pod["spec"].get("restartPolicy", "Always"), self._view())

    # --- helpers ----------------------------------------------------------

    def _container(self, spec: Json, is_init: bool) -> Container:
        return Container(
            spec,
            is_init,
            self.directory / "containers" / spec["name"],
            self._worker_context.probe_executor,
            self._worker_context.settings.timing.backoff,
            self._wake.set,
            self._event,
        )

    def _adopt(self) -> None:
        saved = self.directory / "pod.json"
        if saved.exists():
            kept: Json = json.loads(saved.read_text())
            self._start_time = kept["start_time"]
            self._admitted = kept["admitted"]
            self.failure = tuple(kept["failure"]) if kept["failure"] else None
        statuses = self.pod.get("status") or {}
        known = {
            s["name"]: s
            for field in ("initContainerStatuses", "containerStatuses")
            for s in statuses.get(field) or []
        }
        for container in self.containers:
            container.adopt(self.pod_ip, known.get(container.name, {}))
        self._save()

    def _save(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {
            "metadata": self.pod["metadata"],
            "spec": self.pod["spec"],
            "ip": self.pod_ip,
            "start_time": self._start_time,
            "admitted": self._admitted,
            "failure": self.failure,
        }
        syscalls.write_json(self.directory / "pod.json", content)

    def _context(self) -> PodContext:
        settings = self._worker_context.settings
        return PodContext(
            pod=self.pod,
            downward_values=self.downward_values,
            images=settings.images,
            volumes=self._volume_manager.paths,
            service_variables=self._worker_context.service_variables,
            hosts_file=self.directory / "hosts",
            data_directory=Path(settings.directory),
            log_limit_bytes=settings.log_limit_bytes,
            cgroup=str(self._cgroup or ""),
        )

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._worker_context.events.record(self.pod, kind, reason, message)

    @property
    def _cgroup(self) -> Path | None:
        node = self._worker_context.settings.cgroup
        return Path(node) / self.uid if node else None
