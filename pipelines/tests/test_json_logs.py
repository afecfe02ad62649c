"""The JSON lines that every process logs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.json_logs import JsonFormatter, configure_logging


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("rekindle.x", logging.WARNING, "x.py", 1, message, args, **more)
    made.created = 0.1239
    return made


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield root
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_a_line_has_the_same_fields_everywhere() -> None:
    line = JsonFormatter(topology="flights").format(record("%s is late", "a", exc_info=None))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.123+00:00",
        "level": "warning",
        "logger": "rekindle.x",
        "message": "a is late",
        "topology": "flights",
    }


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("no such column")
    except ValueError:
        line = JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: no such column" in json.loads(line)["exception"]


def test_text_stays_readable_and_any_file_name_can_be_logged() -> None:
    line = JsonFormatter().format(record("größe-\udc80", exc_info=None))
    assert "größe" in line
    assert json.loads(line.encode())["message"] == "größe-\udc80"


def test_a_field_that_is_no_json_is_written_as_text() -> None:
    line = JsonFormatter(when=complex(1, 2)).format(record("x", exc_info=None))
    assert json.loads(line)["when"] == "(1+2j)"


def test_single_loggers_can_be_quiet(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("INFO", {"test.quiet": logging.ERROR}, fence=7)
    logging.getLogger("test.quiet").warning("hidden")
    logging.getLogger("test.loud").info("shown")
    lines = capsys.readouterr().out.splitlines()
    assert [(json.loads(line)["message"], json.loads(line)["fence"]) for line in lines] == [
        ("shown", 7)
    ]
