"""`make bench-cec`: the experiments of CEC (Sebepou and Magoutis 2011), Figs. 5 to 9.

.venv/bin/python -m cec [--scale 0.1] [--cores 1] [--parts throughput recoveries]   (in benchmarks/)

One task's own loop, output log, saver and checkpoint store on the local disk, in this process and a
JVM, all on `--cores` cores; one epoch a call, as in a task that is Live, as fast as it can. Rows of
100 bytes (item, price, time, and a filler) are in memory when the clock starts. The query is the
paper's: the average price of an item over windows of a number of rows. `--scale` multiplies keys,
turns, and rows but those of an epoch. Writes build/bench/cec.json and .md.

What corresponds to what. State is saved by pages and deltas at checkpoint epochs, in the
background, not window by window in the output log (docs/decisions/0064-rare-checkpoints.md):

- Fig. 5, native, G_open/Disk: a task without log and checkpoints; one with its output log; one with
  log and a checkpoint every tenth epoch, each waited for. They take turns of ten epochs; the ratio
  is the median over turns. No G_open is written, so the second one is less than the paper's.
- Fig. 6, Q: a checkpoint each time Q times as many rows of state have changed as windows are open.
  The paper's Q bounds the tuples of the output queue that a restart reads (extent); here a restart
  reads all rows of pages and deltas (`rows loaded`), which compaction bounds, whatever the Q.
- Fig. 7, U: a checkpoint after U rows of input. That is what `replayTarget` chooses, in time.
- EC-load time: `load`, from the entry until all state is local. (A task begins before: epochs wait
  only for what they read.) Files may be in the page cache. Replay: the epochs until the one before
  the next checkpoint epoch, so the longest there is, in calls of up to 64 epochs; its state has
  to be equal to the one that was lost. The rows are in memory: reading upstream is not measured.
- Figs. 8, 9, CP: the time between checkpoints. There is no CI: an epoch waits for a checkpoint only
  while deltas are joined, and the saver uses the same cores, also during the epochs after it.
  Response time: of an epoch. Extent: `rows loaded` and `MB read`.

CPU seconds are of this process and the JVM, for runs on a machine in use. Not in the paper: the
same with keys by Zipf's law. Structured Streaming, which has no windows of rows, is not compared.

Targets: throughput with a log, and with checkpoints, at least 0.95 of that without (the paper: a
loss of less than 10 %); `load` at most 1.5 s (the paper: 3.5 to 27 s).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from cec.query import CecQuery
from cec.recoveries import WINDOW_ROWS, measure_recoveries
from cec.throughput import WINDOWS, measure_throughput
from rekindle.engine.memory import plan_memory
from rekindle.engine.spark.session import start_session, stop_session
from rekindle_testing.harness.report import BENCH, Measurement, format_row, load_average, report


def tables(rows: Sequence[Measurement]) -> str:
    """A Markdown table for each group of rows with the same values; what missed its target is
    bold, and what is 0 is left empty."""
    lines: list[str] = []
    for names, group in groupby(rows, lambda row: tuple(row.values)):
        lines += [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for row in group:
            what = f"**{row.what}**" if row.met is False else row.what
            cells = (f"{value:,.10g}" if value else "" for value in row.values.values())
            lines.append(f"| {what} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--cores", type=int, default=1)
    parts = ("throughput", "recoveries")
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    args = parser.parse_args()
    # Before the first thread, so that all threads and the JVM inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        session = start_session("cec", data_dir=directory, memory=plan_memory())
        session.sparkContext.setLogLevel("ERROR")  # the table is read on the same screen
        if "throughput" in args.parts:
            for window_rows in WINDOWS:
                query = CecQuery(window_rows, session, directory / f"windows-{window_rows}")
                for row in measure_throughput(query, window_rows, args.scale):
                    rows.append(row)
                    print(format_row(row), flush=True)
        if "recoveries" in args.parts:
            query = CecQuery(WINDOW_ROWS, session, directory / "recoveries")
            for row in measure_recoveries(query, args.scale):
                rows.append(row)
                print(format_row(row), flush=True)
        stop_session(session)
    rows.append(load_average())
    report("cec", rows)
    (BENCH / "cec.md").write_text(tables(rows))


if __name__ == "__main__":
    main()
