"""Kopf's handlers: changes of StreamTopology objects go into the cache.

Only `on.event`: finalizers, daemons or timers would block a deletion while the operator is down.
Handlers decide nothing; the control loop reconciles.

Design: docs/design/kubernetes.md#watching, docs/decisions/0035.
"""

from __future__ import annotations

from typing import Any

import kopf

from rekindle import names
from rekindle_operator.cluster.cache import ClusterCache


def make_registry(cluster: ClusterCache) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def topology_changed(event: Any, **_: Any) -> None:
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
    settings.peering.standalone = True  # the leader election decides who acts
    settings.posting.enabled = False  # the operator writes Events itself, with stable reasons
    settings.scanning.disabled = True  # the CRD exists before Kopf starts
    # A stalled connection is closed soon. The next watch continues at the last version, which
    # needs no list.
    settings.watching.server_timeout = 5
    settings.watching.client_timeout = 8
    settings.watching.connect_timeout = 5
    settings.networking.request_timeout = 15
    settings.networking.connect_timeout = 5
    return settings
