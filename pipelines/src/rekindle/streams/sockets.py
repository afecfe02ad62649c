"""Options of the sockets between tasks: buffers that do not grow, and peers that are gone.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import contextlib
import resource
import socket

BUFFER_BYTES = 256 << 10
"""Size of the kernel's send buffer and of its receive buffer, which would grow to 6 MiB each. It
suffices for 250 MB/s at a round trip of 1 ms."""
BACKLOG = 512
"""Connections that wait to be accepted."""
MAX_DESCRIPTORS = 1 << 16
GONE_AFTER_S = 10
"""A peer that acknowledges nothing for this long is gone: its machine or the network is lost."""

_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def raise_descriptor_limit() -> int:
    """Raise this process's own limit of open descriptors as far as it may, at most to
    MAX_DESCRIPTORS; returns the limit. It is 1,024 by default, for the sake of programs that use
    `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return soft


def listen(address: str, port: int) -> socket.socket:
    """A socket that accepts connections; `::` accepts IPv4 too. Raises OSError."""
    family, kind, protocol, _, to = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _set_buffers(made)  # connections have those of the socket that accepts them
        made.bind(to)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def set_options(connected: socket.socket) -> None:
    """Set the options of one connection."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_buffers(connected)
    for name, value in (*_KEEPALIVE.items(), ("TCP_USER_TIMEOUT", GONE_AFTER_S * 1000)):
        if (option := getattr(socket, name, None)) is not None:  # Linux
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _set_buffers(target: socket.socket) -> None:
    target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
