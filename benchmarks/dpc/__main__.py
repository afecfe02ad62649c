"""`make bench-dpc`."""
from __future__ import annotations
import argparse
from dpc.failures import measure_failures
from dpc.scenario import bench_cluster
from dpc.topologies import POLICIES, Policy
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, nargs="*", default=[5, 15, 30, 60])
    parser.add_argument("--policies", type=Policy.of, nargs="*", default=POLICIES)
    a = parser.parse_args()
    with bench_cluster() as cluster:
        measure_failures(cluster, a.policies, a.seconds, lambda r: print(r, flush=True))
if __name__ == "__main__":
    main()
