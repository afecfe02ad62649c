"""The Kubernetes objects that the operator creates. Pure.

Design: docs/design/kubernetes.md#objects.
"""
