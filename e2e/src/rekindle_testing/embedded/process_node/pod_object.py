"""A pod's object in the API: writes its status, and deletes it.

Writes only changes, and again after another client has changed the status.
"""

from __future__ import annotations

from rekindle_testing.embedded.process_node import status
from rekindle_testing.embedded.process_node.api import ApiClient, NodeApiError
from rekindle_testing.embedded.process_node.fields import Json


class PodObject:
    """The object of one pod, by its uid: another of the same name is not touched."""

    def __init__(self, api: ApiClient, pod: Json) -> None:
        meta = pod["metadata"]
        self._api = api
        self._uid = meta["uid"]
        self._path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        self._published: Json | None = None
        # Of the newest status: transition times in the next one go on from them.
        self.conditions: list[Json] = (pod.get("status") or {}).get("conditions") or []

    def republish_if_overwritten(self, pod: Json) -> None:
        """Let the next `publish` write the status again if another client has changed it."""
        if self._published and status.is_contradicted(self._published, pod.get("status") or {}):
            # The node controller sets pods of a silent node to not ready; the node must
            # set them to ready again.
            self._published = None

    async def publish(self, wanted: Json) -> None:
        if wanted == self._published:
            return
        try:
            await self._api.strategic_merge_patch(
                f"{self._path}/status", {"metadata": {"uid": self._uid}, "status": wanted}
            )
        except NodeApiError as error:
            if not _is_gone(error):
                raise
        self._published = wanted
        self.conditions = wanted["conditions"]

    async def delete(self) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self._uid},
        }
        try:
            await self._api.delete(self._path, options)
        except NodeApiError as error:
            if not _is_gone(error):
                raise


def _is_gone(error: NodeApiError) -> bool:
    """Whether the object does not exist, or another has its name: the watch reports it."""
    # A deletion of another uid is a conflict, a patch of it an attempt to change the uid.
    changes_uid = error.status == 422 and "metadata.uid" in str(error)
    return error.status in (404, 409) or changes_uid
