"""The process of a coordinator: polls the tasks of one topology and commits its checkpoints.

Five packages decide and are pure: no I/O, clock, threads or randomness. From the top: `core` (the
state machine that combines the others), `agreement` (whether replicas compute the same) and
`checkpoints` (what is committed and
kept), `tasks` (which tasks exist, and who reads from whom). `model` has the types that they share,
with all effects. `shell` does the I/O around them. Each package only imports those below it.

Design: docs/design/coordinator.md#structure.
"""
