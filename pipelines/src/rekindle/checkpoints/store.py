"""The checkpoint store: objects by name on any fsspec URL, created once and never replaced.

It has all durable state of Rekindle. The store's root gets a marker when it is first opened. If the
root is moved away later, every call fails with StoreError until it is back, and nothing is written
to a directory that replaced it. Credentials come from the environment (`AWS_*`).

Design: docs/design/checkpoints.md#the-store.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rekindle.errors import ObjectMissing, StoreError
from rekindle.objects import LocalObjects, ObjectInfo, Objects, Retry, open_objects, to_json

T = TypeVar("T")

MARKER = "_rekindle_store.json"


class UnreadableObject(StoreError):
    """An object is damaged, or of another version's format."""


class StateObjects(Protocol):
    """Where entries and state objects are. `url`: for messages."""

    url: str

    def put(self, name: str, data: bytes) -> bool: ...
    def get(self, name: str) -> bytes:
        """Raises ObjectMissing, StoreError."""
        ...

    def read(self, name: str) -> bytes:
        """As `get`, but ObjectMissing is certain."""
        ...


class Store:
    """See the module. Safe for many threads and many processes. Transient errors are retried with
    back-off, about a second in all; then StoreError, with the URL, is raised, and the caller
    decides how long to retry."""

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        retry: Retry | None = None,
        objects: Objects | None = None,
        **storage_options: Any,
    ) -> None:
        """Open the store. `create`: create it if it is missing; otherwise that is an error, so that
        a process that restarts during an outage does not create an empty store. `id` is random, and
        distinguishes a store from another one at the same URL. `objects` replaces the file system
        (tests)."""
        self.url = url.rstrip("/")
        self._retry = retry or Retry()
        try:
            self._objects = objects or open_objects(self.url, **storage_options)
        except (OSError, ValueError, ImportError) as e:
            raise StoreError(f"checkpoint store {self.url} cannot be opened: {e}") from e
        marker = to_json({"store": uuid.uuid4().hex}) if create else None
        found = self._call("cannot be opened", lambda: self._objects.open_root(MARKER, marker))
        self.id = _store_id(found)

    def put(self, name: str, data: bytes) -> bool:
        """Create `name`. False if it exists (with any content)."""
        return self._call(f"cannot write {name}", lambda: self._objects.put(name, data))

    def get(self, name: str) -> bytes:
        """The content of `name`. Raises ObjectMissing."""
        return self._call(f"cannot read {name}", lambda: self._objects.get(name))

    def read(self, name: str) -> bytes:
        """As `get`, but raises ObjectMissing only if a listing does not have the object either: if
        the whole store is unavailable for a while, such as a volume that is not mounted, the
        listing fails."""
        try:
            return self.get(name)
        except ObjectMissing:
            if any(info.name == name for info in self.list(name)):
                raise StoreError(f"{self.url}: {name} is listed, but cannot be read") from None
            raise

    def exists(self, name: str) -> bool:
        return self._call(f"cannot look for {name}", lambda: self._objects.exists(name))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Objects whose name starts with `prefix`, by name, without the store's marker."""
        found = self._call(f"cannot list {prefix}", lambda: self._objects.list(prefix))
        return [info for info in found if info.name != MARKER]

    def delete(self, name: str) -> None:
        """Delete `name`; does nothing if it is absent."""
        self._call(f"cannot delete {name}", lambda: self._objects.delete(name))

    def remove_stale_temps(self, prefix: str) -> int:
        """Delete old temporary files of failed writers below `prefix`. Returns their number."""
        if not isinstance(self._objects, LocalObjects):
            return 0
        local = self._objects
        return self._call("cannot be cleaned", lambda: local.remove_stale_temps(prefix))

    def _call(self, what: str, action: Callable[[], T]) -> T:
        try:
            return self._retry.run(action)
        except FileNotFoundError as e:
            raise ObjectMissing(f"checkpoint store {self.url} {what}: it does not exist") from e
        except Exception as e:  # errors of botocore and aiohttp are not OSErrors
            raise StoreError(f"checkpoint store {self.url} {what}: {e}{self._advice(e)}") from e

    def _advice(self, error: Exception) -> str:
        if not isinstance(error, PermissionError) or not self.url.startswith("file:"):
            return ""
        return (
            f"; this process is user {os.getuid()}, group {os.getgid()}: make one of them the "
            "volume's owner, or set podTemplate.spec.securityContext.fsGroup"
        )


def _store_id(marker: bytes) -> str:
    """The id in a marker; if it cannot be decoded, its bytes, because ids are only compared."""
    try:
        return str(json.loads(marker)["store"])
    except (ValueError, KeyError, TypeError):
        return marker[:64].hex()
