"""The process of a coordinator: polls the tasks of one topology and commits its checkpoints.

Four rooms decide and are pure: no I/O, clock, thread or randomness. From the top: `core` (the state
machine that puts the parts together), `agreement` (do replicas compute the same?), `checkpoints`
(what is committed and kept), `tasks` (who is there, who reads whom). `model` has the types that
they share, with all events and effects. `edge` does the I/O around them. Each package imports only
those below it.

Design: docs/design/coordinator.md#structure.
"""
