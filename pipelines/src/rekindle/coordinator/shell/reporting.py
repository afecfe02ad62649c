"""Writes to the cluster: `status.dataPlane` by server-side apply, and the coordinator's Lease.

The API server refuses both writes of a coordinator that was replaced: the fence in the status never
decreases (a CEL rule), and the Lease has a later holder. So such a coordinator detects that it was
replaced, even if it has no tasks.

Design: docs/design/coordinator.md#report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from rekindle import names
from rekindle.backoff import Backoff
from rekindle.coordinator.shell.kube import API_BACKOFF, CALL_ERRORS, ApiError, KubeApi
from rekindle.coordinator.shell.objects import holder, lease, status_patch
from rekindle.coordinator.shell.settings import Settings
from rekindle.coordinator.shell.watching import EventHandler
from rekindle.errors import StoreError
from rekindle.report import Report

_log = logging.getLogger(__name__)
_MAYBE_OUTDATED = (409, 422)  # another topology of this name; a fence that is lower


async def store_id_from_status(api: KubeApi, settings: Settings) -> str | None:
    """The id of the topology's checkpoint store, from its status; None if no coordinator has
    written it yet. Raises StoreError while the status cannot be read: a new store must not replace
    one that is only unreachable."""
    path = (
        f"/apis/{names.API_VERSION}/namespaces/{settings.namespace}/{names.PLURAL}/"
        f"{settings.topology}"
    )
    try:
        found = await api.get(path)
    except CALL_ERRORS as error:
        raise StoreError(
            f"not opened yet: the topology's status cannot be read: {error!r}"
        ) from error
    data_plane = (found.get("status") or {}).get("dataPlane") or {}
    store_id = data_plane.get("store")
    return str(store_id) if store_id else None


class StatusWriter:
    """One write at a time, with a pause after it; meanwhile only the latest report is kept."""

    def __init__(self, api: KubeApi, settings: Settings, feed: EventHandler) -> None:
        self._api, self._settings, self._feed = api, settings, feed
        self._path = (
            f"/apis/{names.API_VERSION}/namespaces/{settings.namespace}/{names.PLURAL}/"
            f"{settings.topology}"
        )
        self._store_id: str | None = None  # of the checkpoint store, from the status
        self._desired: Report | None = None
        self._written: Report | None = None
        self._changed = asyncio.Event()
        self.writes = 0

    def offer(self, report: Report) -> None:
        self._desired = report
        self._changed.set()

    @property
    def valid_report_number(self) -> int | None:
        """The number of the report in the cluster, if it is up to date; None while a newer one is
        not written."""
        return self.writes if self._written is not None and self._written is self._desired else None

    async def run(self) -> None:
        backoff = Backoff(API_BACKOFF)
        while True:
            await self._changed.wait()
            self._changed.clear()
            desired = self._desired
            if desired is None:
                continue
            try:
                await self._write(desired)
                backoff.succeeded()
                await asyncio.sleep(self._settings.report_pause_s)
                continue
            except ApiError as error:
                _log.warning("status: %s", error)
                self._problem_changed(f"status.dataPlane was refused: {error}")
            except CALL_ERRORS as error:
                _log.warning("status: %r", error)
            self._changed.set()
            await asyncio.sleep(backoff.failed())

    def _problem_changed(self, message: str | None) -> None:
        self._feed(lambda core, now: core.problem_changed("status", message, now))

    async def _write(self, desired: Report) -> None:
        settings = self._settings
        if not await self._is_current():
            return
        # Numbered, so that the Lease can name the report that is still valid.
        # It may not have the store yet.
        report = replace(desired, number=self.writes + 1, store=desired.store or self._store_id)
        patch = status_patch(settings.namespace, settings.topology, settings.topology_uid, report)
        try:
            await self._api.apply(f"{self._path}/status", patch, names.COORDINATOR_FIELD_MANAGER)
        except ApiError as error:
            if error.status in _MAYBE_OUTDATED and not await self._is_current():
                return
            raise
        self.writes += 1
        self._written = desired
        self._problem_changed(None)

    async def _is_current(self) -> bool:
        """Whether the topology in the cluster has this process's UID, and no higher fence;
        otherwise feeds `fence_raised`."""
        settings = self._settings
        try:
            found = await self._api.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            return self._replaced(f"topology {settings.topology} is gone")
        if found["metadata"]["uid"] != settings.topology_uid:
            return self._replaced(f"topology {settings.topology} was deleted and created again")
        data_plane = (found.get("status") or {}).get("dataPlane") or {}
        self._store_id = data_plane.get("store") or self._store_id
        fence = data_plane.get("fence") or 0
        if fence > settings.incarnation:
            return self._replaced(f"status.dataPlane.fence is {fence}")
        return True

    def _replaced(self, by: str) -> Literal[False]:
        self._feed(lambda core, now: core.fence_raised(by, now))
        return False


class LeaseKeeper:
    """Renews the Lease `<topology>-coordinator`; otherwise the operator replaces the coordinator.

    Each renewal names the report that is still valid (`valid_report_number`; None: the newest is
    not written yet). Without that, a report would seem as old as its last change. `suspecting`: a
    task is silent; then renewals are more frequent. `knows_generation`: this coordinator
    knows its tasks. Until then, but not for longer than `lease_wait_s`, it does not take the Lease
    from a predecessor that still works (docs/design/planned-moves.md) and reports."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        feed: EventHandler,
        valid_report_number: Callable[[], int | None],
        suspecting: Callable[[], bool],
        knows_generation: Callable[[], bool],
    ) -> None:
        self._api, self._settings, self._feed = api, settings, feed
        self._valid_report_number, self._suspecting = valid_report_number, suspecting
        self._knows_generation = knows_generation
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{settings.namespace}/leases"
        self._path = f"{self._collection}/{settings.topology}-coordinator"
        self._lease: dict[str, Any] | None = None  # as last read or written, whoever holds it

    async def run(self) -> None:
        until = time.monotonic() + self._settings.lease_wait_s
        while not self._knows_generation() and time.monotonic() < until:
            await asyncio.sleep(self._settings.tick_s)
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._settings.lease_timeout_s):
                    await self._renew()
            except CALL_ERRORS as error:
                self._lease = None
                _log.warning("lease: %r", error)
            # A failed call must not delay the next renewal.
            elapsed_s = time.monotonic() - began
            settings = self._settings
            interval_s = settings.lease_renew_s
            if self._suspecting():
                interval_s = settings.lease_renew_suspecting_s
            await asyncio.sleep(max(0.2, interval_s - elapsed_s))

    async def _renew(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        settings = self._settings
        wanted = lease(
            settings.namespace,
            settings.topology,
            settings.topology_uid,
            settings.incarnation,
            settings.lease_duration_s,
            now,
            self._valid_report_number(),
        )
        if self._lease is None:
            self._lease = await self._find()
        if self._lease is None:
            self._lease = await self._api.create(self._collection, wanted)
            return
        if holder(self._lease) > settings.incarnation:
            by = f"the Lease is held by coordinator {holder(self._lease)}"
            self._feed(lambda core, now: core.fence_raised(by, now))
            return
        spec = dict(wanted["spec"])
        if holder(self._lease) == settings.incarnation:
            spec["acquireTime"] = self._lease["spec"].get("acquireTime", now)
        kept = self._lease["metadata"].get("annotations") or {}
        annotations = {**kept, **wanted["metadata"]["annotations"]}
        meta = {**self._lease["metadata"], "annotations": annotations}
        self._lease = await self._api.replace(
            self._path, {**self._lease, "metadata": meta, "spec": spec}
        )

    async def _find(self) -> dict[str, Any] | None:
        try:
            return await self._api.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None
