"""A Kubernetes cluster of local processes. Must not know Rekindle.

Design: docs/embedded-cluster.md, docs/process-nodes.md.
"""
