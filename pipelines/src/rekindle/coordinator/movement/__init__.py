"""Which replicas get their state from a partner, from which one, and when that is given up. Pure.

Design: docs/design/state-movement.md#the-coordinators-side.
"""
