"""The coordinator as one state machine: events in, effects and the tasks' desired state out.

Puts `agreement`, `checkpoints` and `tasks` together. Pure: must not know how an event came to be or
how an effect is performed (Kubernetes, HTTP, the store, asyncio), nor what time it is: `now` is
passed in.
"""
