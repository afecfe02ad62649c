"""A join with a condition, in two partitions, and a window behind it: compared with every row
against every row in plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rekindle.connectors import compare_sinks, open_source, read_sink
from rekindle.engine.operators.join import JoinOperator
from rekindle.errors import EpochTooLarge
from rekindle.reference import run_reference
from rekindle.streams.epochs import NO_WATERMARK
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("shared_jvm")]

SECOND = 1_000_000
EXAMPLE = (Path(__file__).parents[2] / "examples/payments/topology.yaml").read_text()
MANIFEST = EXAMPLE.replace("lateness: 2s", "lateness: 500ms")  # so that rows are late


def expected_pairs() -> list[tuple[int, int, int, float]]:
    """Order, both times, and the difference of the amounts."""
    name, spec = load_topology(MANIFEST)
    compiled = compile_topology(spec, name, skip_cluster_checks=True)
    sources = [
        open_source(source, compiled.nodes[source.name], SECOND, Path("/nonexistent"))
        for source in spec.sources
    ]
    live: tuple[list[Any], list[Any]] = ([], [])
    before = NO_WATERMARK
    for epoch in range(max(source.last_epoch or 0 for source in sources) + 2):
        cuts = [source.cut(epoch) for source in sources]
        for rows, cut, time in zip(live, cuts, ("at", "time"), strict=True):
            times = cut.rows.column(time).cast(pa.int64()).to_pylist()
            found = zip(times, cut.rows.to_pylist(), strict=True)
            rows += [(t, *row.values()) for t, row in found if t >= before]
        before = max(before, min(cut.watermark for cut in cuts))
    return sorted(
        (order, t, u, paid - amount)
        for t, order, amount, _ in live[0]
        for u, of_order, paid, _ in live[1]
        if order == of_order and t - 300_000 <= u <= t + 2 * SECOND and paid > amount
    )


def test_a_join_equals_every_row_against_every_row(tmp_path: Path) -> None:
    name, spec = load_topology(MANIFEST)
    large = run_reference(spec, name, output=tmp_path / "large")
    run_reference(spec, name, output=tmp_path / "small", epochs_per_call=2)
    for query in ("found", "counted"):
        urls = [f"file://{tmp_path}/{run}/{query}" for run in ("large", "small")]
        difference = compare_sinks(*urls)
        assert not difference, str(difference)
    rows = read_sink(f"file://{tmp_path}/large/found")
    times = (rows.column(time).cast(pa.int64()).to_pylist() for time in ("at", "time"))
    columns = (rows["id"].to_pylist(), *times, rows["more"].to_pylist())
    found = sorted(zip(*columns, strict=True))
    expected = expected_pairs()
    assert found == expected
    assert len(expected) > 1000
    assert large.dropped["pairs"].late > 0
    counted = read_sink(f"file://{tmp_path}/large/counted")
    assert sum(counted["n"].to_pylist()) == len(expected)
    assert large.dropped["seconds"].late == 0


def test_an_epoch_beyond_all_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, spec = load_topology(MANIFEST)

    def advance(*_: Any, **__: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 8589934592 failed")

    monkeypatch.setattr(JoinOperator, "advance", advance)
    message = r"pairs: epochs 0 to \d+ do not fit into memory \(malloc.*--epochs-per-job 1"
    with pytest.raises(EpochTooLarge, match=message):
        run_reference(spec, name, output=tmp_path)
