"""Which partitions of a producer a consumer's partition reads, and which of their rows. Pure.

FORWARD: all rows of the partition with the same number. GATHER: all rows of all partitions. HASH:
of all partitions the rows whose key hashes to the consumer's partition. Used by the coordinator's
graph, the readers of a task and the reference execution. Does not know replicas or transport.

Design: docs/design/streams.md#exchange.
Paper: Flux (Shah et al. 2004), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.topology.model import Exchange, Input


@dataclass(frozen=True, slots=True)
class Share:
    """Rows whose `key_by` hashes to `index` of `partitions`."""

    key_by: tuple[str, ...]
    partitions: int
    index: int


def partitions_read(input: Input, consumer: int) -> Sequence[int]:
    """The producer's partitions that partition `consumer` reads, ascending."""
    return (consumer,) if input.exchange is Exchange.FORWARD else range(input.partitions)


def share_read(input: Input, consumers: int, consumer: int) -> Share | None:
    """The share of each partition of the producer that partition `consumer` of `consumers` reads;
    None: all rows."""
    if input.exchange is not Exchange.HASH or consumers == 1:
        return None
    return Share(input.key_by, consumers, consumer)
