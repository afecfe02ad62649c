"""`make demo`: runs the scenario on a fresh embedded cluster; exit 0 means every row was equal."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rekindle_testing.demo.scenario import Scenario
from rekindle_testing.demo.screen import Screen
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.evidence import keep_evidence
from rekindle_testing.harness.nodes import NodeResources
from rekindle_testing.paths import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lose-again",
        action="store_true",
        help="lose nodes, coordinator and operator once more in the middle of the recovery",
    )
    options = parser.parse_args()
    began = time.monotonic()
    screen = Screen()
    build = ROOT / "build" / "demo"
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="rekindle-demo-") as directory:
        # Room for one task on each node, so that every node that returns brings back one.
        resources = NodeResources(cpu="800m", memory="2Gi")
        cluster = EmbeddedCluster(
            Path(directory), nodes=9, resources=resources, on_progress=screen.print
        )
        scenario = Scenario(cluster, screen, build, loses_again=options.lose_again)
        with ThreadPoolExecutor(1) as pool:
            reference = pool.submit(scenario.execute_reference)
            with cluster, contextlib.ExitStack() as on_failure:
                on_failure.callback(keep_evidence, build / "evidence", cluster, {})
                wrong = scenario.run(reference)
                if not wrong:
                    on_failure.pop_all()
    for sentence in wrong:
        screen.print(f"[red]failed[/] {sentence}")
    took = time.monotonic() - began
    screen.print(f"{'[red]failed[/]' if wrong else '[green]succeeded[/]'} after {took:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
