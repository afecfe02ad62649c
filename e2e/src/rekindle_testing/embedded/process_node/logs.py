"""Reads a container's log for `kubectl logs`.

Knows the file format of `shim.Log` and its rotation, nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The query of a request for logs, as kubectl sends it."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    limit_bytes: int | None = None
    since: float | None = None

    @classmethod
    def parse(cls, query: Mapping[str, str], now: float) -> LogQuery:
        since = None
        if seconds := query.get("sinceSeconds"):
            since = now - int(seconds)
        elif moment := query.get("sinceTime"):
            since = _seconds(moment)
        return cls(
            follow=_flag(query, "follow"),
            previous=_flag(query, "previous"),
            timestamps=_flag(query, "timestamps"),
            tail_lines=int(query["tailLines"]) if "tailLines" in query else None,
            limit_bytes=int(query["limitBytes"]) if "limitBytes" in query else None,
            since=since,
        )


async def read(path: Path, query: LogQuery, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Pieces of the log; with `follow`, until `is_over` returns True."""
    left = query.limit_bytes
    async for line in _lines(path, query, is_over):
        piece = render(line, query)
        if piece is None:
            continue
        if left is not None:
            piece = piece[:left]
            left -= len(piece)
        yield piece
        if left == 0:
            return


def render(line: bytes, query: LogQuery) -> bytes | None:
    """One line of the file as the user sees it; None if it is too old."""
    stamp, _, rest = line.partition(b" ")
    _, _, rest = rest.partition(b" ")
    tag, _, text = rest.partition(b" ")
    if query.since is not None and _seconds(stamp.decode()) < query.since:
        return None
    end = b"" if tag == b"P" else b"\n"  # P: a part of a line
    return (stamp + b" " if query.timestamps else b"") + text + end


async def _lines(path: Path, query: LogQuery, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    while query.follow and not path.exists() and not is_over():
        await asyncio.sleep(_POLL_S)
    if not path.exists():
        return
    rotated = path.with_name(path.name + ".1")
    with contextlib.ExitStack() as open_files:
        file = open_files.enter_context(path.open("rb"))
        head, newline, rest = file.read().rpartition(b"\n")
        # By \n alone: a progress bar's \r is part of its line.
        old = rotated.read_bytes().split(b"\n")[:-1] if rotated.exists() else []
        lines = [*old, *(head.split(b"\n") if newline else [])]
        if query.tail_lines is not None:
            lines = lines[max(0, len(lines) - query.tail_lines) :]
        for line in lines:
            yield line
        if query.follow:
            async for line in _follow(path, file, rest, is_over):
                yield line


async def _follow(
    path: Path, first: BinaryIO, rest: bytes, is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """The lines after those that were read of `first`; `rest`: the begin of the next line."""
    file = first
    with contextlib.ExitStack() as open_files:
        while True:
            # Checked before reading: lines that are written until then are still read.
            over, rotated = is_over(), _is_rotated(path, file)
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                yield line
            if lines:
                continue
            if rotated:
                file = open_files.enter_context(path.open("rb"))
            elif over:
                return
            else:
                await asyncio.sleep(_POLL_S)


def _is_rotated(path: Path, file: BinaryIO) -> bool:
    """Whether another file than this one is at the path."""
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:  # the shim has not created the next one yet
        return False


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in ("true", "1")


def _seconds(stamp: str) -> float:
    """Seconds since 1970 of a time in RFC 3339 and UTC, with or without a fraction."""
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    seconds = calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S"))
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)
