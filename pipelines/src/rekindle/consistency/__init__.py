"""The consistency manager of a task: when results become tentative, and how they are corrected.

Pure: no I/O, clocks, threads or randomness. Its shell is `rekindle.task`: `core.branches` there
executes its effects, if the output of the task may be tentative.

Design: docs/design/consistency.md.
"""
