"""The I/O around the core: Kubernetes, polls, the checkpoint store, probes, and the process itself.

Turns observations into events and performs effects. Must not decide anything: no rule about tasks,
epochs or checkpoints belongs here.
"""
