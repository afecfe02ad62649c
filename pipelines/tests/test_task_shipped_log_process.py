"""Real task processes, and the coordinator's real core: all pods of a source are lost while one of
its readers waits for capacity, and new ones with empty disks go on from the newest entry up to
which the source's log is in the store.

A source whose sink is its live reader, and a window that has no pod: it will need all epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reader_parts import read_once

from rekindle.checkpoints.shipped import Piece, parse_piece_name
from rekindle.connectors.compare import read_sink
from rekindle.identity import Identity
from rekindle.protocol import PollResponse
from rekindle.streams.wire import ReadRequest, StreamUnavailable
from rekindle.task.core.shipping import FAR_BEHIND_INTERVALS
from rekindle.topology.model import Slot
from rekindle_testing.harness.task_processes import UID, TaskProcesses, task_processes

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]

INTERVAL_EPOCHS = 5
WAIT_EPOCHS = 200


def make_spec(directory: Path, replicas: int) -> dict[str, Any]:
    def query(name: str, of: str) -> dict[str, Any]:
        url = f"file://{directory}/{name}"
        return {"name": name, "from": of, "sink": {"files": {"url": url, "format": "parquet"}}}

    return {
        "epochInterval": "100ms",
        "checkpoint": {"interval": "500ms", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "rows",
                "schema": "v BIGINT, t TIMESTAMP, wide STRING",
                "eventTime": {"column": "t"},
                "replicas": replicas,
                "generator": {
                    "rowsPerSecond": 100,
                    "columns": {
                        "v": "sequence",
                        "t": "timestamp",
                        "wide": f"choice({'x' * 300}, y)",
                    },
                },
            }
        ],
        "operators": [
            {
                "name": "late",
                "inputs": ["rows"],
                "window": {"size": "2s", "groupBy": ["v"], "aggregate": "count(*) AS n"},
            }
        ],
        "queries": [query("all", "rows"), query("totals", "late")],
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "replicas"])
def tasks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TaskProcesses]:
    directory = tmp_path_factory.mktemp("shipped")
    spec = make_spec(directory, request.param)
    with task_processes(directory, spec, waiting=("late",)) as made:
        yield made


def slots_of(tasks: TaskProcesses, name: str) -> list[Slot]:
    topology = tasks.generation.topology
    return [s for s in tasks.replicas if topology.segment(s.segment).name == name]


def answered(tasks: TaskProcesses, slot: Slot) -> PollResponse:
    response = tasks.replicas[slot].response
    assert response is not None
    return response


def lose_all_pods(tasks: TaskProcesses, meanwhile_torn: bool = False) -> tuple[int, int]:
    """Kill all replicas of the source with their disks. Returns the epochs up to which they had
    computed, and up to which their log was in the store."""
    sources = slots_of(tasks, "rows")

    def has_waited() -> bool:
        if not tasks.all_live():
            return False
        computed = max(answered(tasks, slot).stable_epoch for slot in sources)
        shipped = [e for slot in sources for e in answered(tasks, slot).log_shipped]
        near = bool(shipped) and max(shipped) >= computed - 6 * INTERVAL_EPOCHS
        return computed > WAIT_EPOCHS and near

    tasks.poll_until(has_waited, 180)
    before = max(answered(tasks, slot).stable_epoch for slot in sources)
    named = {e for slot in sources for e in answered(tasks, slot).log_shipped}
    for slot in sources:
        tasks.replicas[slot].kill()
    in_store = max(found.last for path in pieces(tasks) if (found := piece_of(path)))
    shipped = min(max(named), in_store)  # an entry may be named before its log is there
    if meanwhile_torn:
        piece = pieces(tasks)[0]
        piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    for slot in sources:
        tasks.start(slot)
    poll_until_live(tasks)
    return before, shipped


def poll_until_live(tasks: TaskProcesses) -> None:
    def all_are() -> bool:
        for replica in tasks.replicas.values():
            replica.start_again_if_ended()
        return tasks.all_live()

    tasks.poll_until(all_are, 120)


def pieces(tasks: TaskProcesses) -> list[Path]:
    found = (tasks.directory / "store").rglob("logs/*/*/shipped/*")
    return sorted(path for path in found if piece_of(path) is not None)


def piece_of(path: Path) -> Piece | None:
    parsed = parse_piece_name(f"{path.relative_to(path.parents[4])}")
    return parsed[1] if parsed is not None else None


def rows_from_the_first(tasks: TaskProcesses, slot: Slot, through: int) -> list[int]:
    """What a late reader gets of a replica."""
    found, epoch = list[int](), 0
    stream = tasks.generation.topology.segment(slot.segment).stream
    while epoch <= through:
        request = ReadRequest(stream, 0, epoch, 1 << 20)
        response = read_once(f"{tasks.replicas[slot].address}:8815", request, 10, Identity(UID))
        for batch in response.epochs:
            assert batch.epoch == epoch
            if epoch <= through:
                found += batch.rows["v"].to_pylist()
            epoch += 1
    return found


def require_all_rows(tasks: TaskProcesses, through: int) -> None:
    tasks.poll_until(
        lambda: all(answered(tasks, slot).stable_epoch > through for slot in tasks.replicas), 90
    )
    for slot in slots_of(tasks, "rows"):
        rows = rows_from_the_first(tasks, slot, through)
        assert rows == list(range(len(rows)))
        assert len(rows) > through
        response = answered(tasks, slot)
        assert (response.problem, response.contradiction) == (None, None)
        assert all(sink.conflict is None for sink in response.sinks)
    table = read_sink(f"file://{tasks.directory}/all", "parquet", until_epoch=through - 10)
    written = sorted(table["v"].to_pylist())
    assert written == list(range(len(written)))


def test_new_pods_compute_again_only_what_is_not_in_the_store(tasks: TaskProcesses) -> None:
    before, shipped = lose_all_pods(tasks)
    for slot in slots_of(tasks, "rows"):
        response = answered(tasks, slot)
        assert response.restored_from is not None
        assert response.restored_from >= shipped, "the wait is not computed again"
        assert response.log_base == 0, "and all of it is there for the late reader"
    require_all_rows(tasks, before + 10)


def test_their_successors_go_on_with_what_is_in_the_store(tasks: TaskProcesses) -> None:
    names = {path.name for path in pieces(tasks)}
    before, shipped = lose_all_pods(tasks)
    assert names < {path.name for path in pieces(tasks)}, "nothing is shipped twice, or deleted"
    for slot in slots_of(tasks, "rows"):
        assert answered(tasks, slot).restored_from >= shipped  # type: ignore[operator]
    require_all_rows(tasks, before + 10)


def test_a_damaged_object_costs_a_replay_and_no_row(tasks: TaskProcesses) -> None:
    before, shipped = lose_all_pods(tasks, meanwhile_torn=True)
    for slot in slots_of(tasks, "rows"):
        assert answered(tasks, slot).restored_from >= shipped  # type: ignore[operator]
        boot = answered(tasks, slot).boot_id
        with pytest.raises(StreamUnavailable):
            rows_from_the_first(tasks, slot, before)

        def is_back(slot: Slot = slot, boot: str = boot) -> bool:
            tasks.replicas[slot].start_again_if_ended()
            return answered(tasks, slot).boot_id != boot and tasks.all_live()

        tasks.poll_until(is_back, 120)
    require_all_rows(tasks, before + 10)


def test_nothing_is_shipped_while_readers_keep_up(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 1)
    spec["operators"], spec["queries"] = [], spec["queries"][:1]
    with task_processes(tmp_path, spec) as tasks:
        far = 2 * FAR_BEHIND_INTERVALS * INTERVAL_EPOCHS
        tasks.poll_until(lambda: tasks.committed_epoch() > far, 120)
        assert pieces(tasks) == []
