"""Growth of memory and disk while the flights topology runs 1,500 epochs on the embedded cluster.

Memory of the largest JVM, task, coordinator and operator, local disk and checkpoint store, sampled
every 25 epochs. Growth is the highest value of the last quarter over the highest of the second
(target: 1.1 for memory, 1.25 for disk, which varies with checkpoints and garbage collection). At
the end the sinks are compared with the reference execution. Takes about half an hour.

.venv/bin/python benchmarks/cluster_soak.py [--epochs 1500]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rekindle_testing.harness import flights
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.report import Measurement, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.harness.usage import Usage, usage
from rekindle_testing.waiting import wait_for

YEAR_S = 365 * 86_400  # of the data; an epoch is one second
SAMPLE_INTERVAL_EPOCHS = 25
MEMORY_TARGET, DISK_TARGET = 1.1, 1.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1500)
    epochs = parser.parse_args().epochs
    with (
        temporary_run_directory("soak") as directory,
        EmbeddedCluster(directory, nodes=5, on_progress=print) as cluster,
    ):
        flights.prepare_input(cluster.shared / "input")
        cluster.create_claim("rekindle")
        cluster.install()
        with TopologyRun(
            cluster, flights.topology_resource("soak", speedup=YEAR_S // epochs)
        ) as run:
            run.wait_live()
            starts = run.container_starts()
            sampled = range(SAMPLE_INTERVAL_EPOCHS, epochs, SAMPLE_INTERVAL_EPOCHS)
            samples = [_sample(cluster, run, epoch) for epoch in sampled]
            assert run.container_starts() == starts, "a task was restarted"
            reference = Reference(run.resource, cluster.shared, directory / "oracle")
            reference.execute()
            compared = run.verify(reference)
    rows = [
        _growth(kind, [s.memory.get(kind, 0.0) for s in samples], "MiB", MEMORY_TARGET)
        for kind in ("jvm", "task", "coordinator", "operator")
    ]
    rows += [
        _growth("local disk", [s.local_disk_mib for s in samples], "MiB", DISK_TARGET),
        _growth("checkpoint store", [s.store_mib for s in samples], "MiB", DISK_TARGET),
        _growth("objects in the store", [float(s.store_files) for s in samples], "", DISK_TARGET),
        Measurement("rows equal to the reference", {"rows": compared}),
    ]
    report("cluster_soak", rows)


def _sample(cluster: EmbeddedCluster, run: TopologyRun, epoch: int) -> Usage:
    wait_for(
        f"epoch {epoch}",
        lambda: min(run.observer.stable_epochs().values()) >= epoch,
        timeout_s=5 * SAMPLE_INTERVAL_EPOCHS,
        every_s=0.5,
    )
    found = usage(cluster, run.name)
    print(epoch, asdict(found), flush=True)
    return found


def _growth(what: str, series: list[float], unit: str, target: float) -> Measurement:
    quarter = len(series) // 4
    baseline, last = max(series[quarter : 2 * quarter]), max(series[-quarter:])
    values = {f"baseline {unit}".strip(): round(baseline, 1), f"end {unit}".strip(): round(last, 1)}
    values["growth"] = round(last / baseline, 3)
    return Measurement(what, values, target, last <= target * baseline)


if __name__ == "__main__":
    main()
