"""Shared by the demo, the failure tests and the benchmarks: a cluster, an observer, an oracle."""
