"""One of the operator's replicas acts: a Lease (design §13; Kopf's peering is no election).

The others keep their mirrors warm. Whoever loses the Lease ends its process: nothing of an old
leader lives on in threads.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.leaderelection.electionconfig import Config
from kubernetes.leaderelection.leaderelection import LeaderElection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock
from urllib3.exceptions import HTTPError

from rekindle_operator.metrics import LEADER
from rekindle_operator.settings import Election

_TIMEOUT_S = (2, 2)  # a frozen API server must look like one that is away

logger = logging.getLogger(__name__)


class _Impatient:
    """The Lease API with a timeout on every call: the library gives none."""

    def __init__(self, api: client.CoordinationV1Api) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._api, name), _request_timeout=_TIMEOUT_S)


class Lease(LeaseLock):
    """Connection errors count as refusals, and the last success is remembered."""

    def __init__(
        self, api: client.ApiClient, election: Election, returned: Callable[[], None]
    ) -> None:
        super().__init__(election.name, election.namespace, election.identity)  # type: ignore[no-untyped-call]
        self.api_instance: Any = _Impatient(client.CoordinationV1Api(api))
        self.renewed_at = -1e9  # monotonic
        self._returned = returned
        self._away = False

    def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = super().get(name, namespace)  # type: ignore[no-untyped-call]
        except HTTPError as error:
            self._away = True
            return False, ApiException(status=0, reason=str(error))
        if self._away and (answer[0] or answer[1].status == 404):
            self._away = False
            self._returned()
        return answer

    def create(self, name: str, namespace: str, election_record: Any) -> bool:
        return self._write(super().create, name, namespace, election_record)

    def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        return self._write(super().update, name, namespace, updated_record)

    def _write(self, write: Callable[..., bool], name: str, namespace: str, record: Any) -> bool:
        started = time.monotonic()
        try:
            done = write(name, namespace, record)
        except HTTPError as error:
            logger.warning("the Lease could not be written: %s", error)
            return False
        if done:
            self.renewed_at = started
        return done


class Leader:
    """`lead` runs, in a thread, once this replica is the leader; it never returns."""

    def __init__(
        self, api: client.ApiClient, election: Election, returned: Callable[[], None]
    ) -> None:
        self._election = election
        self._lease = Lease(api, election, returned)

    @property
    def leading(self) -> bool:
        """Certainly: a process that was stopped for longer than its Lease is not."""
        if not self._election.enabled:
            return True
        return time.monotonic() - self._lease.renewed_at < self._election.lease_s

    def start(self, lead: Callable[[], None]) -> None:
        if not self._election.enabled:
            threading.Thread(target=_or_die, args=(lead,), name="control", daemon=True).start()
            return
        config = Config(  # type: ignore[no-untyped-call]
            self._lease,
            lease_duration=self._election.lease_s,
            renew_deadline=self._election.renew_deadline_s,
            retry_period=self._election.retry_s,
            onstarted_leading=lambda: self._lead(lead),
            onstopped_leading=_end,
        )
        election = LeaderElection(config)  # type: ignore[no-untyped-call]
        target = functools.partial(_or_die, election.run)
        threading.Thread(target=target, name="election", daemon=True).start()

    def release(self) -> None:
        """Let another replica lead at once; for an orderly end."""
        if not self._election.enabled or not self.leading:
            return
        body = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            self._lease.api_instance.patch_namespaced_lease(
                self._election.name, self._election.namespace, body
            )
        except (ApiException, HTTPError) as error:
            logger.warning("the Lease could not be released: %s", error)

    def _lead(self, lead: Callable[[], None]) -> None:
        logger.info("%s leads", self._election.identity)
        LEADER.set(1)
        _or_die(lead)


def _or_die(run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException:
        logger.exception("the operator cannot go on")
    _end()


def _end() -> None:
    """At once, from whichever thread: an orderly end would let other threads act on."""
    logger.error("this replica does not lead any more; ending")
    logging.shutdown()
    os._exit(1)
