"""Sinks of the kind `stream`: Arrow Flight for readers outside of the topology, and a reader.

`cursor` and `ticket` are pure; `reading` reads logs; `server` and `client` are the two ends of
Flight. Does not know engine or coordinator.

Design: docs/design/stream-sinks.md.
"""
