"""Real task processes with a stream sink: a reader goes on while the sink's settings are edited,
and while the replica that it reads is lost, and gets its state from its partner.

Two replicas of a source, and the coordinator's real core; `rekindle tail` and a plain Flight client
read them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest
from test_cli_tail import Process
from test_task_lending_process import (
    PAUSE_S,
    make_spec,
    require_agreement,
    require_borrowed,
)

from rekindle.protocol import STREAM_SINK_PORT
from rekindle_testing.harness.task_processes import TaskProcesses, task_processes


def spec_with(directory: Path, **sink: object) -> dict[str, Any]:
    spec = make_spec(directory, with_window=False, interval="2s")
    spec["sources"][0]["generator"]["rowsPerSecond"] = 40
    spec["queries"] = [{"name": "delays", "from": "rows", "sink": {"stream": sink}}]
    return spec


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[TaskProcesses]:
    with task_processes(tmp_path, spec_with(tmp_path, retain="4Mi")) as made:
        yield made


def read_once(address: str, ticket: dict[str, Any]) -> list[int]:
    """The column `v` of what one call returns."""
    found: list[int] = []
    with flight.connect(f"grpc://{address}") as client:
        asked = flight.Ticket(json.dumps(ticket))
        for chunk in client.do_get(asked, flight.FlightCallOptions(timeout=30)):
            found += chunk.data["v"].to_pylist()
    return found


@pytest.mark.process
@pytest.mark.long  # on a cluster: test_stream_sinks.py
@pytest.mark.timeout(600)
def test_a_reader_gets_each_row_once_while_its_replica_is_lost(
    tasks: TaskProcesses, tmp_path: Path
) -> None:
    tasks.poll_until(lambda: tasks.all_live() and tasks.committed_epoch() > 0, 240)
    lost, partner = tasks.replicas.values()
    addresses = [f"{r.address}:{STREAM_SINK_PORT}" for r in (lost, partner)]
    tail = Process("--json", *(part for address in addresses for part in ("--address", address)))
    lines: list[dict[str, Any]] = []

    def newest() -> int:
        while not tail.lines.empty():
            lines.append(json.loads(tail.lines.get()))
        assert tail.process.poll() is None
        return int(lines[-1]["epoch"]) if lines else -1

    try:
        tasks.poll_until(lambda: newest() > 5, 120)
        edited_at, committed = newest(), tasks.committed_epoch()
        tasks.edit(spec_with(tmp_path, retain="8Mi"))
        tasks.poll_until(lambda: newest() > edited_at + 5, 60)
        tasks.poll_until(lambda: tasks.committed_epoch() > committed + 1, 60)
        lost.kill()
        lost_at, lost_at_s = newest(), time.monotonic()
        newcomer = tasks.start(lost.slot)
        tasks.poll_until(lambda: newest() > lost_at + 20, 180)
        tasks.poll_until(tasks.all_live, 180)
        lent_from = require_borrowed(tasks, newcomer)
        committed = tasks.committed_epoch()
        tasks.poll_until(lambda: tasks.committed_epoch() > committed + 8, 60)
        require_agreement(tasks)
        assert partner.longest_pause_s(lost_at_s) < PAUSE_S
    finally:
        code, errors = tail.stop()
    newest_epoch = newest_of(lines)
    assert code == 0, errors
    assert addresses[0] in errors, "it read the other replica"
    assert {line["kind"] for line in lines} == {"STABLE"}
    assert [line["row"]["v"] for line in lines] == list(range(len(lines)))

    # The newcomer has what follows the lent state, and serves it to the bit.
    ticket = {"query": "delays", "from_epoch": lent_from + 1, "max_bytes": 1}
    other = f"{newcomer.address}:{STREAM_SINK_PORT}"
    assert read_once(other, ticket) == read_once(addresses[1], ticket) != []
    print(f"{len(lines)} rows through epoch {newest_epoch}; lost after epoch {lost_at}")


def newest_of(lines: list[dict[str, Any]]) -> int:
    return max(int(line["epoch"]) for line in lines)
