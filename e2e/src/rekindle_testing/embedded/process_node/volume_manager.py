"""Prepares the volumes of one pod and refreshes them, concurrently with its worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rekindle_testing.embedded.process_node.api import NodeApiError, Unreachable
from rekindle_testing.embedded.process_node.fields import DownwardValues, Json
from rekindle_testing.embedded.process_node.volumes import VolumeError, Volumes

log = logging.getLogger(__name__)


class VolumeManager:
    """Decides when `Volumes` are prepared, refreshed, and checked for their size.

    `record_problem(message)`: a problem of a volume. `evict(message)`: a volume exceeds its limit.
    """

    def __init__(
        self,
        volumes: Volumes,
        refresh_s: float,
        record_problem: Callable[[str], None],
        evict: Callable[[str], None],
    ) -> None:
        self._volumes = volumes
        self._refresh_s = refresh_s
        self._record_problem = record_problem
        self._evict = evict
        self._next_refresh = 0.0
        self._refresher: asyncio.Task[None] | None = None

    @property
    def paths(self) -> dict[str, Path]:
        """The directory of each volume, once it is prepared."""
        return self._volumes.paths

    async def sync(self, pod: Json, downward_values: DownwardValues) -> float | None:
        """Prepare or refresh what is due.

        Returns the time of the next call, or None while a volume is missing.
        """
        names = {v["name"] for v in pod["spec"].get("volumes") or []}
        if not names:
            return float("inf")
        if not names <= set(self.paths):
            try:
                await self._volumes.prepare(pod, downward_values)
            except VolumeError as error:
                self._record_problem(f"MountVolume.SetUp failed: {error}")
                return None
        elif time.time() < self._next_refresh:
            return self._next_refresh
        elif self._refresher is None or self._refresher.done():
            self._refresher = asyncio.create_task(self._refresh(pod, downward_values))
        self._next_refresh = time.time() + self._refresh_s
        return self._next_refresh

    def refresh_now(self) -> None:
        """At the next call of `sync`, if the volumes are prepared."""
        self._next_refresh = 0.0

    def remove(self) -> None:
        if self._refresher is not None:
            self._refresher.cancel()
        self._volumes.remove()

    async def _refresh(self, pod: Json, downward_values: DownwardValues) -> None:
        """Concurrently with the worker's loop, which does not wait for the API server.

        One after another, each independently of the others: a token must not expire because an
        object of another volume is missing.
        """
        for volume in pod["spec"]["volumes"]:
            try:
                await self._volumes.refresh(pod, volume, downward_values)
            except VolumeError as error:
                self._record_problem(f"MountVolume.SetUp failed: {error}")
            except (NodeApiError, Unreachable) as error:
                where = f"pod {pod['metadata']['name']}: volume {volume['name']!r}"
                log.warning("%s not refreshed: %s", where, error)
        if problem := await asyncio.to_thread(self._volumes.exceeded_limit, pod):
            self._evict(problem)
