"""Which replicas get their state from a partner, from which one, and when that is given up. Pure.

Not wired into the coordinator's state machine yet.

Design: docs/design/state-movement.md#the-coordinators-side.
"""
