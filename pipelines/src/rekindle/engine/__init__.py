"""A chain of operators as a function of state and epochs: `model` defines its types, `spark` runs
it.

Must not know tasks, connectors or checkpoints.

Design: docs/design/engine.md.
"""
