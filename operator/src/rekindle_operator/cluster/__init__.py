"""What the operator sees: caches of the Kubernetes API, and snapshots of them. Decides nothing.

Design: docs/design/kubernetes.md#watching.
"""
