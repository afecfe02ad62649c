"""Pid 1 of a kubelet node: prepares its mounts, starts its programs, reaps orphans.

Started in namespaces of its own; when it ends, the kernel ends all that is in the node. Standard
library only, and nothing of Kubernetes. A program that ends is started again.
SIGUSR1 kills the kubelet and leaves it down; SIGUSR2 starts it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import syscalls

# So that a program that cannot start does not occupy a CPU.
RESTART_DELAY_S = 1.0

_HANDLED_SIGNALS = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2}
_TIMEOUT_S = 120.0
_POLL_S = 0.02
_MS_SHARED = 1 << 20
_RUN_DIRECTORY = Path("/run/rekindle")
# Programs of a node write to paths here that no option changes: /var/lib/kubelet/device-plugins,
# /var/lib/cni, /var/log/containers.
_COPIED_ON_WRITE = ("/var/lib", "/var/log")
_NETWORK_SETTINGS = ("ipv4/ip_forward", "bridge/bridge-nf-call-iptables")

Config = dict[str, Any]  # `KubeletNode._init_config`


class _Program:
    def __init__(self, name: str, argv: list[str], logs: str) -> None:
        self._argv = argv
        self._log = f"{logs}/{name}.log"
        self._should_run = False
        self.pid = 0

    @property
    def is_missing(self) -> bool:
        return self._should_run and not self.pid

    def start(self) -> None:
        self._should_run = True
        if self.pid:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        actions = [(os.POSIX_SPAWN_OPEN, fd, self._log, flags, 0o644) for fd in (1, 2)]
        self.pid = os.posix_spawnp(
            self._argv[0], self._argv, dict(os.environ), file_actions=actions, setsigmask=[]
        )

    def kill(self) -> None:
        self._should_run = False
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)


def main(config_path: str) -> None:
    config: Config = json.loads(Path(config_path).read_text())
    for file in config["cgroup_files"]:
        Path(file).write_text("0")
    socket.sethostname(config["name"])
    _prepare_mounts(Path(config["directory"]), config["images"])
    _override_sysctls(config["sysctls"])
    _await("the network", Path(config["network_ready"]).exists)
    for setting in _NETWORK_SETTINGS:
        _enable_network_setting(setting)
    programs = {
        name: _Program(name, argv, config["logs"]) for name, argv in config["programs"].items()
    }
    programs["containerd"].start()
    _await("containerd", lambda: _accepts_connections(config["containerd_socket"]))
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    for program in programs.values():
        program.start()
    _run(programs)


def _run(programs: dict[str, _Program]) -> None:
    while True:
        # A program may have ended before its signal was waited for.
        _reap(programs)
        match signal.sigwait(_HANDLED_SIGNALS):
            case signal.SIGUSR1:
                programs["kubelet"].kill()
            case signal.SIGUSR2:
                programs["kubelet"].start()
            case _:
                pass


def _reap(programs: dict[str, _Program]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pid = 0
        if pid == 0:
            break
        for program in programs.values():
            if program.pid == pid:
                program.pid = 0
    missing = [program for program in programs.values() if program.is_missing]
    if missing:
        time.sleep(RESTART_DELAY_S)
    for program in missing:
        program.start()


def _prepare_mounts(directory: Path, images: dict[str, str]) -> None:
    """Shared within the node, as the kubelet expects, and seen by nobody else. `images`: the
    prepared image store, and where containerd looks for it."""
    kept = os.open(directory, os.O_PATH)
    image_store = os.open(images["source"], os.O_PATH)
    before = directory.stat()
    syscalls.mount("none", "/", flags=syscalls.MS_REC | _MS_SHARED)
    syscalls.mount("tmpfs", "/run", "tmpfs", data="mode=755")
    for number, path in enumerate(_COPIED_ON_WRITE):
        upper, work = _RUN_DIRECTORY / f"upper-{number}", _RUN_DIRECTORY / f"work-{number}"
        upper.mkdir(parents=True)
        work.mkdir()
        options = f"lowerdir={path},upperdir={upper},workdir={work}"
        syscalls.mount("overlay", path, "overlay", data=options)
    if not _is_same(directory, before):
        # An overlay covers the directory: bind it again, so that its files stay on its own
        # file system.
        directory.mkdir(parents=True, exist_ok=True)
        syscalls.bind(f"/proc/self/fd/{kept}", str(directory))
    os.close(kept)
    Path(images["target"]).mkdir(parents=True)
    syscalls.bind(f"/proc/self/fd/{image_store}", images["target"], read_only=True)
    os.close(image_store)


def _is_same(path: Path, before: os.stat_result) -> bool:
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)


def _override_sysctls(values: dict[str, int]) -> None:
    """Bind a file with the value over each sysctl. The kubelet sets these, for the whole machine,
    if they have other values."""
    for name, value in values.items():
        sysctl_file = Path("/proc/sys") / name
        if sysctl_file.exists():
            override = _RUN_DIRECTORY / name.replace("/", "-")
            override.write_text(f"{value}\n")
            syscalls.bind(str(override), str(sysctl_file))


def _enable_network_setting(name: str) -> None:
    file = Path("/proc/sys/net") / name
    # Without br_netfilter there is no second one; then pods of one node cannot reach each other
    # through a Service.
    if file.exists():
        file.write_text("1")


def _accepts_connections(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _await(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {_TIMEOUT_S:g} s for {what}")
        time.sleep(_POLL_S)
