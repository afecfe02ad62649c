"""Failure tests on a cluster that kind makes of Docker's containers.

Design: docs/existing-clusters.md.
"""
