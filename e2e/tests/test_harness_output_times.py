"""Pauses, latencies and rates of an output, as the benchmarks compute them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_testing.harness.output_times import (
    WrittenFile,
    intervals,
    latencies,
    percentiles,
    rows_per_s,
    written_files,
)

# Written at, epoch, partition, rows. Two partitions, an epoch each second, from 100.0 on; epoch 2
# of partition 1 is late.
FILES = [
    WrittenFile(101.1, 0, 0, 10),
    WrittenFile(101.2, 0, 1, 20),
    WrittenFile(102.1, 1, 0, 10),
    WrittenFile(102.2, 1, 1, 20),
    WrittenFile(103.1, 2, 0, 10),
    WrittenFile(104.0, 2, 1, 20),
    WrittenFile(104.1, 3, 0, 10),
    WrittenFile(104.2, 3, 1, 20),
]
AT_S = st.floats(0, 100, allow_nan=False)
WRITTEN = st.lists(st.builds(WrittenFile, AT_S, st.integers(0, 50), st.integers(0, 3), st.just(5)))


def test_an_epoch_is_as_late_as_its_last_partition() -> None:
    found = latencies(FILES, origin_s=100.0, epoch_s=1.0, since_s=101.5, until_s=104.0)
    assert found == pytest.approx([0.2, 1.0])


def test_a_late_partition_is_a_long_interval() -> None:
    assert intervals(FILES, since_s=100.0, until_s=105.0) == pytest.approx([1.0, 1.8, 0.2])


def test_intervals_reach_beyond_what_is_looked_at() -> None:
    assert intervals(FILES, since_s=103.0, until_s=103.1) == pytest.approx([1.8])


def test_rates_are_of_bins_of_equal_length() -> None:
    assert rows_per_s(FILES, since_s=101.0, until_s=103.0, bin_s=0.5) == [60.0, 0.0, 60.0, 0.0]


@given(WRITTEN, st.sampled_from([0.1, 0.25, 1.0]))
def test_every_row_is_in_one_bin(files: list[WrittenFile], bin_s: float) -> None:
    rates = rows_per_s(files, since_s=0.0, until_s=100.5, bin_s=bin_s)
    assert sum(rates) * bin_s == pytest.approx(sum(file.rows for file in files))


@given(st.lists(AT_S, min_size=1))
def test_percentiles_are_values_that_occurred(values: list[float]) -> None:
    found = percentiles(values)
    assert {found.p50, found.p99, found.worst} <= set(values)
    assert found.p50 <= found.p99 <= found.worst


def test_only_a_sink_s_files_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1, 2, 3]}), tmp_path / "q-p001-e000000000007.parquet")
    (tmp_path / "_rekindle.json").touch()
    (found,) = written_files(tmp_path)
    assert (found.epoch, found.partition, found.rows) == (7, 1, 3)
