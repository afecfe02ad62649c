"""The prompt of `make cluster`, and the hints before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle_testing.console.__main__ import hints, prompt
from rekindle_testing.console.commands import CommandError


def session(responses: dict[str, str]) -> Any:
    fake = SimpleNamespace(ended=False)

    def execute(line: str) -> str:
        fake.ended = line == "quit"
        if line in responses:
            return responses[line]
        raise CommandError(f"unknown command {line!r}")

    fake.execute = execute
    return fake


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    rest = iter(lines)

    def read(_: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_a_wrong_command_does_not_stop_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "kil", "", "status", "quit", "never read")
    prompt(session({"status": "fine", "quit": "stopping the cluster"}))
    assert capsys.readouterr().out == "unknown command 'kil'\nfine\nstopping the cluster\n"


def test_the_end_of_input_ends_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch)
    prompt(session({}))


def test_hints_name_running_nodes() -> None:
    text = hints(
        Path("/c/kubeconfig"), Path("/c/bin"), Path("/c/shared"), ["node-1", "node-2", "node-3"]
    )
    assert "what is in /c/shared\n" in text
    assert "file:///var/lib/rekindle," in text
    assert "\n  export KUBECONFIG=/c/kubeconfig PATH=/c/bin:$PATH\n" in text
    assert "rekindle-cluster kill node-1 node-2 " in text
    assert "Kafka" not in text


def test_hints_say_where_kafka_listens() -> None:
    def text(servers: str) -> str:
        return hints(Path("/k"), Path("/b"), Path("/s"), ["node-1"], servers)

    assert "Kafka listens at 127.0.0.1:9092." in text("127.0.0.1:9092")
    assert "kubectl apply -f examples/clicks/topology.yaml\n" in text("127.0.0.1:9092")
    elsewhere = text("127.0.0.1:20001")
    assert "sed s/127.0.0.1:9092/127.0.0.1:20001/ examples/clicks/topology.yaml | " in elsewhere
    assert "clicks.py --servers 127.0.0.1:20001 produce" in elsewhere
