"""What a task decides: state machines `step(event, now) -> effects`. Pure.

No I/O, clocks, threads or randomness. A core has at most one call in progress: an effect begins it,
one event ends it. `wake_at` is the time at which a core has to be woken if no event comes before.
`task` combines the cores; the process of a task drives each from its own thread.

Design: docs/decisions/0045-task-core.md, docs/design/task.md.
"""
