"""A mirror of one kind of object, kept by the client's SharedInformer.

The informer lists, watches and says DELETED for what a relist no longer has; it works on the API's
JSON, since the client's classes cost milliseconds a pod. It keeps every object that it is given, to
be read by nobody; so what it keeps is cut down to what tells one object from another. This
process's own writes go in as the API server answers them (`put`), so a pass never acts on what the
pass before has changed.

A connection that died without a word looks like a cluster in which nothing happens. So the server
ends each watch after a few seconds, and one that is not ended in time is given up and opened again
where it stopped, which costs no list.

Design: docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

from kubernetes.client.exceptions import ApiException
from kubernetes.informer import ADDED, DELETED, MODIFIED, SharedInformer
from urllib3.exceptions import HTTPError

from rekindle_operator.cluster.convert import Json, version_of

_CONNECT_S = 5
_LIST_S = 30
_WATCH_S = 5  # after which the server ends a watch
_SILENT_WATCH_S = 8  # a connection that died without a word; longer than that
_RELIST_S = 45  # a list corrects what a watch may have missed
_MOST_DELETED = 10_000  # uids kept; a list takes less time than so many deletions
_RETRY_S = 1.0  # the informer itself retries a broken watch at once, without end

logger = logging.getLogger(__name__)


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=Versioned)


class Mirror(Generic[V]):
    """`list_call` is a client's `list_...` method; `view` makes the immutable view of an object."""

    def __init__(
        self,
        name: str,
        list_call: Callable[..., Any],
        view: Callable[[Json], V],
        changed: Callable[[], None],
        **selectors: str,
    ) -> None:
        self.name = name
        self._list_call = list_call
        self._view = view
        self._changed = changed
        self._selectors = selectors
        self._lock = threading.Lock()
        self._views: dict[tuple[str, str], V] = {}
        # A list that was answered before a deletion, and read after it, brings nothing back.
        self._deleted: deque[str] = deque(maxlen=_MOST_DELETED)
        self._synced = threading.Event()
        self._listed_at = self._heard_at = time.monotonic()
        self._informer = SharedInformer(self._request, resync_period=_RELIST_S)  # type: ignore[no-untyped-call]
        for kind, handler in ((ADDED, self._seen), (MODIFIED, self._seen), (DELETED, self._remove)):
            self._informer.add_event_handler(kind, handler)  # type: ignore[no-untyped-call]

    @property
    def synced(self) -> bool:
        return self._synced.is_set()

    @property
    def age_s(self) -> float:
        """Since the API server was last heard: an answer to a list or a watch, or an event."""
        return time.monotonic() - self._heard_at

    def start(self) -> None:
        self._informer.start()  # type: ignore[no-untyped-call]

    def views(self) -> tuple[V, ...]:
        with self._lock:
            return tuple(self._views.values())

    def put(self, raw: Json) -> None:
        """An object as the API server has it; older than what is known: ignored."""
        key, fresh = _key(raw), self._read(raw)
        if fresh is None:
            return
        with self._lock:
            known = self._views.get(key)
            if known is not None and known.version >= fresh.version:
                return
            self._views[key] = fresh
        self._changed()

    def _read(self, raw: Json) -> V | None:
        """None: its author wrote what this version cannot read. What was known of it stays, and
        other objects are not concerned."""
        try:
            return self._view(raw)
        except Exception as fault:
            logger.error("%s %s cannot be read: %r", self.name, "/".join(_key(raw)), fault)
            return None

    def _seen(self, raw: dict[str, Any]) -> None:
        """By the informer, which has `raw` in its cache already."""
        if isinstance(raw, _Listed):
            return  # `replace` has taken it in
        self._heard_at = time.monotonic()
        try:
            self.put(raw)
        finally:
            rest = _identity(raw)
            raw.clear()
            raw.update(rest)

    def forget(self, raw: Json) -> None:
        """The API server has deleted it for good."""
        self._remove(raw)

    def drop(self, namespace: str, name: str, uid: str | None = None) -> None:
        """A read of the API server has not found it; `uid`: another one may have the name."""
        with self._lock:
            known = self._views.get((namespace, name))
            if known is None or (uid is not None and getattr(known, "uid", uid) != uid):
                return
            del self._views[namespace, name]
        self._changed()

    def _remove(self, raw: Json) -> None:
        self._heard_at = time.monotonic()
        key, meta = _key(raw), raw["metadata"]
        with self._lock:
            # With finalizers it is still there, whatever the answer to its deletion was.
            if meta.get("uid") is not None and not meta.get("finalizers"):
                self._deleted.append(meta["uid"])
            known = self._views.get(key)
            if known is not None and known.version > version_of(raw):
                return  # another object took the name since
            self._views.pop(key, None)
        self._changed()

    def replace(self, items: Sequence[Json], version: int) -> None:
        """All that there is, as a list has it at that version."""
        listed = [(raw["metadata"].get("uid"), _key(raw), self._read(raw)) for raw in items]
        unread = {key for _, key, view in listed if view is None}
        with self._lock:
            deleted = set(self._deleted)
            fresh = {
                key: view
                for uid, key, view in listed
                if view is not None and (uid is None or uid not in deleted)
            }
            # What a list finds unchanged keeps the view of it, and when that was first seen.
            known = {
                k: v
                for k, v in self._views.items()
                if v.version > version
                or k in unread
                or (k in fresh and fresh[k].version == v.version)
            }
            self._views = fresh | known
        self._synced.set()
        self._changed()

    def _request(self, **arguments: Any) -> Any:
        """The API call behind the informer.

        :return: object
        """
        try:
            if arguments.get("watch"):
                if time.monotonic() - self._listed_at >= _RELIST_S:
                    self.relist()
                return self._open_watch(arguments)
            items, version = self.relist(**arguments)
        except (ApiException, HTTPError):
            time.sleep(_RETRY_S)
            raise
        listed = [_Listed(_identity(raw)) for raw in items]
        return SimpleNamespace(items=listed, metadata=SimpleNamespace(resource_version=version))

    def _open_watch(self, arguments: dict[str, Any]) -> Any:
        call = {**self._selectors, **arguments, "_preload_content": False}
        call["timeout_seconds"] = _WATCH_S
        response = self._list_call(**call, _request_timeout=(_CONNECT_S, _SILENT_WATCH_S))
        if response.status == 200:
            self._heard_at = time.monotonic()
        elif response.status != 410:
            time.sleep(_RETRY_S)
        return response

    def relist(self, **arguments: Any) -> tuple[Sequence[Json], str]:
        """Replace all views by what the API server has now; may be called from any thread. Raises
        ApiException or HTTPError."""
        call = {**self._selectors, **arguments, "_preload_content": False}
        response = self._list_call(**call, _request_timeout=(_CONNECT_S, _LIST_S))
        if response.status != 200:
            raise ApiException(status=response.status, reason=response.reason)
        answer = json.loads(response.data)
        version = str(answer["metadata"]["resourceVersion"])
        items: Sequence[Json] = answer.get("items") or []
        self.replace(items, int(version))
        self._listed_at = self._heard_at = time.monotonic()
        return items, version


class _Listed(dict[str, Any]):
    """An object of a list, cut down."""


def _identity(raw: Json) -> dict[str, Any]:
    """What the informer needs to tell that the object is gone, and `_remove` which it was."""
    meta = raw["metadata"]
    kept = ("namespace", "name", "uid", "resourceVersion")
    return {"metadata": {key: meta[key] for key in kept if key in meta}}


def _key(raw: Json) -> tuple[str, str]:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]
