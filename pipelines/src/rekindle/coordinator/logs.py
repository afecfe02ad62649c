"""JSON logs on standard output, one object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_json(**fields: object) -> None:
    """Send all logs to standard output; `fields` are part of each line."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter(**fields))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
