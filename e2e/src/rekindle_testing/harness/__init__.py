"""What the demo, the failure tests and the benchmarks share: a cluster, an observer, an oracle."""
