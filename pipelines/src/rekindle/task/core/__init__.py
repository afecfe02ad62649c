"""What a task decides: state machines `step(event, now) -> effects`. Pure.

No I/O, clocks, threads or randomness. A core has at most one call in progress: the effect that
begins it is answered by one event that ends it. `wake_at` is the time at which a core has to be
woken if nothing happens before. `task` joins the cores; the process of a task drives each from a
thread of its own.

Design: docs/decisions/0045-task-core.md, docs/design/task.md.
"""
