"""The kinds of sources and sinks: fields in the resource and their validation.

One module for each kind, with a class derived from `SourceOptions` or `SinkOptions` that has its
fields, validates and describes them, and names the connector. `SourceSpec` and `SinkSpec` list the
kinds; nothing else in `rekindle.topology` distinguishes them. Must not import connectors, which the
operator does not load.
"""
