"""How partitions read partitions: the hash of keys, and the shares of an epoch.

Design: docs/design/streams.md#exchange.
"""
