"""The consistency manager of a task: when results become tentative, and how they are corrected.

Pure: no I/O, clocks, threads or randomness. Not part of a task yet.

Design: docs/design/consistency.md.
"""
