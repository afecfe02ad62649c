"""Tests of Rekindle: an embedded cluster, a harness on it, the demo, and random faults."""
