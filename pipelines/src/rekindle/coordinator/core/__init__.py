"""The coordinator as one state machine: events in, effects and the tasks' desired state out.

Combines `agreement`, `checkpoints` and `tasks`. Pure: must not know where events come from or how
effects are performed (Kubernetes, HTTP, the store, asyncio), or the time: `now` is passed in.
"""
