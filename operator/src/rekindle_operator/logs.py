"""Which loggers of the operator's libraries are quiet. Standard library only: the watchdog uses it
too."""

from __future__ import annotations

import logging

from rekindle.json_logs import configure_logging

_QUIET = {
    # They log each retry; the caller logs the error when it gives up.
    "urllib3.connectionpool": logging.ERROR,
    "kubernetes.informer": logging.CRITICAL,
    "kopf": logging.WARNING,
    "urllib3": logging.WARNING,
    "aiohttp": logging.WARNING,
    "asyncio": logging.WARNING,
}


def set_up_logging(level: str) -> None:
    configure_logging(level, _QUIET)
