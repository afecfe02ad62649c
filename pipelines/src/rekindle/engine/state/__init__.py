"""State of an operator as immutable runs: a base in pages, and deltas with the rows of recent
epochs. Pure, but for `spill`.

`runs` folds rows, `operator` defines the state of one operator, `reading` and `compaction` fold its
base and deltas, `panes` combines panes to windows, `layout` encodes the state for a checkpoint,
`remote` has runs that are not fetched yet, `spill` moves runs to memory-mapped files. Must not know
Spark, checkpoints or tasks.

Design: docs/decisions/0044-window-state.md, docs/design/engine.md#state.
"""
