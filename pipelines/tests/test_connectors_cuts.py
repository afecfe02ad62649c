"""Which epoch a row belongs to, in exact arithmetic, and where a source changes next."""

from __future__ import annotations

import datetime as dt
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files_source_parts import T0, csv, source_of, values_of_k
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors.cuts import epochs_by_count, epochs_by_time, exact_fraction, first_row
from rekindle.errors import SchemaMismatch


@given(
    st.lists(st.integers(0, 2**50), min_size=1, max_size=30),
    st.floats(1e-3, 1e9, allow_nan=False),
    st.integers(1, 10**9),
)
def test_epochs_by_time_are_exact(times: list[int], speedup: float, interval: int) -> None:
    ordered = sorted(times)
    got = epochs_by_time(np.array(ordered, dtype=np.int64), ordered[0], speedup, interval)
    rate = exact_fraction(speedup)
    assert got.tolist() == [(t - ordered[0]) / rate // interval for t in ordered]


@given(st.integers(0, 500), st.floats(1e-3, 1e6), st.integers(1000, 10**8))
def test_epochs_by_count_agree_with_the_first_rows(rows: int, rps: float, interval: int) -> None:
    epochs = epochs_by_count(np.arange(rows), rps, interval).tolist()
    for i, epoch in enumerate(epochs):
        assert first_row(epoch, rps, interval) <= i < first_row(epoch + 1, rps, interval)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 45))
def test_a_source_names_its_next_epoch_to_cut(
    tmp_path_factory: pytest.TempPathFactory, hours: list[int], epoch: int
) -> None:
    tmp = tmp_path_factory.mktemp("changes")
    times = [(T0 + dt.timedelta(hours=h)).isoformat() for h in hours]
    source = source_of(tmp, csv(tmp, *(f"a,1,{t}" for t in times)))
    cuts = [source.cut(e) for e in range(-1, 50)]
    changes = [
        e
        for e, (before, cut) in enumerate(itertools.pairwise(cuts))
        if cut.rows.num_rows or cut.watermark != before.watermark or (not hours and e == 0)
    ]
    assert source.next_epoch_to_cut(epoch) == next((e for e in changes if e >= epoch), None)


def test_times_thousands_of_years_apart_are_cut_at_once(tmp_path: Path) -> None:
    url = csv(tmp_path, "a,1,0001-01-01", "b,1,2013-01-01", "c,1,9999-12-31")
    source = source_of(tmp_path, url, speedup=1)
    assert source.next_epoch_to_cut(0) == 0
    second = source.next_epoch_to_cut(1)
    assert second == 734_868 * 86_400
    assert values_of_k(source, second) == ["b"]
    third = source.next_epoch_to_cut(second + 1)
    assert source.next_epoch_to_cut(second) == second
    assert third is not None
    assert values_of_k(source, third) == ["c"]
    assert source.next_epoch_to_cut(third + 1) == third + 1
    assert source.next_epoch_to_cut(third + 2) is None


@pytest.mark.parametrize(
    ("times", "pace", "message"),
    [
        (["0001-01-01", "9999-12-31"], {"speedup": 0.1}, r"column t goes from 0001-01-01T00"),
        (["-200000-01-01", "200000-01-01"], {"speedup": 1000}, "correct the times, or raise"),
        (["2013-01-01"] * 2, {"speedup": None, "rowsPerSecond": 1e-13}, "raise rowsPerSecond"),
    ],
)
def test_epochs_beyond_what_a_sink_can_name_are_refused(
    tmp_path: Path, times: list[str], pace: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        source_of(tmp_path, csv(tmp_path, *(f"a,1,{t}" for t in times)), **pace)
