"""Runs the programs of iproute2 and the like, here or in the network namespace of a process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError

_TIMEOUT_S = 60.0


def environment() -> Mapping[str, str]:
    """For all programs of a node: iptables and runc are in sbin, which a user's PATH may lack."""
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": f"{path}:/usr/sbin:/sbin", "LANG": "C.UTF-8", "HOME": "/root"}


def run(
    command: Sequence[str], stdin: str | BinaryIO = "", *, timeout_s: float = _TIMEOUT_S
) -> str:
    """Run a program and return what it prints; raises KubeletNodeError if it fails."""
    try:
        done = subprocess.run(
            command,
            **({"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KubeletNodeError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise KubeletNodeError(
            f"{' '.join(command)} failed with exit code {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def ip(lines: Iterable[str], *, in_network_of: int | None = None) -> None:
    """Run commands of `ip`, all in one process; the first that fails ends it."""
    run([*_enter_network(in_network_of), "ip", "-batch", "-"], "\n".join(lines) + "\n")


def bridge(arguments: Sequence[str], *, in_network_of: int) -> None:
    run([*_enter_network(in_network_of), "bridge", *arguments])


def enter_namespaces(pid: int) -> list[str]:
    """The prefix of a command that runs in all namespaces of a process."""
    return ["nsenter", f"--target={pid}", "--all", "--"]


def _enter_network(pid: int | None) -> list[str]:
    # `ip netns exec` would hide the cgroups by a new /sys; and these namespaces have no names.
    return [] if pid is None else ["nsenter", f"--net=/proc/{pid}/ns/net"]
