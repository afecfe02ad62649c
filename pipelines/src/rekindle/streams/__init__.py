"""Streams of epochs: digests, the output log, server and readers, SUnion.

Must not know the engine, sinks or stores.

Design: docs/design/streams.md.
"""
