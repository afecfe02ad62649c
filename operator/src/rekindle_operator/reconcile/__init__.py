"""The operator's decisions: pure functions from a snapshot to actions; `core` combines them."""
