"""Commands from another terminal, and the choice of the cluster."""

from __future__ import annotations

import os
import socket
import socketserver
from pathlib import Path

import pytest

from rekindle_testing.console import client
from rekindle_testing.console.sockets import (
    DIRECTORY_VARIABLE,
    NoCluster,
    choose_cluster,
    running_clusters,
    runtime_directory,
    send_command,
    serve,
)

CLUSTER = str(os.getpid())  # clusters are named by their process ids


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "run"))
    # How often a server looks whether it is to end.
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.02,))
    return runtime_directory()


def shout(line: str) -> str:
    if "bad" in line:
        raise ValueError("it is bad")
    return line.strip().upper()


def test_a_command_gets_a_response(directory: Path) -> None:
    responded: list[bool] = []
    with serve(directory, shout, lambda: responded.append(True)):
        assert running_clusters(directory) == [CLUSTER]
        assert send_command(directory, CLUSTER, "kill node-1") == (True, "KILL NODE-1")
        assert send_command(directory, CLUSTER, "bad") == (False, "it is bad")
    assert running_clusters(directory) == []
    assert len(responded) >= 2


def test_the_client_prints_the_response(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(directory, shout, lambda: None):
        assert client.main(["add-node", "2"]) == 0
        assert client.main(["bad"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "ADD-NODE 2\n"
    assert captured.err == "rekindle-cluster: it is bad\n"


def test_without_a_cluster_the_client_says_how_to_start_one(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert client.main(["status"]) == 1
    assert "no cluster is running; start one with `make cluster`" in capsys.readouterr().err


def test_the_socket_of_a_cluster_that_was_killed_is_removed(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(directory / "1.sock"))
    assert running_clusters(directory) == []
    assert not list(directory.iterdir())


def test_with_two_clusters_one_must_be_chosen() -> None:
    with pytest.raises(
        NoCluster, match=r"2 clusters are running: choose one with --cluster \(7, 8"
    ):
        choose_cluster(["7", "8"], None)
    assert choose_cluster(["7", "8"], "8") == "8"
    with pytest.raises(NoCluster, match="no cluster 9 is running; running: 7, 8"):
        choose_cluster(["7", "8"], "9")
    assert choose_cluster(["7"], None) == "7"


def test_only_the_user_may_enter_the_folder_of_sockets(tmp_path: Path) -> None:
    environment = {DIRECTORY_VARIABLE: str(tmp_path / "run")}
    assert runtime_directory(environment).stat().st_mode & 0o777 == 0o700
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(NoCluster, match="mode 0700"):
        runtime_directory(environment)
