"""State movements of a task: the shells around `exchange.state_mover`, and how state is encoded.

`pieces` is what moves, `donor` pins and reads it, `newcomer` requests, stores and installs it. The
decisions of both sides are in `exchange.state_mover` and in `task.core.movement`.

Design: docs/design/state-movement.md.
Paper: Flux (Shah et al. 2004), sections 3.4, 3.5 and 5.3.
"""
