"""Time of an epoch of an inner join, by how many rows are retained.

.venv/bin/python benchmarks/join_epochs.py [--epochs 120] [--rows 1000] [--retained 10000 1000000]

Each size has its own process and JVM; they take turns, epoch by epoch, and the others wait. An
epoch has `rows` rows, half of each input, from memory, which match about one row each; a condition
and four columns are evaluated on the pairs. Measured is `SparkChain.process`: milliseconds, and
milliseconds of CPU of Python and the JVM, which other load of the machine changes less. What is
retained is filled before. Target: 1,000,000 rows cost at most 1.5 times as much as 10,000.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from engine_parts import JoinInputs, join_operator, topology

from rekindle.engine.model import State
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import current_jvm, start_session
from rekindle.engine.state.spill import RunFiles
from rekindle_testing.harness.report import Measurement, load_average, report

TARGET_RATIO = 1.5
WARM_UP_EPOCHS = 25
EPOCHS_PER_CALL = 32
STATE_BYTES = 256 << 20


def _serve(pipe: Connection, rows: int, retained: int, directory: Path) -> None:
    inputs = JoinInputs(rows, retained, first=0)
    compiled = topology("join", directory, join_operator("join", inputs.minutes), ("a", "b"))
    session = start_session("bench", data_dir=directory)
    session.sparkContext.setLogLevel("ERROR")
    files = RunFiles(directory / "state", STATE_BYTES)
    chain = SparkChain(compiled.segments[-1], compiled, session, run_files=files)
    state, number = State(), JoinInputs.FILL_EPOCHS
    for filled in range(number):
        state = chain.process(state, [inputs.epoch(filled)]).state
    call = [inputs.epoch(number + at) for at in range(EPOCHS_PER_CALL)]
    state, number = chain.process(state, call).state, number + EPOCHS_PER_CALL
    pipe.send(sum(table.rows for table in state.operators.values()))
    while pipe.recv():
        one = inputs.epoch(number)
        begin, cpu = time.perf_counter(), _cpu_ms()
        state, number = chain.process(state, [one]).state, number + 1
        pipe.send(((time.perf_counter() - begin) * 1000, _cpu_ms() - cpu))


def _cpu_ms() -> float:
    """Of this process and its JVM."""
    jvm = current_jvm()
    assert jvm is not None, "the session runs"
    fields = Path(f"/proc/{jvm.process.pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() * 1000 + 10 * (int(fields[11]) + int(fields[12]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--rows", type=int, default=1_000)
    parser.add_argument("--retained", type=int, nargs="*", default=[10_000, 1_000_000])
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as work:
        pipes: dict[int, Connection] = {}
        for retained in arguments.retained:
            pipes[retained], end = context.Pipe()
            place = Path(work) / str(retained)
            given = (end, arguments.rows, retained, place)
            context.Process(target=_serve, args=given, daemon=True).start()
            end.close()  # so that the end of the process is noticed
            print(f"{pipes[retained].recv():,} rows in the tables")
        times: dict[int, list[tuple[float, float]]] = {retained: [] for retained in pipes}
        for _ in range(WARM_UP_EPOCHS + arguments.epochs):
            for retained, pipe in pipes.items():
                pipe.send(True)
                times[retained].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(False)
    rows, first = [load_average()], 0.0
    for retained, series in times.items():
        wall, cpu = (np.array(column) for column in zip(*series[WARM_UP_EPOCHS:], strict=True))
        p50, p99 = (round(float(p), 1) for p in np.percentile(wall, [50, 99]))
        first = first or float(np.median(cpu))
        ratio = round(float(np.median(cpu)) / first, 2)
        values = {"p50": p50, "p99": p99, "cpu": round(float(np.median(cpu)), 1), "ratio": ratio}
        met = ratio <= TARGET_RATIO
        rows.append(Measurement(f"{retained:,} retained, ms", values, TARGET_RATIO, met))
    report("join_epochs", rows)


if __name__ == "__main__":
    main()
