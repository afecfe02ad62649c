"""A Kubernetes cluster of a simulation: API server, scheduler, nodes with kubelets.

Knows Rekindle only by the rules that its CRD adds to the API.
"""
