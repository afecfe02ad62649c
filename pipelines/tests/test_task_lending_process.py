"""Real task processes, and the coordinator's real core: a lost replica begins with the state that
its partner lends, and that goes on.

Two replicas of a segment; one is killed, with its disk, under load. The one in its place must start
from the partner's state, not from a checkpoint, and agree with the partner, which must never pause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.connectors.compare import read_sink
from rekindle_testing.harness.task_processes import ReplicaProcess, TaskProcesses, task_processes

PAUSE_S = 4.0
"""More than this between two epochs of the partner is a pause: 8 epochs, on a slow machine."""
WINDOW = {
    "name": "sums",
    "inputs": ["rows"],
    "window": {"size": "8s", "slide": "2s", "groupBy": ["k"], "aggregate": "sum(v) AS total"},
}


def make_spec(directory: Path, with_window: bool, interval: str = "5s") -> dict[str, Any]:
    return {
        "epochInterval": "500ms",
        "replicas": 2,
        "checkpoint": {"interval": interval, "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "rows",
                "schema": "k BIGINT, v BIGINT, t TIMESTAMP",
                "eventTime": {"column": "t"},
                "generator": {
                    "rowsPerSecond": 2000,
                    "columns": {"k": "integer(1, 500)", "v": "sequence", "t": "timestamp"},
                },
            }
        ],
        "operators": [WINDOW] if with_window else [],
        "queries": [
            {
                "name": "totals",
                "from": "sums" if with_window else "rows",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "parquet"}},
            }
        ],
    }


@pytest.fixture
def cluster(tmp_path: Path, cds_archive: Path) -> Iterator[TaskProcesses]:
    spec = make_spec(tmp_path, with_window=True, interval="2s")
    with task_processes(tmp_path, spec, {"REKINDLE_CDS_ARCHIVE": str(cds_archive)}) as made:
        yield made


def require_borrowed(cluster: TaskProcesses, newcomer: ReplicaProcess) -> int:
    """The newcomer started from its partner's state, not from a checkpoint. Returns its epoch."""
    assert newcomer.response is not None
    lent_from = newcomer.response.lent_from
    assert lent_from is not None, (cluster.restore_points, newcomer.response)
    assert newcomer.response.restored_from == lent_from
    points = [p.point for p in cluster.restore_points if p.incarnation == newcomer.incarnation]
    assert all(point.lender is not None for point in points)
    return lent_from


def require_agreement(cluster: TaskProcesses) -> None:
    assert not cluster.core.containment.comparison.disputes
    assert not cluster.core.containment.comparison.diverged


@pytest.mark.timeout(900)
@pytest.mark.spark
@pytest.mark.long  # of the shells: test_task_lending.py; on a cluster: test_planned_moves.py
def test_a_lost_replica_begins_with_the_state_of_a_partner_that_goes_on(
    cluster: TaskProcesses,
) -> None:
    cluster.poll_until(lambda: cluster.all_live() and cluster.committed_epoch() > 0, 300)
    lost, partner = cluster.replicas.values()
    lost.kill()
    lost_at = time.monotonic()
    newcomer = cluster.start(lost.slot)
    cluster.poll_until(cluster.all_live, 300)
    lent_from = require_borrowed(cluster, newcomer)
    assert cluster.committed_epoch() >= lent_from, "before that it may not be Live"

    # Both compute the same from now on, and checkpoints are committed again.
    committed = cluster.committed_epoch()
    cluster.poll_until(lambda: cluster.committed_epoch() > committed + 8, 120)
    require_agreement(cluster)
    pause_s = partner.longest_pause_s(lost_at)
    print(f"longest time between two epochs of the partner: {pause_s:.2f} s")
    assert pause_s < PAUSE_S

    # What the sink has is what one replica would have written: each row once.
    assert all(s.conflict is None for r in cluster.replicas.values() for s in sinks_of(r))
    rows = read_sink(f"file://{cluster.directory}/out", "parquet")
    assert rows.num_rows > 0
    windows = zip(rows["k"].to_pylist(), rows["window_end"].to_pylist(), strict=True)
    assert len(set(windows)) == rows.num_rows


def sinks_of(replica: ReplicaProcess) -> Any:
    assert replica.response is not None
    return replica.response.sinks
