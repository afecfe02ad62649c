"""Which tasks there are, which of them are silent, and from which replicas each input is read.

Pure: must not know checkpoints (beyond what a task says it has saved), disputes or desired state.
"""
