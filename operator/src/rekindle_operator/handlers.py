"""Kopf: it watches StreamTopology, and nothing else.

`on.event` only: no finalizers, daemons or timers, which would hang deletion while the operator is
down. Events mark dirty; the one loop reconciles.

Design: docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

from typing import Any

import kopf

from rekindle import names
from rekindle_operator.cluster.cache import ClusterCache


def make_registry(cluster: ClusterCache) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def seen(event: Any, **_: Any) -> None:
        if event["type"] == "DELETED":
            cluster.remove_topology(event["object"]["metadata"]["uid"])
        else:
            cluster.put_topology(event["object"])

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_via_client(**kwargs)

    return registry


def make_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True  # the Lease decides who acts
    settings.posting.enabled = False  # Events are ours, with stable reasons
    settings.scanning.disabled = True  # the CRD is there before Kopf starts
    # A stalled connection is given up soon; the next watch goes on where it stopped, and costs no
    # list.
    settings.watching.server_timeout = 5
    settings.watching.client_timeout = 8
    settings.watching.connect_timeout = 5
    settings.networking.request_timeout = 15
    settings.networking.connect_timeout = 5
    return settings
