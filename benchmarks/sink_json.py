"""Rows that the `files` sink encodes as JSON lines in a second of CPU.

.venv/bin/python benchmarks/sink_json.py [--rows N]

Targets: 200,000 rows of six columns, 500,000 values of each kind.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import pyarrow as pa

from rekindle.connectors.files_sink import encode
from rekindle_testing.harness.report import Measurement, load_average, report

REPEATS = 3


def columns(rows: int) -> dict[str, pa.Array]:
    rng = np.random.default_rng(7)
    text = np.char.add("value-", rng.integers(0, 9999, rows).astype(str))
    quoted = np.char.add('say "', np.char.add(text, '"'))
    micros = pa.array(rng.integers(0, 2 * 10**15, rows))
    cents = pa.array(rng.integers(0, 10**9, rows)).cast(pa.decimal128(21, 2))
    offsets = pa.array(np.arange(0, 2 * rows + 2, 2, dtype=np.int32))
    items = pa.array(rng.integers(0, 100, 2 * rows))
    return {
        "n": pa.array(rng.integers(0, 10**6, rows)),
        "x": pa.array(rng.standard_normal(rows)),
        "k": pa.array(text),
        "quoted": pa.array(quoted),
        "at": micros.cast(pa.timestamp("us", "UTC")),
        "day": pa.array(rng.integers(0, 20_000, rows).astype(np.int32)).cast(pa.date32()),
        "price": cents,
        "list": pa.ListArray.from_arrays(offsets, items),
    }


def rows_per_second(table: pa.Table) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        begin = time.process_time()
        encode(table, "json")
        times.append(time.process_time() - begin)
    return float(table.num_rows / min(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    made = columns(parser.parse_args().rows)
    six = pa.table({name: made[name] for name in ("n", "x", "k", "at", "day", "list")})
    rows = [_row("six columns", rows_per_second(six), 200_000)]
    rows += [_row(n, rows_per_second(pa.table({n: a})), 500_000) for n, a in made.items()]
    report("sink_json", [*rows, load_average()])


def _row(name: str, per_second: float, target: float) -> Measurement:
    return Measurement(name, {"rows/s": round(per_second)}, target, per_second >= target)


if __name__ == "__main__":
    main()
