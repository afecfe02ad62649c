"""A local copy of all objects of one kind, updated by the client's SharedInformer.

The informer lists, watches, and reports DELETED for objects that a new list does not contain. It
gets JSON: the client's classes cost milliseconds for each pod. The informer stores every object for
readers that do not exist here, so its objects are reduced to their identity. Responses to this
process's own writes are stored too (`put`), so that a pass sees what the pass before has changed.

A broken connection without a reset looks like a cluster in which nothing happens. So each watch is
ended by the server after a few seconds; if it is not, it is closed. The next one begins after the
newest event or list, which needs no list. The informer itself knows only the version of its own
lists: the client tracks events only of calls whose result is one of its classes.

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

from rekindle_operator.cluster.convert import Json, version_of

_CONNECT_TIMEOUT_S = 5
_LIST_TIMEOUT_S = 30
_WATCH_TIMEOUT_S = 5  # after which the server ends a watch
_WATCH_READ_TIMEOUT_S = (
    8  # without a byte: the connection is broken; longer than `_WATCH_TIMEOUT_S`
)
_RELIST_INTERVAL_S = 45  # for changes that a watch has missed
_MAX_DELETED = 10_000  # uids; more deletions than happen during one list
_RETRY_S = 1.0  # the informer retries without any pause

logger = logging.getLogger(__name__)


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


V = TypeVar("V", bound=Versioned)


class Mirror(Generic[V]):
    """`list_call` is a client's `list_...` method; `view` makes the immutable view of an object.
    `on_view` gets the view that was known and its successor, in the order of their versions; None:
    there is none. It is called with a lock held, so it may not read this mirror."""

    def __init__(
        self,
        name: str,
        list_call: Callable[..., Any],
        view: Callable[[Json], V],
        on_change: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
        on_view: Callable[[V | None, V | None], None] = lambda known, view: None,
        label_selector: str = "",
    ) -> None:
        self.name = name
        self._list_call = list_call
        self._view = view
        self._on_change = on_change
        self._monotonic = monotonic
        self._on_view = on_view
        self._selectors = {"label_selector": label_selector} if label_selector else {}
        self._lock = threading.Lock()
        self._views: dict[tuple[str, str], V] = {}
        # A list from before a deletion that is read after it must not restore the object.
        self._deleted: deque[str] = deque(maxlen=_MAX_DELETED)
        self._version = 0  # all changes up to this one are known
        self._synced = threading.Event()
        self._listed_at = self._last_response_at = monotonic()
        self._informer = SharedInformer(self._request, resync_period=_RELIST_INTERVAL_S)  # type: ignore[no-untyped-call]
        for kind, handler in (
            (ADDED, self._on_changed),
            (MODIFIED, self._on_changed),
            (DELETED, self._on_deleted),
        ):
            self._informer.add_event_handler(kind, handler)  # type: ignore[no-untyped-call]

    @property
    def synced(self) -> bool:
        return self._synced.is_set()

    @property
    def age_s(self) -> float:
        """Since the last response or event of the API server."""
        return self._monotonic() - self._last_response_at

    def record_response(self) -> None:
        """The API server has responded, or sent an event."""
        self._last_response_at = self._monotonic()

    def start(self) -> None:
        self._informer.start()  # type: ignore[no-untyped-call]

    def views(self) -> tuple[V, ...]:
        with self._lock:
            return tuple(self._views.values())

    def put(self, raw: Json) -> None:
        """Store an object as the API server sent it; an older version is ignored."""
        key, fresh = _key(raw), self._read(raw)
        if fresh is None:
            return
        with self._lock:
            known = self._views.get(key)
            if known is not None and known.version >= fresh.version:
                return
            if known is None and raw["metadata"].get("uid") in self._deleted:
                return
            self._set(key, fresh)
        self._on_change()

    def _set(self, key: tuple[str, str], view: V | None) -> None:
        """With the lock held."""
        known = self._views.get(key)
        if view is not None:
            self._views[key] = view
        elif known is not None:
            del self._views[key]
        if view is not known:
            self._on_view(known, view)

    def _read(self, raw: Json) -> V | None:
        """None if the object cannot be parsed. Its last known version stays, and other objects are
        not affected."""
        try:
            return self._view(raw)
        except Exception as error:
            logger.error("%s %s cannot be parsed: %r", self.name, "/".join(_key(raw)), error)
            return None

    def _on_changed(self, raw: dict[str, Any]) -> None:
        """Called by the informer, which has stored `raw` already."""
        if isinstance(raw, _Listed):
            return  # `replace` has stored it
        self._advance_version(raw)
        try:
            self.put(raw)
        finally:
            rest = _identity(raw)
            raw.clear()
            raw.update(rest)

    def _on_deleted(self, raw: Json) -> None:
        """Called by the informer, also for what a new list does not contain."""
        self._advance_version(raw)
        self._remove(raw)

    def _advance_version(self, event: Json) -> None:
        """The next watch begins after this event."""
        self.record_response()
        with self._lock:
            self._version = max(self._version, version_of(event))

    def remove_deleted(self, raw: Json) -> None:
        """Remove an object: the response of its deletion, or the event."""
        self._remove(raw)

    def remove_not_found(self, namespace: str, name: str, uid: str | None = None) -> None:
        """Remove an object of which a read returned 404. With `uid`, an object of that name with
        another uid stays."""
        with self._lock:
            known = self._views.get((namespace, name))
            if known is None or (uid is not None and getattr(known, "uid", uid) != uid):
                return
            self._set((namespace, name), None)
        self._on_change()

    def _remove(self, raw: Json) -> None:
        key, meta = _key(raw), raw["metadata"]
        with self._lock:
            # An object with finalizers still exists after the request to delete it.
            if meta.get("uid") is not None and not meta.get("finalizers"):
                self._deleted.append(meta["uid"])
            known = self._views.get(key)
            if known is not None and known.version > version_of(raw):
                return  # a newer object has the name
            self._set(key, None)
        self._on_change()

    def replace(self, items: Sequence[Json], version: int) -> None:
        """Replace all objects by those of a list at that version."""
        listed = [(raw["metadata"].get("uid"), _key(raw), self._read(raw)) for raw in items]
        unparsable = {key for _, key, view in listed if view is None}
        with self._lock:
            deleted = set(self._deleted)
            fresh = {
                key: view
                for uid, key, view in listed
                if view is not None and (uid is None or uid not in deleted)
            }
            # An unchanged object keeps its view, which knows when it was first seen.
            known = {
                k: v
                for k, v in self._views.items()
                if v.version > version
                or k in unparsable
                or (k in fresh and fresh[k].version == v.version)
            }
            for key in [key for key in self._views if key not in fresh and key not in known]:
                self._set(key, None)
            for key, view in (fresh | known).items():
                self._set(key, view)
            self._version = version
        self._synced.set()
        self._on_change()

    def _request(self, **arguments: Any) -> Any:
        """Called by the informer, to list and to watch."""
        try:
            if arguments.get("watch"):
                if self._monotonic() - self._listed_at >= _RELIST_INTERVAL_S:
                    self.relist()
                return self._open_watch(arguments)
            items, version = self.relist(**arguments)
        except Exception as error:
            self.log_failed_list(error)
            time.sleep(_RETRY_S)
            raise
        listed = [_Listed(_identity(raw)) for raw in items]
        return SimpleNamespace(items=listed, metadata=SimpleNamespace(resource_version=version))

    def _open_watch(self, arguments: dict[str, Any]) -> Any:
        call = {**self._selectors, **arguments, "_preload_content": False}
        call |= {"resource_version": str(self._version), "timeout_seconds": _WATCH_TIMEOUT_S}
        response = self._list_call(
            **call, _request_timeout=(_CONNECT_TIMEOUT_S, _WATCH_READ_TIMEOUT_S)
        )
        if response.status == 200:
            self.record_response()
        elif response.status != 410:
            time.sleep(_RETRY_S)
        return response

    def log_failed_list(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, ApiException) else repr(error)
        hint = "; is the CRD installed?" if getattr(error, "status", None) == 404 else ""
        logger.warning("%s cannot be listed: %s%s", self.name, reason, hint)

    def relist(self, **arguments: Any) -> tuple[Sequence[Json], str]:
        """List all objects and replace what was known. Thread-safe."""
        call = {**self._selectors, **arguments, "_preload_content": False}
        response = self._list_call(**call, _request_timeout=(_CONNECT_TIMEOUT_S, _LIST_TIMEOUT_S))
        if response.status != 200:
            raise ApiException(status=response.status, reason=response.reason)
        listed = json.loads(response.data)
        version = str(listed["metadata"]["resourceVersion"])
        items: Sequence[Json] = listed.get("items") or []
        self.replace(items, int(version))
        self._listed_at = self._last_response_at = self._monotonic()
        return items, version


class _Listed(dict[str, Any]):
    """An object of a list, reduced to its identity."""


def _identity(raw: Json) -> dict[str, Any]:
    """What the informer needs to detect a deletion, and `_remove` to handle it."""
    meta = raw["metadata"]
    kept = ("namespace", "name", "uid", "resourceVersion")
    return {"metadata": {key: meta[key] for key in kept if key in meta}}


def _key(raw: Json) -> tuple[str, str]:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]
