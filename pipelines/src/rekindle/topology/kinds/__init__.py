"""The kinds of sources and sinks: what a manifest says of each, and what is wrong with it.

One module a kind: a class of its fields, derived from `SourceOptions` or `SinkOptions`, that checks
and describes itself and names its connector. `SourceSpec` and `SinkSpec` list the kinds; nothing
else of `rekindle.topology` tells one kind from another. Must not know the connectors, which the
operator does not load.
"""
