"""Events about pods: what `kubectl describe` shows under a pod."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError, Unreachable
from rekindle_testing.embedded.process_node.fields import Json
from rekindle_testing.embedded.process_node.status import rfc3339

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seen:
    name: str
    count: int
    written_at: float


class EventRecorder:
    """Events about pods; a repeated one raises the count of the first."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._node_name = node_name
        self._clock = clock
        # A failing probe would otherwise cost a write each second.
        self._interval_s = interval_s
        self._seen: dict[tuple[str, str, str], _Seen] = {}
        self._pending: set[asyncio.Task[None]] = set()

    def record(self, pod: Json, event_type: str, reason: str, message: str) -> None:
        """`event_type` is Normal or Warning.  Never waits and never fails."""
        task = asyncio.create_task(self._write(pod, event_type, reason, message[:1000]))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def forget(self, uid: str) -> None:
        for key in [key for key in self._seen if key[0] == uid]:
            del self._seen[key]

    async def _write(self, pod: Json, event_type: str, reason: str, message: str) -> None:
        meta, now = pod["metadata"], self._clock()
        key = (meta["uid"], reason, message)
        path = f"/api/v1/namespaces/{meta['namespace']}/events"
        try:
            if seen := self._seen.get(key):
                seen.count += 1
                if now - seen.written_at < self._interval_s:
                    return
                seen.written_at = now
                change = {"count": seen.count, "lastTimestamp": rfc3339(now)}
                await self._api.merge_patch(f"{path}/{seen.name}", change)
                return
            name = f"{meta['name'][:200]}.{time.time_ns():x}"
            self._seen[key] = _Seen(name, 1, now)
            await self._api.create(
                path, _event(name, pod, event_type, reason, message, now, self._node_name)
            )
        except (NodeApiError, Unreachable) as error:
            log.warning("event %s of %s not written: %s", reason, meta["name"], error)


def _event(
    name: str, pod: Json, event_type: str, reason: str, message: str, now: float, node_name: str
) -> Json:
    meta = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
            "resourceVersion": meta.get("resourceVersion", ""),
        },
        "type": event_type,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "source": {"component": "process-node", "host": node_name},
        "reportingComponent": "process-node",
        "reportingInstance": node_name,
    }
