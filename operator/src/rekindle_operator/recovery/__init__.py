"""What is lost, which queries come back, and on which nodes. Pure.

Design: docs/design/recovery.md.
"""
