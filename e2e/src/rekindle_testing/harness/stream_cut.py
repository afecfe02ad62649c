"""Cuts a pod's output streams off from all their readers, by one nftables table of the host.

Only the port of streams is cut: the pod is polled by the coordinator and stays Live, as a source
that is disconnected without being stopped (DPC (Balazinska et al. 2005), section 5). Packets are
dropped, so readers get no error. For pods of process nodes, whose addresses are of this host.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.protocol import STREAM_PORT
from rekindle_testing.embedded.errors import EmbeddedError

_RULES = """
table inet {table} {{
  chain output {{
    type filter hook output priority -10; policy accept;
    ip daddr {address} tcp dport {port} drop
    ip saddr {address} tcp sport {port} drop
  }}
}}
"""


class StreamCutUnsupported(EmbeddedError):
    """This machine cannot drop packets; the message says what is missing."""


@contextmanager
def cut_streams(address: str) -> Iterator[None]:
    """Nobody reads from this pod address within the context. Raises StreamCutUnsupported."""
    table = "rekindle_cut_" + address.replace(".", "_")
    _nft("-f", "-", stdin=_RULES.format(table=table, address=address, port=STREAM_PORT))
    try:
        yield
    finally:
        _nft("delete", "table", "inet", table)


def _nft(*arguments: str, stdin: str = "") -> None:
    if shutil.which("nft") is None:
        raise StreamCutUnsupported("nft is missing: install the package nftables")
    done = subprocess.run(["nft", *arguments], input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        raise StreamCutUnsupported(
            f"nft {' '.join(arguments)} failed (it needs root): {done.stderr.strip()}"
        )
