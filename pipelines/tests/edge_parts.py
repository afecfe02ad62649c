"""Logs and servers of one column, and what a process has open."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
from reader_parts import read_once

from rekindle.identity import Identity
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import PATH, ReadRequest

ADDRESS = "127.0.42.1"
SCHEMA = pa.schema([("n", pa.int64())])
IDENTITY = Identity("uid-a", "token-a")


def batch(epoch: int, partition: int = 0, rows: int = 3) -> EpochBatch:
    table = pa.table({"n": np.arange(rows) + epoch}, schema=SCHEMA)
    return EpochBatch("s", partition, epoch, epoch, table, digest_table(table))


def make_log(directory: Path, partition: int = 0, **options: object) -> OutputLog:
    return OutputLog(directory / str(partition), "s", partition, SCHEMA, **options)  # type: ignore[arg-type]


def threads() -> set[threading.Thread]:
    """Those that Python started; Arrow and its allocator start theirs when they like, for good."""
    return set(threading.enumerate())


def open_sockets() -> set[str]:
    """Each by its identity: one that an earlier test has left may be closed at any time."""
    links = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(path.readlink().name)
    return {link for link in links if link.startswith("socket:")}


def read(server: StreamServer, request: ReadRequest, timeout_s: float = 10) -> list[int]:
    address = f"{ADDRESS}:{server.port}"
    return [e.epoch for e in read_once(address, request, timeout_s, IDENTITY).epochs]


def ask(server: StreamServer, request: ReadRequest) -> socket.socket:
    """A connection that has sent a request, and reads nothing."""
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connected.connect((ADDRESS, server.port))
    body = json.dumps(request.message(IDENTITY)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-a\r\n"
    connected.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connected


def closed_within(connected: socket.socket, seconds: float) -> bool:
    connected.settimeout(seconds)
    try:
        while connected.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True
