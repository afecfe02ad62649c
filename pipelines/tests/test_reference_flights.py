"""The flights example by the reference execution, compared with pandas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rekindle.connectors.compare import compare_sinks, read_sink
from rekindle.connectors.files_sink import parse_name
from rekindle.reference import run_reference
from rekindle.topology.load import load_topology

EXAMPLE = Path(__file__).parents[2] / "examples" / "flights"
DAYS = int(os.environ.get("REKINDLE_TEST_DAYS", "15"))
EPOCH = pd.Timedelta(days=1)  # speedup 86400 of one second

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flights-input")
    command = [sys.executable, str(EXAMPLE / "prepare.py"), str(directory), "--days", str(DAYS)]
    subprocess.run(command, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def output(input: Path, tmp_path_factory: pytest.TempPathFactory, shared_jvm: None) -> Path:
    return run(input, tmp_path_factory.mktemp("flights-output"), 64)


def run(input: Path, output: Path, epochs_per_call: int) -> Path:
    name, spec = load_topology((EXAMPLE / "topology.yaml").read_text())
    run_reference(spec, name, input=input, output=output, epochs_per_call=epochs_per_call)
    return output


def departures(input: Path) -> pd.DataFrame:
    return pd.read_csv(input / "flights.csv", parse_dates=["time_hour"])


def flown(input: Path) -> pd.DataFrame:
    flights = departures(input)
    return flights[flights["dep_delay"].notna()]


def windows(rows: pd.DataFrame, size: str, slide: str) -> pd.DataFrame:
    """Each row once for each window it lies in; windows are aligned to the Unix epoch."""
    step = pd.Timedelta(slide)
    first = rows["time_hour"].dt.floor(step)
    copies = int(pd.Timedelta(size) / step)
    return pd.concat(
        rows.assign(window_end=first - i * step + pd.Timedelta(size)) for i in range(copies)
    )


def closing_epochs(ends: pd.Series, times: pd.Series) -> np.ndarray:
    """The first epoch whose watermark (newest time through it, less an hour) reaches the end; else
    the one after the last. Cancelled flights move the watermark too."""
    epochs = (times - times.min()) // EPOCH
    newest = times.groupby(epochs).max() - pd.Timedelta(hours=1)
    places = np.searchsorted(newest.to_numpy(), ends.to_numpy(), side="left")
    known = np.append(newest.index.to_numpy(), newest.index.max() + 1)
    return np.asarray(known[places])


def assert_same_rows(got: pd.DataFrame, wanted: pd.DataFrame, keys: list[str]) -> None:
    columns = list(wanted.columns)
    got = got[columns].sort_values(keys).reset_index(drop=True)
    wanted = wanted.sort_values(keys).reset_index(drop=True)
    pd.testing.assert_frame_equal(got, wanted, check_dtype=False, rtol=1e-12)


def in_utc(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    return table.assign(**{c: pd.to_datetime(table[c], utc=True).dt.as_unit("ns") for c in columns})


def test_alarms_are_the_windows_with_long_delays(input: Path, output: Path) -> None:
    rows = flown(input)
    groups = windows(rows, "24h", "6h").groupby(["window_end", "origin", "carrier"])
    wanted = groups["dep_delay"].agg(delay="mean", worst="max").reset_index()
    wanted = wanted[wanted["delay"] > 30]
    wanted["_epoch"] = closing_epochs(wanted["window_end"], departures(input)["time_hour"])
    got = in_utc(read_sink(f"file://{output}/delay-alarms").to_pandas(), "window_end")
    assert len(wanted) > 100
    assert_same_rows(got, wanted, ["window_end", "origin", "carrier"])


def test_routes_are_counted_by_week(input: Path, output: Path) -> None:
    rows = flown(input)
    groups = windows(rows, "7D", "7D").groupby(["window_end", "origin", "dest"])
    wanted = groups.agg(
        flights=("distance", "size"), miles=("distance", "sum"), arrival_delay=("arr_delay", "mean")
    ).reset_index()
    wanted["_epoch"] = closing_epochs(wanted["window_end"], departures(input)["time_hour"])
    got = in_utc(read_sink(f"file://{output}/route-report").to_pandas(), "window_end")
    assert got["flights"].sum() == len(rows)
    assert_same_rows(got, wanted, ["window_end", "origin", "dest"])


def test_storms_are_the_days_of_each_airport(input: Path, output: Path) -> None:
    weather = pd.read_csv(input / "weather.csv", parse_dates=["time_hour"])
    groups = windows(weather, "24h", "24h").groupby(["window_end", "origin"])
    wanted = groups.agg(
        wind=("wind_speed", "max"), rain=("precip", "sum"), sight=("visib", "min")
    ).reset_index()
    wanted["_epoch"] = closing_epochs(wanted["window_end"], weather["time_hour"])
    got = in_utc(read_sink(f"file://{output}/storm-watch", "json").to_pandas(), "window_end")
    assert_same_rows(got, wanted, ["window_end", "origin"])


@pytest.mark.long  # of the chain alone: test_engine_chain.py, test_reference_late_rows.py
def test_results_do_not_depend_on_how_many_epochs_a_call_takes(
    input: Path, output: Path, tmp_path: Path
) -> None:
    run(input, tmp_path / "single", 1)
    for query in ("delay-alarms", "storm-watch", "route-report"):
        difference = compare_sinks(f"file://{output}/{query}", f"file://{tmp_path}/single/{query}")
        assert not difference, str(difference)


def test_file_names_contain_partitions_and_epochs(output: Path) -> None:
    names = [parse_name(p.name) for p in (output / "delay-alarms").glob("*.parquet")]
    assert {n[1] for n in names if n} == {0, 1}
