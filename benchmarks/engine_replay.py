"""How much faster a replay is than the live stream: many epochs a job against one.

python benchmarks/engine_replay.py [--epochs 256] [--rows 500]

An epoch of one second with `--rows` rows is the live rate; a replay takes all that is waiting, up
to 64 epochs and 200,000 rows a job (docs/architecture.md). Prints rows per second and how many
times the live rate that is.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from engine_parts import epoch, topology

from rekindle.engine.model import EpochInput, State
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session

OUT = Path("build/bench/engine_replay.json")
SIZES = (1, 4, 16, 64)


def replay(chain: SparkChain, epochs: list[EpochInput], size: int) -> float:
    """Seconds for all epochs in calls of `size`."""
    state, begin = State(), time.perf_counter()
    for at in range(0, len(epochs), size):
        state = chain.process(state, epochs[at : at + size]).state
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=256)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(7)
    epochs = [epoch(100 + n, arguments.rows, rng) for n in range(arguments.epochs)]
    results = []
    print(f"{'query':7} {'epochs a job':>12} {'rows/s':>10} {'x one':>7} {'x live':>7}")
    with tempfile.TemporaryDirectory() as directory:
        session = start_session("replay", data_dir=Path(directory), cds_archive=arguments.archive)
        for kind in ("sql", "window"):
            compiled = topology(kind, Path(directory))
            chain = SparkChain(compiled.segments[0], compiled, session)
            replay(chain, epochs[:64], 4)
            times: dict[int, list[float]] = {size: [] for size in SIZES}
            for _ in range(arguments.rounds):
                for size in SIZES:
                    times[size].append(replay(chain, epochs, size))
            best = {size: min(series) for size, series in times.items()}
            for size in SIZES:
                rate = arguments.rows * len(epochs) / best[size]
                one, live = best[1] / best[size], len(epochs) / best[size]
                results.append({"query": kind, "size": size, "rows_s": rate, "live": live})
                print(f"{kind:7} {size:12} {rate:10.0f} {one:7.1f} {live:7.1f}", flush=True)
        stop_session(session)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"load": os.getloadavg(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
