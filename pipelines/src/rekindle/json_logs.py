"""Logs as JSON on standard output, one object on each line, the same for every process of Rekindle.

Each line has `time` (UTC, milliseconds), `level`, `logger` and `message`, then the fields of the
process; `exception` if there is one. Standard library only: the watchdog uses it too.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        # A file name that is not UTF-8 has lone surrogates; `\udc80` is valid in JSON.
        return text.encode("utf-8", "backslashreplace").decode()


def configure_logging(
    level: int | str = logging.INFO,
    logger_levels: Mapping[str, int] | None = None,
    **fields: object,
) -> None:
    """Replace all handlers of this process. `logger_levels`: lowest level by logger name; `fields`
    are part of each line."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter(**fields))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name, lowest in (logger_levels or {}).items():
        logging.getLogger(name).setLevel(lowest)
