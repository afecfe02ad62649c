"""Cost of a large state: an epoch, a checkpoint and a restore, beside Structured Streaming.

.venv/bin/python benchmarks/engine_state.py [--groups 10000 1000000] [--only rekindle]
.venv/bin/python benchmarks/engine_state.py --only hopping

One window stays open. It is filled with `--groups` groups, then each epoch changes 1,000 of them,
drawn at random; every tenth epoch is a checkpoint. Each engine has a process and a JVM of its own
for each size, and they run one after another.

Measured for Rekindle: one iteration of the task's loop, as in `engine_epochs`; a checkpoint until
it is in the store, on the same disk, and its bytes, also divided by the bytes of the groups that
changed since the one before (of a page of the state, divided by its rows); loading the last
checkpoint; memory of Python and of the JVM without mapped files, in MiB. Measured for Structured
Streaming: `triggerExecution`, with RocksDB and changelog checkpoints.

`hopping`: windows of a day that begin each minute, 1,000 groups. An epoch has a minute of event
time and a row of each group, so that one window closes in each; measured after the first day. Rows
of the state, with those of panes that are combined, are divided by groups and panes.

Targets: at most half of Structured Streaming's p50 and p99; with a million groups at most 1.5 times
the p50 of 10,000; a checkpoint at most three times what changed. Of hopping windows: p50 at most
100 ms, p99 at most 300 ms, at most 1.1 rows for each group and pane.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from engine_epochs import STREAMING, percentiles
from engine_parts import AGGREGATE, GROUPS, MINUTE_US, SCHEMA, BenchTask, topology

from rekindle.checkpoints.run_objects import encode_runs
from rekindle.engine.memory import plan_memory
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import current_jvm, start_session, stop_session
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.epochs import EpochInput
from rekindle_testing.harness.report import Measurement, format_row, load_average, report

CHANGED = 1_000
FILL = 100_000
"""Rows of an epoch while the state is filled."""
CHECKPOINT_INTERVAL_EPOCHS = 10
WARM_UP = 20
MIB = 2**20
EPOCHS_OF_A_DAY = 1_440
MAX_RATIO_TO_STREAMING, MAX_GROWTH, MAX_WRITTEN_RATIO = 0.5, 1.5, 3.0
HOPPING_TARGETS = {"p50": 100.0, "p99": 300.0, "rows": 1.1}
SPEC = f"{{size: 365d, groupBy: [k], aggregate: '{AGGREGATE}'}}"
WINDOW_YAML = f"- {{name: last, inputs: [rows], window: {SPEC}}}"
HOPPING_YAML = WINDOW_YAML.replace("365d", "1d, slide: 1m")
CONF = {
    **STREAMING,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


def epochs(groups: int, count: int) -> Any:
    """Epochs that fill the state, and then `count` that change it; with the groups of each."""
    rng = np.random.default_rng(groups)
    number = CHECKPOINT_INTERVAL_EPOCHS
    for first in range(0, groups, FILL):
        yield _epoch(number, np.arange(first, min(first + FILL, groups)), rng)
        number += 1
    for _ in range(count):
        yield _epoch(number, rng.choice(groups, min(groups, CHANGED), replace=False), rng)
        number += 1


def _epoch(number: int, chosen: Any, rng: np.random.Generator) -> tuple[EpochInput, Any]:
    rows = len(chosen)
    start = number * MINUTE_US
    table = pa.table(
        {
            "k": pa.array(np.char.add("key-", np.char.zfill(chosen.astype(str), 9))),
            "v": rng.standard_normal(rows) * 1000,
            "n": rng.integers(0, 1_000_000, rows),
            "t": pa.array(start + rng.integers(0, MINUTE_US, rows)).cast(pa.timestamp("us", "UTC")),
        }
    )
    return EpochInput(number, start - 2 * MINUTE_US, start - MINUTE_US, (table,)), chosen


def rekindle(groups: int, count: int, directory: Path, archive: Path | None) -> dict[str, Any]:
    memory = plan_memory()
    session = start_session("bench", data_dir=directory, cds_archive=archive, memory=memory)
    compiled = topology("window", directory, WINDOW_YAML)
    files = RunFiles(directory / "state", memory.state_bytes)
    chain = SparkChain(compiled.segments[0], compiled, session, run_files=files)
    task = BenchTask(
        compiled,
        chain,
        directory,
        CHECKPOINT_INTERVAL_EPOCHS,
        checkpoint_interval_epochs=CHECKPOINT_INTERVAL_EPOCHS,
        memory=memory,
        max_epochs=1,
    )
    found: dict[str, list[float]] = {"epoch": [], "checkpoint": [], "bytes": []}
    fill, last = -(-groups // FILL), None
    changed: set[int] = set()
    distinct: list[int] = []
    for done, (one, chosen) in enumerate(epochs(groups, WARM_UP + count)):
        task.offer([one])
        begin = time.perf_counter()
        task.run_next()
        ended = time.perf_counter()
        if done >= fill:
            changed.update(chosen.tolist())
        task.wait_saved()
        if (saved := task.saved) is not None:
            last = saved
            if done >= fill + WARM_UP:
                found["checkpoint"].append((time.perf_counter() - begin) * 1000)
                found["bytes"].append(saved.bytes)
                distinct.append(len(changed))
            changed = set()
            task.commit_saved_checkpoint()
        if done >= fill + WARM_UP:
            found["epoch"].append((ended - begin) * 1000)
    jvm = current_jvm()
    assert jvm is not None
    resident = {
        "python": _anonymous(psutil.Process()),
        "jvm": _anonymous(psutil.Process(jvm.process.pid)),
    }
    assert last is not None
    begin = time.perf_counter()
    restored = task.restore(last)
    restore_s = time.perf_counter() - begin
    assert restored.epoch == last.epoch
    (state,) = restored.operators.operators.values()
    page = next(page.run for page in state.pages if page.run is not None)
    bytes_of_row = len(encode_runs([page.table])) / page.rows
    task.stop()
    stop_session(session)
    return {
        "epoch": found["epoch"],
        "checkpoint ms": float(np.median(found["checkpoint"])),
        "checkpoint KiB": float(np.mean(found["bytes"])) / 1024,
        "written / changed": sum(found["bytes"]) / (sum(distinct) * bytes_of_row),
        "restore ms": restore_s * 1000,
        "rows": state.rows,
        **{f"{what} MiB": value for what, value in resident.items()},
    }


def hopping(groups: int, count: int, directory: Path, archive: Path | None) -> dict[str, Any]:
    memory = plan_memory()
    session = start_session("bench", data_dir=directory, cds_archive=archive, memory=memory)
    compiled = topology("window", directory, HOPPING_YAML)
    files = RunFiles(directory / "state", memory.state_bytes)
    chain = SparkChain(compiled.segments[0], compiled, session, run_files=files)
    first, rng = CHECKPOINT_INTERVAL_EPOCHS, np.random.default_rng(groups)
    task = BenchTask(
        compiled,
        chain,
        directory,
        first,
        checkpoint_interval_epochs=CHECKPOINT_INTERVAL_EPOCHS,
        memory=memory,
    )
    times: list[float] = []
    most = 0.0
    for number in range(first, first + EPOCHS_OF_A_DAY + WARM_UP + count):
        task.offer([_epoch(number, np.arange(groups), rng)[0]])
        filled = number >= first + EPOCHS_OF_A_DAY
        if not filled and (number + 1) % CHECKPOINT_INTERVAL_EPOCHS:
            continue  # the epochs before a checkpoint in one call
        begin = time.perf_counter()
        while task.epoch < number:
            task.run_next()
        if number >= first + EPOCHS_OF_A_DAY + WARM_UP:
            times.append((time.perf_counter() - begin) * 1000)
        task.wait_saved()
        task.commit_saved_checkpoint()
        if filled:
            (state,) = task.state.operators.values()
            # Tree nodes: folds of ranges of panes, which are kept beside them
            # (`engine.state.panes`).
            rows = state.rows + sum(run.rows for run in state.tree_nodes.values())
            most = max(most, rows / (groups * len(state.panes)))
    python = _anonymous(psutil.Process())
    task.stop()
    stop_session(session)
    return {"epoch": times, "rows / (groups * panes)": most, "python MiB": python}


def _anonymous(process: psutil.Process) -> float:
    """Resident memory without mapped files, which the kernel can reclaim."""
    info = process.memory_info()
    return float(info.rss - info.shared) / MIB


def streaming(groups: int, count: int, directory: Path, archive: Path | None) -> dict[str, Any]:
    session = start_session("bench", conf=CONF, data_dir=directory, cds_archive=archive)
    session.sparkContext.setLogLevel("ERROR")
    place = directory / "in"
    place.mkdir(parents=True)
    rows = session.readStream.schema(SCHEMA).options(maxFilesPerTrigger="1").parquet(str(place))
    rows.withWatermark("t", "1 minute").createOrReplaceTempView("rows")
    frame = session.sql(
        f"SELECT window.start, window.end, k, {AGGREGATE} FROM rows"
        " GROUP BY window(t, '365 days'), k"
    )
    writer = frame.writeStream.outputMode("append").format("noop")
    query = writer.option("checkpointLocation", str(directory / "checkpoint")).start()
    times = []
    for one, _ in epochs(groups, WARM_UP + count):
        hidden = place / f"_{one.epoch}.parquet"
        pq.write_table(one.inputs[0], hidden)
        hidden.rename(place / f"{one.epoch:06d}.parquet")
        query.processAllAvailable()
        progress = [p for p in query.recentProgress if p["numInputRows"]][-1]
        times.append(float(progress["durationMs"]["triggerExecution"]))
    query.stop()
    jvm = current_jvm()
    assert jvm is not None
    resident = _anonymous(psutil.Process(jvm.process.pid))
    stop_session(session)
    return {"epoch": times[-count:], "jvm MiB": resident}


ENGINES = {"rekindle": rekindle, "streaming": streaming}
ALL = {**ENGINES, "hopping": hopping}


def _measure(pipe: Connection, engine: str, groups: int, count: int, archive: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        pipe.send(ALL[engine](groups, count, Path(name) / "task", archive))


def measured(engine: str, groups: int, count: int, archive: Path | None) -> dict[str, Any] | None:
    """In a process of its own; None if that ends before it has a result."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, engine, groups, count, archive)
    process = context.Process(target=_measure, args=arguments, daemon=True)
    process.start()
    theirs.close()
    result: dict[str, Any] | None = None
    with contextlib.suppress(EOFError):
        result = ours.recv()
    process.join()
    return result


def rows_of(groups: int, engine: str, result: dict[str, Any]) -> Measurement:
    times = {name: round(ms, 1) for name, ms in percentiles(result["epoch"]).items()}
    others = {name: round(value, 2) for name, value in result.items() if name != "epoch"}
    return Measurement(f"{groups} groups, {engine}", {**times, **others})


def rows_with_targets(results: dict[tuple[int, str], dict[str, Any]]) -> list[Measurement]:
    rows = []
    ours = {groups: r for (groups, engine), r in results.items() if engine == "rekindle"}
    for groups, result in ours.items():
        mine = percentiles(result["epoch"])
        if (other := results.get((groups, "streaming"))) is not None:
            theirs = percentiles(other["epoch"])
            ratios = {name: round(ms / theirs[name], 3) for name, ms in mine.items()}
            met = max(ratios.values()) <= MAX_RATIO_TO_STREAMING
            rows.append(
                Measurement(
                    f"{groups} groups, ratio to streaming", ratios, MAX_RATIO_TO_STREAMING, met
                )
            )
        written = result["written / changed"]
        values = {"bytes": round(written, 2)}
        rows.append(
            Measurement(
                f"{groups} groups, written / changed",
                values,
                MAX_WRITTEN_RATIO,
                written <= MAX_WRITTEN_RATIO,
            )
        )
    if {10_000, 1_000_000} <= ours.keys():
        small, large = (percentiles(ours[n]["epoch"])["p50"] for n in (10_000, 1_000_000))
        growth = round(large / small, 2)
        rows.append(
            Measurement("1000000 groups / 10000", {"p50": growth}, MAX_GROWTH, growth <= MAX_GROWTH)
        )
    return rows


def hopping_row(result: dict[str, Any]) -> Measurement:
    values = {**percentiles(result["epoch"]), "rows": result["rows / (groups * panes)"]}
    met = all(values[name] <= limit for name, limit in HOPPING_TARGETS.items())
    return Measurement(
        f"hopping, targets {HOPPING_TARGETS}",
        {n: round(values[n], 2) for n in HOPPING_TARGETS},
        met=met,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200)
    sizes = [10_000, 100_000, 1_000_000, 5_000_000]
    parser.add_argument("--groups", type=int, nargs="*", default=sizes)
    parser.add_argument("--only", choices=list(ALL))
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    results: dict[tuple[int, str], dict[str, Any]] = {}
    rows: list[Measurement] = []
    cases = [*((groups, engine) for groups in arguments.groups for engine in ENGINES)]
    for groups, engine in [*cases, (GROUPS, "hopping")]:
        if arguments.only not in (None, engine):
            continue
        found = measured(engine, groups, arguments.epochs, arguments.archive)
        if found is None:
            rows.append(Measurement(f"{groups} groups, {engine}: did not finish", {}))
        else:
            results[groups, engine] = found
            rows.append(rows_of(groups, engine, found))
        print(format_row(rows[-1]), flush=True)
    if (found := results.get((GROUPS, "hopping"))) is not None:
        rows.append(hopping_row(found))
    report("engine_state", [*rows, *rows_with_targets(results), load_average()])


if __name__ == "__main__":
    main()
