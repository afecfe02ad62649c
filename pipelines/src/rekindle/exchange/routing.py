"""Which partitions of a producer a consumer's partition reads, and which of their rows. Pure.

FORWARD: the partition of the same number, whole. GATHER: all of them, whole. HASH: all of them, and
of each the rows whose key hashes to the consumer's partition. The coordinator's graph, the readers
of a task and the reference execution all ask here. It knows nothing of replicas or transport.

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
    """The rows of each of them that partition `consumer` of `consumers` reads; None: all rows."""
    if input.exchange is not Exchange.HASH or consumers == 1:
        return None
    return Share(input.key_by, consumers, consumer)
