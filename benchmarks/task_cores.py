"""The cores of three tasks (a source, an operator, a query) without rows, in simulated time.

.venv/bin/python benchmarks/task_cores.py [--epochs 10000]

Each epoch goes through a reader, a call of the loop, the log and the query's sink; each tenth is a
checkpoint, and a poll after each hundredth commits the newest. Seconds of CPU, best of three runs,
with 1, 10 and 50 epochs released at once: with 1 each epoch is a call of its own, as in a task that
is Live. Target with 50, as for a task that catches up: 10,000 epochs in 1 s.
"""

from __future__ import annotations

import argparse
import time

from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment
from rekindle_testing.fixtures.simulated_topology import SimulatedTopology
from rekindle_testing.harness.report import Measurement, load_average, report

SEGMENTS = (
    SimulatedSegment("src"),
    SimulatedSegment("mid", ("src",)),
    SimulatedSegment("out", ("mid",), query=True),
)
TARGETS_S = {1: None, 10: None, 50: 1.0}
"""Epochs that are released at once, and the target in seconds."""
POLL_INTERVAL_EPOCHS = 100


def run(epochs: int, released_epochs: int) -> float:
    topology = SimulatedTopology(SEGMENTS)
    began = time.process_time()
    for done in range(released_epochs, epochs + 1, released_epochs):
        topology.release(released_epochs)
        if done % POLL_INTERVAL_EPOCHS == 0:
            topology.poll_all()
    took_s = time.process_time() - began
    assert all(task.state_epoch == topology.head for task in topology.tasks.values())
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10_000)
    epochs = parser.parse_args().epochs
    rows = []
    for released_epochs, target_s in TARGETS_S.items():
        best_s = min(run(epochs, released_epochs) for _ in range(3))
        values = {"s": round(best_s, 2), "epochs/s": round(epochs / best_s)}
        met = None if target_s is None else best_s < target_s * epochs / 10_000
        rows.append(Measurement(f"{released_epochs} epochs at once", values, target_s, met))
    report("task_cores", [*rows, load_average()])


if __name__ == "__main__":
    main()
