"""Global checkpoint manifests: which entry each partition restores from.

Store layout below `<store>/<topology uid>/`:
  manifests/<seq:012d>.json          one Manifest, put-if-absent; the highest seq is the newest
  entries/<segment id>/<partition>/<epoch:012d>-<digest>-<token>.json    one Entry
  state/<operator id>/<digest>-<segment id>-<partition>-<epoch:012d>-<token>.arrow
                                      runs of one operator (Arrow IPC file, a batch each)
Names are opaque outside `rekindle.checkpoints.codec`; digests are of content, and the token of a
name is random (no secret), so that an object that is garbage is never used again.

Design: docs/design/checkpoints.md#what-a-checkpoint-is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rekindle.protocol import EntryRef


@dataclass(frozen=True, slots=True)
class Entry:
    """The object that an EntryRef names: the state objects of each operator, and more.

    `engine` and `state_format` are those of the task that saved it (`rekindle.engine.version`).

    `objects`: operator id -> object names. `layouts`: operator id -> where its runs are
    (`rekindle.engine.state.layout`); objects by their index in `objects`. `watermark`: the chain's
    watermark after `epoch`. `operators`: ids of the chain, so that its state is found when segments
    change.
    `chain`: the chained digest of the partition's output through `epoch`, not the chain of
    operators (the name is stored); "" if it begins with the next epoch.
    """

    segment: str
    partition: int
    epoch: int
    watermark: int
    operators: tuple[str, ...]
    objects: Mapping[str, tuple[str, ...]]
    chain: str = ""
    engine: str = ""
    state_format: int = 1
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gap:
    """Epochs of a query that no definition writes: those after `after`, the newest one that the
    earlier definition certainly wrote, and before `before`, the first one of the definition that
    began with `generation`."""

    after: int
    before: int
    generation: int


@dataclass(frozen=True, slots=True)
class QueryStart:
    """The first epoch that a query writes to its sink. `identity`: its input and sink; a query of
    the same name with another identity is a different query. `definition`: hash of the identity and
    of all operators upstream, `generation`: in which the definition began; both distinguish its
    output from that of the previous definition (`rekindle.connectors.epoch_ranges`). `gaps`: of
    this name, oldest first."""

    epoch: int
    identity: str
    definition: str = ""
    generation: int = 0
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """`entries`: "<segment id>/<partition>" -> restore points, newest first; more than one if a
    consumer is further behind, whose hold pins an older one. `seq`: number of the manifest.
    `queries`: by name. `fence`: incarnation of the coordinator that wrote it. `begun`: by operator
    id, the epoch after which an operator began that is younger than the topology."""

    seq: int
    epoch: int
    generation: int
    fence: int
    time: str
    entries: Mapping[str, tuple[EntryRef, ...]]
    queries: Mapping[str, QueryStart] = field(default_factory=dict)
    begun: Mapping[str, int] = field(default_factory=dict)
