"""Failure tests on a cluster that exists already and that others may use too.

Design: docs/existing-clusters.md.
"""
