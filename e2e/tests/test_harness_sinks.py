"""Pauses in a query's output, as the demo checks them."""

from pathlib import Path

import pytest

from rekindle_testing.harness.sinks import file_write_times, longest_pause


@pytest.mark.parametrize(
    ("files", "pause_s"),
    [  # files: when each was written, and its epoch
        ([(8.0, 8), (9.0, 9), (10.0, 10), (11.0, 11)], 1.0),
        ([(9.0, 9), (24.0, 10), (24.1, 11)], 15.0),
        # Two epochs without rows explain two seconds.
        ([(9.0, 9), (12.5, 12), (13.0, 13)], 1.5),
        # The other partition of epoch 10 came late.
        ([(9.0, 9), (10.0, 10), (24.0, 10), (24.5, 11)], 15.0),
        # Before and after what is looked at.
        ([(1.0, 1), (7.0, 2), (9.0, 9), (10.0, 10), (30.0, 11), (70.0, 12)], 20.0),
        ([], 0.0),
    ],
)
def test_a_pause_excludes_the_time_of_empty_epochs(
    files: list[tuple[float, int]], pause_s: float
) -> None:
    assert longest_pause(files, since_s=9.5, until_s=20.0, epoch_s=1.0) == pause_s


def test_only_a_sink_s_files_are_read(tmp_path: Path) -> None:
    for name in ("q-p000-e000000000007.parquet", "_rekindle.json", ".tmp"):
        (tmp_path / name).touch()
    assert [epoch for _, epoch in file_write_times(tmp_path)] == [7]
