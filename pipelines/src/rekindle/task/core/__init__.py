"""What a task decides: state machines; what happened is a method, which returns effects. Pure.

No I/O, clocks, threads or randomness. A core has at most one call in progress: an effect begins it,
one event ends it. `wake_at` is the time of `woken`, if nothing happens before.
`task` combines the cores; the process of a task drives each from its own thread.

Design: docs/decisions/0045-task-core.md, docs/design/task.md.
"""
