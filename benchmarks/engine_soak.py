"""Whether ten thousand epochs leak: JVM heap after a collection, metaspace, threads, Python RSS.

python benchmarks/engine_soak.py [--epochs 2000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from engine_topologies import epoch, topology

from rekindle.engine.model import State
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import current_jvm, start_session, stop_session

OUT = Path("build/bench/engine_soak.json")
POINTS = 10
MIB = 2**20


def sample(session: Any, number: int) -> dict[str, float]:
    java = session._jvm.java.lang
    java.System.gc()
    factory = java.management.ManagementFactory
    heap = factory.getMemoryMXBean().getHeapMemoryUsage().getUsed() / MIB
    other = factory.getMemoryMXBean().getNonHeapMemoryUsage().getUsed() / MIB
    classes = factory.getClassLoadingMXBean().getLoadedClassCount()
    threads = factory.getThreadMXBean().getThreadCount()
    jvm = current_jvm()
    assert jvm is not None
    return {
        "epoch": number,
        "heap": heap,
        "other": other,
        "classes": classes,
        "threads": threads,
        "jvm_rss": psutil.Process(jvm.process.pid).memory_info().rss / MIB,
        "python_rss": psutil.Process().memory_info().rss / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    series = []
    with tempfile.TemporaryDirectory() as directory:
        session = start_session("soak", data_dir=Path(directory), cds_archive=arguments.archive)
        compiled = topology("window")
        chain = SparkChain(compiled.segments[0], compiled, session)
        rng, state = np.random.default_rng(3), State()
        for number in range(arguments.epochs + 1):
            state = chain.process(state, [epoch(100 + number, arguments.rows, rng)]).state
            if number % max(1, arguments.epochs // POINTS) == 0:
                series.append(sample(session, number))
                if number == 0:
                    print(" ".join(f"{name:>10}" for name in series[0]) + "   (MiB)")
                print(" ".join(f"{v:10.0f}" for v in series[-1].values()), flush=True)
        files = sum(1 for _ in Path(directory).rglob("*"))
        print(f"{chain.jobs} Spark jobs; {files} files under the data directory")
        stop_session(session)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(series, indent=1))


if __name__ == "__main__":
    main()
