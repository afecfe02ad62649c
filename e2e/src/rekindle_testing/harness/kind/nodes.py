"""The nodes of a kind cluster: containers, whose failures are commands of Docker."""

from __future__ import annotations

from pathlib import Path

from rekindle_testing.harness.any_cluster import UnsupportedByCluster
from rekindle_testing.harness.cluster_programs import ClusterPrograms, run

# At the node's only interface, which its pods use too. `docker network disconnect` would remove the
# address: pods would get errors instead of silence, and another address when it is connected again.
_DROP_RULES = (
    ("PREROUTING", "-i", "eth0", "-j", "DROP"),
    ("POSTROUTING", "-o", "eth0", "-j", "DROP"),
)
# As on embedded nodes: the environment of Rekindle's programs names the address of the pod.
KILL_PROCESSES = r"""
status=1
for process in /proc/[0-9]*; do
    if grep -qzs "=${1//./\\.}\$" "$process/environ" && grep -qas rekindle "$process/cmdline"; then
        kill -9 "${process#/proc/}" && status=0
    fi
done
exit $status
"""


def docker(*arguments: str, timeout_s: float = 60) -> str:
    return run(("docker", *arguments), timeout_s=timeout_s)


class KindNode:
    def __init__(self, name: str, programs: ClusterPrograms) -> None:
        self.name = name
        self._programs = programs

    def volume(self, pod_uid: str, name: str) -> Path:
        raise UnsupportedByCluster(
            "an emptyDir is in a volume of Docker, not in a directory of this user"
        )

    def freeze(self) -> None:
        docker("pause", self.name)

    def thaw(self) -> None:
        docker("unpause", self.name)

    def partition_network(self) -> None:
        for chain, *rule in _DROP_RULES:
            self._execute("iptables", "-t", "mangle", "-I", chain, "1", *rule)

    def heal_network(self) -> None:
        for chain, *rule in _DROP_RULES:
            self._execute("iptables", "-t", "mangle", "-D", chain, *rule)

    def drain(self, timeout_s: float = 60.0) -> None:
        options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force")
        limit = f"--timeout={timeout_s:.0f}s"
        self._programs.kubectl("drain", self.name, *options, limit, timeout_s=timeout_s + 30)

    def start(self) -> None:
        docker("start", self.name)

    def kill_processes(self, address: str) -> None:
        self._execute("bash", "-c", KILL_PROCESSES, "kill-processes", address)

    def _execute(self, *command: str) -> None:
        docker("exec", self.name, *command)
