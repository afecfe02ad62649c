"""Reads the cluster: pods by a watch, the newest generation by a list every second.

Turns observations into events; decides nothing. While the API server is unreachable it logs that
and retries; the state machine continues with the last observations.

Design: docs/design/coordinator.md#environment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle import names
from rekindle.backoff import Backoff
from rekindle.coordinator.core.state_machine import Event
from rekindle.coordinator.model import Generation, Pod
from rekindle.coordinator.shell.compiling import CompilationFailed, compile_specs
from rekindle.coordinator.shell.kube import API_BACKOFF, CALL_ERRORS, ApiError, KubeApi
from rekindle.coordinator.shell.objects import (
    ObjectError,
    generations_from,
    newest_generation,
    pod_from,
)
from rekindle.coordinator.shell.settings import Settings
from rekindle.topology.model import Topology

EventHandler = Callable[[Event], None]  # gives the core an event, and executes the effects
_log = logging.getLogger(__name__)
_GONE = 410


class PodWatcher:
    """Lists the task pods, then watches them; lists again if the resourceVersion is too old."""

    def __init__(
        self, api: KubeApi, settings: Settings, pods_listed: Callable[[Sequence[Pod]], None]
    ) -> None:
        self._api, self._pods_listed, self._uid = api, pods_listed, settings.topology_uid
        self._path = f"/api/v1/namespaces/{settings.namespace}/pods"
        topology = f"{names.LABEL_TOPOLOGY}={settings.topology}"
        self._query = {"labelSelector": f"{topology},{names.LABEL_ROLE}={names.ROLE_TASK}"}
        self._pods: dict[str, Pod] = {}
        self._version: str | None = None

    async def run(self) -> None:
        backoff = Backoff(API_BACKOFF)
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._watch(backoff)
                backoff.succeeded()
            except CALL_ERRORS as error:
                if isinstance(error, ApiError) and error.status == _GONE:
                    self._version = None
                _log.warning("pods: %r", error)
            # Wait also if the server ended the watch, since it may end each one immediately.
            await asyncio.sleep(backoff.failed())

    async def _list(self) -> None:
        found = await self._api.get(self._path, self._query)
        self._pods = {}
        for raw in found["items"]:
            self._keep(raw)
        self._version = found["metadata"]["resourceVersion"]
        self._pods_listed(tuple(self._pods.values()))

    async def _watch(self, backoff: Backoff) -> None:
        query = {**self._query, "resourceVersion": self._version or ""}
        async for kind, raw in self._api.watch(self._path, query):
            backoff.succeeded()
            self._version = raw["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            before = dict(self._pods)
            if kind == "DELETED":
                self._pods.pop(raw["metadata"]["name"], None)
            else:
                self._keep(raw)
            if self._pods != before:
                self._pods_listed(tuple(self._pods.values()))

    def _keep(self, raw: dict[str, Any]) -> None:
        pod = pod_from(raw, self._uid)
        if pod is not None:
            self._pods[pod.name] = pod


class GenerationReader:
    """Lists the topology's ConfigMaps; compiles a new one in a child process."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        feed: EventHandler,
        generation_seen: Callable[[Generation], None],
    ) -> None:
        self._api, self._settings = api, settings
        self._feed, self._generation_seen = feed, generation_seen
        self._path = f"/api/v1/namespaces/{settings.namespace}/configmaps"
        selector = f"{names.LABEL_TOPOLOGY}={settings.topology},{names.LABEL_GENERATION}"
        self._query = {"labelSelector": selector}
        self._compiled: dict[int, Topology] = {}
        self._versions: dict[str, str] = {}
        self._failure: str | None = None  # why the newest generation does not compile

    async def run(self) -> None:
        backoff = Backoff(API_BACKOFF)
        while True:
            try:
                await self._check()
                backoff.succeeded()
                self._problem_changed(None)
            except (ObjectError, CompilationFailed) as error:
                self._problem_changed(str(error))
            except CALL_ERRORS as error:
                _log.warning("ConfigMaps: %r", error)
                await asyncio.sleep(backoff.failed())
            await asyncio.sleep(self._settings.generation_check_s)

    def _problem_changed(self, message: str | None) -> None:
        self._feed(lambda core, now: core.problem_changed("generation", message, now))

    async def _check(self) -> None:
        items = (await self._api.get(self._path, self._query))["items"]
        versions = {i["metadata"]["name"]: i["metadata"]["resourceVersion"] for i in items}
        if versions == self._versions:
            if self._failure is not None:
                raise CompilationFailed(self._failure)
            if self._compiled:
                return
        found = generations_from(items, self._settings.topology_uid)
        if not found:
            raise ObjectError(
                f"no ConfigMap with the label {names.LABEL_GENERATION} has this topology's UID; "
                "the operator writes one for each generation: check that it runs"
            )
        failure = None
        new = [number for number in found if number not in self._compiled]
        if new:
            compiled = await compile_specs([found[number] for number in new])
            failure = self._keep(dict(zip(new, compiled, strict=True)), newest=max(found))
        self._compiled = {n: t for n, t in self._compiled.items() if n in found}
        self._versions, self._failure = versions, failure
        if failure is not None:
            raise CompilationFailed(failure)
        if self._compiled:
            self._generation_seen(newest_generation(self._compiled))

    def _keep(self, compiled: Mapping[int, Topology | str], newest: int) -> str | None:
        """Returns why the newest generation does not compile; None if it does."""
        failure = None
        for number, topology in compiled.items():
            if isinstance(topology, Topology):
                self._compiled[number] = topology
            elif number == newest:
                failure = topology
            else:  # accepted by a less strict release; state with its operator ids is not found
                _log.warning("generation %d does not compile any more: %s", number, topology)
        return failure
