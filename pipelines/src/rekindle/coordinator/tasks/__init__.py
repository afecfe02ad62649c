"""Which tasks exist, which of them are silent, and from which replicas each input is read.

Pure: must not know checkpoints (beyond the entries in poll responses), disputes or desired state.
"""
