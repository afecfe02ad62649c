"""Which loggers of the operator's libraries are quiet. Standard library only: the watchdog uses it
too."""

from __future__ import annotations

import logging

from rekindle.json_logs import configure_logging

_QUIET = {
    # What they retry is logged by the caller, when it gives up.
    "urllib3.connectionpool": logging.ERROR,
    "kubernetes.informer": logging.CRITICAL,
    "kopf": logging.WARNING,
    "urllib3": logging.WARNING,
    "aiohttp": logging.WARNING,
    "asyncio": logging.WARNING,
}


def set_up_logging(level: str) -> None:
    configure_logging(level, _QUIET)
