"""Connectors: replayable sources, and sinks that write each epoch once.

`open_source` and `open_sink` choose the connector; `compare_sinks` compares two outputs.
"""

from rekindle.connectors.compare import Difference, compare_sinks, read_sink
from rekindle.connectors.registry import open_sink, open_source
from rekindle.connectors.sink import Sink
from rekindle.connectors.source import ReplayableSource, SourceCut

__all__ = [
    "Difference",
    "ReplayableSource",
    "Sink",
    "SourceCut",
    "compare_sinks",
    "open_sink",
    "open_source",
    "read_sink",
]
