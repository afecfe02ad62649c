"""The process of a task: `core` decides; `startup` builds the process, `runtime` supervises it,
`loop` runs epochs, `poll_handler` answers polls.

Must not know Kubernetes, the coordinator or PySpark itself.

Design: docs/design/task.md.
"""
