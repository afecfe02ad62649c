"""Leader election of the operator's replicas: the I/O around `election`.

Only the leader acts; the others keep their caches up to date. A leader that loses the Lease
continues in the same process as a replica that does not lead: actions that it has decided are not
executed any more (`may_act`), and the control loop waits until it leads again.

Design: docs/design/kubernetes.md#leader.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle_operator.election import CallSpan, Candidate
from rekindle_operator.lease import (
    deployment_path,
    lease_body,
    lease_path,
    owner_reference,
    read_lease,
    released,
)
from rekindle_operator.metrics import LEADER
from rekindle_operator.settings import Election

_TIMEOUT_S = 1.0  # at least, to connect and to read: a frozen API server counts as unreachable
_RELEASE_TIMEOUT_S = 4.0
_OUTAGE_S = 2.0  # a single late response is no outage
_OWNER_RETRY_S = 30.0
_OWNER_REFRESH_S = 1.0  # while there is no Lease, or no response
_OWNER_TIMEOUT_S = 5.0  # to connect, and to read
_OWNER_TIMEOUT_OF_HOLDER_S = 0.3  # it has to renew its Lease meanwhile

logger = logging.getLogger(__name__)


def monotonic_s() -> float:
    """Includes the time that the machine sleeps, where the system has such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Leader:
    """The election as one replica takes part in it, whether it leads or not. `on_api_recovered` is
    called when the API server responds again after an outage. A replica that is not `ready` reads
    the Lease but does not take it. A leader that is not `healthy` lets the Lease expire, so that
    another replica leads."""

    def __init__(
        self,
        api: client.ApiClient,
        election: Election,
        on_api_recovered: Callable[[], None],
        ready: Callable[[], bool] = lambda: True,
        healthy: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._clock = clock
        self._healthy = healthy
        self._ready = ready
        self._api = api
        self._election = election
        self._on_api_recovered = on_api_recovered
        self._lock = threading.Lock()
        timing = election.timing
        self._candidate = Candidate(election.identity, uuid.uuid4().hex, timing)
        # Two renewals fit in before a leader stops acting; longer timings are for slow servers.
        self._timeout_s = max(_TIMEOUT_S, (timing.renew_deadline_s - timing.renew_s) / 2)
        self._unreachable_since: float | None = None
        self._released = False
        self._thread: threading.Thread | None = None
        self._acquired_at = 0.0
        self._owner: dict[str, Any] | None = None
        self._owner_read_due_at = float("-inf")
        self._may_set_owner = True
        self._found_owners: list[dict[str, Any]] = []  # of the Lease
        self._leading_event = threading.Event()
        self._pass_term: int | None = None

    # --- for the control loop and the executor ----------------------------------

    @property
    def leading(self) -> bool:
        """False also if this process was paused for longer than its Lease lasts."""
        if not self._election.enabled:
            return True
        with self._lock:
            return not self._released and self._candidate.leads(self._clock())

    def wait_leading(self, timeout_s: float) -> bool:
        if not self._election.enabled:
            return True
        return self._leading_event.wait(timeout_s) and self.leading

    @property
    def term(self) -> int:
        with self._lock:
            return self._candidate.term

    def begin_pass(self) -> int:
        """Actions decided from now on may be executed while this term lasts. Returns the term."""
        self._pass_term = self.term
        return self._pass_term

    def may_act(self) -> bool:
        """Checked before each action: what was decided in an earlier term is not executed."""
        return self.leading and self._pass_term == self.term

    # --- lifecycle ------------------------------------------------------------------

    def start(self) -> None:
        if not self._election.enabled:
            LEADER.set(1)
            return
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """At shutdown: let another replica lead at once."""
        self._released = True
        self._leading_event.clear()
        LEADER.set(0)
        if self._thread is not None:
            self._thread.join(_RELEASE_TIMEOUT_S)  # a renewal may be in progress
        # A new Lease by which no replica has led must not be released: an earlier leader may still
        # act.
        if self._candidate.seen is None or not self._candidate.has_led_by_its_lease:
            return
        try:
            self._put(released(self._candidate.seen))
        except (ApiException, HTTPError) as error:
            logger.warning("the Lease could not be released: %s", error)

    def _run(self) -> None:
        while not self._released:
            time.sleep(self.call_once())

    def call_once(self) -> float:
        """Make the next call, and return how long to wait before the one after it, in seconds."""
        before = self._candidate
        self.find_owner()
        try:
            self.step()
        except Exception:
            logger.exception("leader election failed; it is tried again")
            return self._election.timing.retry_s + self._candidate.pause_s()
        may_take_now = not before.wants_to_write() and self._candidate.wants_to_write()
        return 0.0 if may_take_now and self._ready() else self._candidate.pause_s()

    def find_owner(self) -> None:
        """Read the operator's own Deployment, of which the Lease is a dependent: otherwise it would
        stay after `helm uninstall`. Every replica reads it at its start, since one that takes the
        Lease during an uninstallation would not find it any more. It is read again while there is
        no Lease: with the uid of a Deployment that was replaced while its pods stayed
        (`--cascade=orphan`), the garbage collector would delete each new Lease."""
        now = self._clock()
        name = self._election.deployment
        is_known = self._owner is not None and not self._candidate.lease_is_absent
        if not name or is_known or now < self._owner_read_due_at:
            return
        is_holder = self._candidate.is_holder
        timeout_s = _OWNER_TIMEOUT_OF_HOLDER_S if is_holder else _OWNER_TIMEOUT_S
        self._owner_read_due_at = now + _OWNER_RETRY_S
        try:
            path = deployment_path(self._election.namespace, name)
            found = self._request("GET", path, timeout_s=(timeout_s, timeout_s))
        except (ApiException, HTTPError) as error:
            if isinstance(error, HTTPError) and not is_holder:
                self._owner_read_due_at = now + _OWNER_REFRESH_S
            logger.warning(
                "the Lease is not deleted with the Deployment %s: %s", name, _reason(error)
            )
            return
        if found is not None:
            self._owner = owner_reference(found)
            self._owner_read_due_at = now + _OWNER_REFRESH_S

    def step(self) -> None:
        """Make one call to the API server and update the state."""
        before = self._candidate
        began = self._clock()
        try:
            after = self._call(before)
        except (ApiException, HTTPError) as error:
            if self._unreachable_since is None:
                self._unreachable_since = began
            after = before.after_failure(CallSpan(began, self._clock()))
            if before.is_holder:
                logger.warning("the Lease could not be renewed: %s", _reason(error))
        else:
            self._note_response()
        with self._lock:
            self._candidate = after
        self._set_leading(before, after)

    def _call(self, before: Candidate) -> Candidate:
        began = self._clock()
        if before.wants_to_write() and self._healthy() and (before.is_holder or self._ready()):
            wanted = before.record_to_write()
            raw = self._put(wanted) if wanted.version else self._create(wanted)
            span = CallSpan(began, self._clock())
            if raw is None:
                return before.after_conflict()
            self._note_owners(raw)
            return before.after_write(read_lease(raw), span)
        raw = self._request("GET", lease_path(self._election.namespace, self._election.name))
        span = CallSpan(began, self._clock())
        self._note_owners(raw)
        return before.after_read(None if raw is None else read_lease(raw), span)

    def _note_owners(self, raw: dict[str, Any] | None) -> None:
        self._found_owners = (raw or {}).get("metadata", {}).get("ownerReferences") or []

    def _note_response(self) -> None:
        since, self._unreachable_since = self._unreachable_since, None
        if since is not None and self._clock() - since > _OUTAGE_S:
            self._on_api_recovered()

    def _set_leading(self, before: Candidate, after: Candidate) -> None:
        led, leads = self._leading_event.is_set(), after.leads(self._clock())
        if leads and after.term != before.term:
            silence = f", {before.unchanged_s:.1f} s after the last renewal of the previous holder"
            logger.info("%s is the leader (term %d%s)", after.identity, after.term, silence)
            self._acquired_at = time.time()
        if leads and not led and not self._released:
            LEADER.set(1)
            self._leading_event.set()
        elif led and not leads:
            LEADER.set(0)
            self._leading_event.clear()
            logger.warning(
                "%s is no longer the leader: %s",
                after.identity,
                _why_not_leading(after, self._unreachable_since),
            )

    # --- the API --------------------------------------------------------------------

    def _create(self, record: Any) -> dict[str, Any] | None:
        self._acquired_at = time.time()
        return self._request("POST", lease_path(self._election.namespace), self._body(record))

    def _put(self, record: Any) -> dict[str, Any] | None:
        path = lease_path(self._election.namespace, self._election.name)
        body = self._body(record)
        try:
            return self._request("PUT", path, body)
        except ApiException as error:
            owners = body["metadata"].get("ownerReferences", [])
            if error.status == 403 and owners != self._found_owners:
                # OwnerReferencesPermissionEnforcement: only who may delete it may change owners.
                logger.warning("the owner of the Lease stays as it is: %s", _reason(error))
                self._may_set_owner = False
            raise

    def _body(self, record: Any) -> dict[str, Any]:
        """The owners stay as they are unless this replica knows a better one and may set it."""
        now = time.time()
        acquired = self._acquired_at or now
        namespace, name = self._election.namespace, self._election.name
        may_set = self._owner is not None and (self._may_set_owner or not record.version)
        owners = [self._owner] if self._owner is not None and may_set else self._found_owners
        return lease_body(namespace, name, record, now, min(acquired, now), owners)

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: tuple[float, float] | None = None,
    ) -> dict[str, Any] | None:
        """None for the statuses 404 and 409. `timeout_s`: to connect, to read."""
        timeout_s = timeout_s or (self._timeout_s, self._timeout_s)
        request = self._api.param_serialize(
            method,
            path,
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self._api.call_api(*request, _request_timeout=timeout_s)
        text = response.read()  # type: ignore[no-untyped-call]
        if response.status in (404, 409):
            return None
        if not 200 <= response.status <= 299:
            raise ApiException(status=response.status, reason=f"{response.reason} {text[:300]!r}")
        return dict(json.loads(text))


def _why_not_leading(candidate: Candidate, unreachable_since: float | None) -> str:
    if candidate.seen is not None and candidate.seen.holder != candidate.identity:
        return f"{candidate.seen.holder or 'no replica'} holds the Lease"
    if unreachable_since is not None:
        return "the API server does not respond"
    return "its Lease was not renewed in time"


def _reason(error: Exception) -> str:
    return f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
