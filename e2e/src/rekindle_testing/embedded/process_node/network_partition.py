"""Network partition of a node: one nftables table, on the host.

All nodes share the loopback interface, so addresses alone do not identify a node: a
client on it may have any source address.  Therefore the rules match the control group
of the socket, together with the node's address range.  Traffic within the node is not
affected.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rekindle_testing.embedded.errors import EmbeddedError

# Accept ends our chain only; nothing else of the machine's rules is touched.
_RULES = """
table inet {table} {{
  chain output {{
    type filter hook output priority -10; policy accept;
    ip saddr {range} ip daddr {range} accept
    socket cgroupv2 level 1 "{cgroup}" ip daddr {range} accept
    socket cgroupv2 level 1 "{cgroup}" ip saddr {range} accept
    socket cgroupv2 level 1 "{cgroup}" drop
    ip daddr {range} drop
  }}
  chain input {{
    type filter hook input priority -10; policy accept;
    ip saddr {range} ip daddr {range} accept
    socket cgroupv2 level 1 "{cgroup}" ip saddr {range} accept
    socket cgroupv2 level 1 "{cgroup}" ip daddr {range} accept
    socket cgroupv2 level 1 "{cgroup}" drop
    ip saddr {range} drop
  }}
}}
"""


class NetworkPartitionUnsupported(EmbeddedError):
    """This machine does not support network partitions; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class NetworkPartition:
    """The network partition of one node; `cgroup` is directly below the root of cgroup v2."""

    table: str
    address_range: str
    cgroup: Path

    def begin(self) -> None:
        rules = _RULES.format(
            table=self.table,
            range=self.address_range,
            # nft looks the path up below /sys/fs/cgroup, even if cgroup v2 is mounted
            # elsewhere, and gives the kernel the inode that it finds.
            cgroup=os.path.relpath(self.cgroup, "/sys/fs/cgroup"),
        )
        _nft("-f", "-", stdin=rules)

    def end(self) -> None:
        _nft("delete", "table", "inet", self.table)


def cgroup2_mount() -> Path | None:
    """Where cgroup v2 is mounted, alone or beside v1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(point)
    return None


def _nft(*arguments: str, stdin: str = "") -> None:
    if shutil.which("nft") is None:
        raise NetworkPartitionUnsupported("nft is missing: install the package nftables")
    done = subprocess.run(["nft", *arguments], input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkPartitionUnsupported(
            f"nft {' '.join(arguments)} failed: {done.stderr.strip()}"
        )
