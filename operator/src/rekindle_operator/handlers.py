"""Kopf's handlers: the process begins to work, and ends in order.

Kopf runs the process: its event loop, signals, what happens before the end. It watches nothing, so
its finalizers, daemons and timers, which would block a deletion while the operator is down, cannot
be used by mistake.

Design: docs/design/kubernetes.md#watching, docs/decisions/0035.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf


def make_registry(begin: Callable[[], None], end: Callable[[], None]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    def started(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False  # the operator writes Events itself, with stable reasons
        settings.scanning.disabled = True  # there is no resource to find
        settings.networking.request_timeout = 15
        settings.networking.connect_timeout = 5
        begin()

    @kopf.on.cleanup(registry=registry)
    def stopped(**_: Any) -> None:
        end()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_via_client(**kwargs)

    return registry
