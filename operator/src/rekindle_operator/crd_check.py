"""Compares the CRD that the API server serves with the one that this operator was built with.

It reads the OpenAPI document of the resource's version, as every authenticated user may: the
operator has no right to read CRDs. Only the start of the process waits for the comparison.

Design: docs/design/kubernetes.md#older-crds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from rekindle import names
from rekindle_operator.cluster.calls import call
from rekindle_operator.crd_fields import Schema, missing_fields, required_missing_fields
from rekindle_operator.metrics import CRD_MISSING_FIELDS

_PATH = f"/openapi/v3/apis/{names.API_VERSION}"
_TIMEOUT_S = (1, 5)  # to connect, to read
_PAUSE_S = 1.0  # between two comparisons, however often one is requested
_UPGRADE = "kubectl apply --server-side --force-conflicts -f charts/rekindle/crds/"

logger = logging.getLogger(__name__)


class CrdCheck:
    """`on_result` gets the paths that are missing (`crd_fields`), whenever they have changed."""

    def __init__(
        self,
        api: client.ApiClient,
        on_result: Callable[[tuple[str, ...]], None],
        interval_s: float,
    ) -> None:
        self._api = api
        self._on_result = on_result
        self._interval_s = interval_s
        self._missing: tuple[str, ...] = ()
        self._failed = False
        self._requested = threading.Event()

    def request(self) -> None:
        """Compare soon: this replica leads now, or the API server has refused a status."""
        self._requested.set()

    def run(self) -> None:
        while True:
            self._requested.wait(self._interval_s)
            self._requested.clear()
            self.compare()
            time.sleep(_PAUSE_S)

    def compare(self) -> None:
        """Compare now. If that fails, the result of the last comparison stays."""
        try:
            served = served_schema(call(self._api, "GET", _PATH, timeout_s=_TIMEOUT_S) or {})
            missing = missing_fields(packaged_schema(), served)
        except Exception as error:  # it ends neither the start nor the thread
            log = logger.debug if self._failed else logger.warning
            log("the CRD of this operator cannot be compared: GET %s: %s", _PATH, _reason(error))
            self._failed = True
            return
        self._failed = False
        CRD_MISSING_FIELDS.set(len(missing))
        if missing == self._missing:
            return
        self._missing = missing
        self._log()
        self._on_result(missing)

    def _log(self) -> None:
        if not self._missing:
            logger.info("the CRD in the cluster has all fields of this operator again")
            return
        message = (
            f"the CRD in the cluster is older than this operator: it lacks "
            f"{', '.join(self._missing)}; users cannot set these fields of spec, and those of "
            f"status are not written"
        )
        if required := required_missing_fields(self._missing):
            message += f"; without {', '.join(required)} no status is written and no pod created"
        logger.error("%s. Upgrade the CRD: %s", message, _UPGRADE)


@cache
def packaged_schema() -> Schema:
    """The schema of the resource in the CRD that is part of this package."""
    text = (resources.files("rekindle_operator") / "crd.yaml").read_bytes()
    versions = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    found = next(v for v in versions if v["name"] == names.VERSION)
    return dict(found["schema"]["openAPIV3Schema"])


def served_schema(document: Mapping[str, Any]) -> Schema:
    """The schema of the resource in an OpenAPI document. Raises LookupError if it is not there."""
    kind = {"group": names.GROUP, "version": names.VERSION, "kind": names.KIND}
    for schema in document["components"]["schemas"].values():
        if kind in schema.get("x-kubernetes-group-version-kind", ()):
            return dict(schema)
    raise LookupError(f"it has no {names.KIND}")


def _reason(error: Exception) -> str:
    return f"{error.status} {error.reason}" if isinstance(error, ApiException) else repr(error)
