"""State of an operator as immutable runs: a base in pages, and deltas of single epochs. Pure, but
for `spill`.

`runs` folds rows, `operator` has the state of one operator, `panes` combines panes to windows,
`spill` moves runs to memory-mapped files. Must not know Spark, checkpoints or tasks.

Design: docs/decisions/0044-window-state.md, docs/design/engine.md#state.
"""
