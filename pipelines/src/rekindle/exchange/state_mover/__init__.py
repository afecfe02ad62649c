"""The StateMover: a replica gets state and output log from a partner, the donor. Pure.

`newcomer` and `donor` are the two sides of a session, `holds` is the side of the newcomer's
upstream replicas. Which sessions there are is decided by the coordinator.

Design: docs/design/state-movement.md.
Paper: Flux (Shah et al. 2004), sections 3.4, 3.5 and 5.3.
"""
