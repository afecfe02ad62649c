"""Leaks over many epochs: JVM heap after a collection, metaspace, threads, Python RSS.

.venv/bin/python benchmarks/engine_soak.py [--epochs 2000]

Memory is in MiB.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from engine_parts import make_epoch_input, topology

from rekindle.engine.model import State
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import current_jvm, start_session, stop_session
from rekindle_testing.harness.report import Measurement, format_row, report

POINTS = 10
MIB = 2**20


def sample(session: Any, number: int) -> Measurement:
    java = session._jvm.java.lang
    java.System.gc()
    factory = java.management.ManagementFactory
    heap = factory.getMemoryMXBean().getHeapMemoryUsage().getUsed() / MIB
    non_heap = factory.getMemoryMXBean().getNonHeapMemoryUsage().getUsed() / MIB
    classes = factory.getClassLoadingMXBean().getLoadedClassCount()
    threads = factory.getThreadMXBean().getThreadCount()
    jvm = current_jvm()
    assert jvm is not None
    values = {
        "heap": heap,
        "non_heap": non_heap,
        "classes": classes,
        "threads": threads,
        "jvm_rss": psutil.Process(jvm.process.pid).memory_info().rss / MIB,
        "python_rss": psutil.Process().memory_info().rss / MIB,
    }
    return Measurement(f"epoch {number}", {what: round(v) for what, v in values.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    series: list[Measurement] = []
    with tempfile.TemporaryDirectory() as directory:
        session = start_session("soak", data_dir=Path(directory), cds_archive=arguments.archive)
        compiled = topology("window", Path(directory))
        chain = SparkChain(compiled.segments[0], compiled, session)
        rng, state = np.random.default_rng(3), State()
        for number in range(arguments.epochs + 1):
            state = chain.process(
                state, [make_epoch_input(100 + number, arguments.rows, rng)]
            ).state
            if number % max(1, arguments.epochs // POINTS) == 0:
                series.append(sample(session, number))
                print(format_row(series[-1]), flush=True)
        files = sum(1 for _ in Path(directory).rglob("*"))
        print(f"{chain.jobs} Spark jobs; {files} files under the data directory")
        stop_session(session)
    report("engine_soak", series)


if __name__ == "__main__":
    main()
