"""`make fuzz`: generated manifests against a real API server and the operator as a process.

Here a manifest is a Kubernetes manifest, of a StreamTopology that may be invalid.
"""
