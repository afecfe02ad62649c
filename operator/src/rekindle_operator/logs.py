"""JSON logs on stdout, one object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

# Their retries are told by whoever gives up.
_QUIET = {
    "urllib3.connectionpool": logging.ERROR,
    "leaderelection": logging.ERROR,
    "kubernetes.informer": logging.CRITICAL,
}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(least)
    for name in ("kopf", "urllib3", "aiohttp", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
