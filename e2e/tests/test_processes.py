"""Children are stopped as a group, and never outlive the process that started them."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rekindle_testing.embedded.priority import BACKGROUND_NICE, lower_priority
from rekindle_testing.embedded.processes import ChildProcesses, ProcessError, choose_ports
from rekindle_testing.waiting import eventually

# Starts a child that has a child, and prints both ids.
FAMILY = ["sh", "-c", "sleep 60 & echo $$ $!; wait"]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_closing_ends_the_group_and_keeps_the_log(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = children.start("family", FAMILY)
        eventually(lambda: len(child.log_tail().split()) == 2)
        pids = [int(pid) for pid in child.log_tail().split()]
        assert child.exit_code is None
    assert child.exit_code is not None
    eventually(lambda: not any(map(is_running, pids)))
    assert (tmp_path / "family.log").exists()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = children.start(
            "no-sigterm", ["sh", "-c", "trap '' TERM; echo ready; exec sleep 60"]
        )
        eventually(lambda: "ready" in child.log_tail())
        children.stop(child, grace_s=0.2)
        assert child.exit_code == -9


def test_a_paused_child_does_not_run_and_can_be_stopped(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = children.start("sleeper", ["sleep", "60"])
        for _ in range(200):
            child.resume()
            child.pause()
            assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
        children.stop(child, grace_s=10)
        assert child.exit_code == -15


def test_a_child_in_the_background_yields_as_a_session(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = children.start("sleeper", ["sleep", "60"])
        lower_priority(BACKGROUND_NICE, child.pid)
        assert psutil.Process(child.pid).nice() == BACKGROUND_NICE
        group = Path(f"/proc/{child.pid}/autogroup")
        if group.exists():
            assert group.read_text().endswith(f"nice {BACKGROUND_NICE}\n")


def test_a_missing_program_is_a_process_error(tmp_path: Path) -> None:
    with (
        ChildProcesses(tmp_path) as children,
        pytest.raises(ProcessError, match="cannot start gone"),
    ):
        children.start("gone", [str(tmp_path / "gone")])


@pytest.mark.process
def test_kill_9_of_the_parent_leaves_nothing_running(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from rekindle_testing.embedded.processes import ChildProcesses\n"
        f"ChildProcesses(Path({str(tmp_path)!r})).start('family', {FAMILY!r})\n"
        "print('started', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"started\n"
        log = tmp_path / "family.log"
        eventually(lambda: len(log.read_text().split()) == 2)
        everything = [child.pid for child in psutil.Process(test.pid).children(recursive=True)]
        assert len(everything) == 3  # the family and the reaper
        test.kill()
    eventually(lambda: not any(map(is_running, everything)))


def test_chosen_ports_are_distinct_and_free() -> None:
    ports = choose_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
