"""The interface of sources: replayable, and cut into epochs by a pure function.

The supported kinds (files, generator) are cut by a function of the rows and the epoch number alone:
epoch 0 starts at the topology's origin, and no clock is read. So every replica, replay and
reference execution gets the same rows in the same epochs (FlameStream's producer that "can replay
some set of previous input elements"). The task decides when an epoch is released.

Design: docs/design/epochs.md#cuts, docs/design/exactly-once.md#sources.
Paper: FlameStream (Trofimov et al. 2019), section V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from rekindle.connectors.input_identity import InputFile
from rekindle.connectors.live_source import LiveSource
from rekindle.engine.memory import MemoryPlan
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec


@dataclass(frozen=True, slots=True)
class SourceCut:
    """The rows of one epoch and the watermark after it, microseconds UTC. `idle`: as of
    `EpochBatch`."""

    rows: pa.Table
    watermark: int
    idle: bool = False


@dataclass(frozen=True, slots=True)
class EventTimes:
    """`newest_us`: the newest event time of all rows through an epoch; NO_WATERMARK if there is
    none. `watermark`: after that epoch. Microseconds UTC."""

    newest_us: int
    watermark: int


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """The number of rows of a partition, and the first and last event time of all partitions, in
    microseconds UTC. `rows` and `last_us` are None for an unbounded source; both times are None if
    no row has an event time."""

    rows: int | None
    first_us: int | None
    last_us: int | None


class ReplayableSource(Protocol):
    """Returns any epoch of one partition, any number of times, in any order. `input_files`: the
    files of all partitions; empty if rows are computed or not verified. Partitions differ only in
    their rows: watermarks, last epoch and epochs to cut are those of the whole source, the same
    for each."""

    input_files: tuple[InputFile, ...]

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def last_epoch(self) -> int | None:
        """The last epoch that may have rows; NO_EPOCH if no epoch has rows, None if the source is
        unbounded. Later epochs have no rows, and the watermark END_OF_INPUT."""
        ...

    @property
    def summary(self) -> SourceSummary:
        """Does not need a cut; reads at most one column."""
        ...

    def cut(self, epoch: int) -> SourceCut: ...

    def event_times(self, epoch: int) -> EventTimes:
        """Through any epoch, also one that is not released yet; reads no rows."""
        ...

    def next_epoch_to_cut(self, epoch: int) -> int | None:
        """The first epoch, `epoch` or later, that has rows, advances the watermark, or is idle or
        no longer idle; None if there is none. The epochs before it need not be cut."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source is opened with. Its prepared files are in `work_dir`, which belongs to this
    process, and are reused after a restart. `memory` limits the size of a computed epoch.
    `partition`: number of the partition of `node`. `verifies_checksums`: each cut verifies a
    checksum, and `input_files` has the digest of each file. The reference execution, which has no
    replicas and no checkpoints, needs neither: its last cut checks that sizes and times of the
    files are the same."""

    spec: SourceSpec
    node: Node
    epoch_interval_us: int
    work_dir: Path
    memory: MemoryPlan | None = None
    partition: int = 0
    verifies_checksums: bool = True


OpenSource = Callable[[Any, SourceContext], ReplayableSource]
"""Opens a source with the options of its kind. Raises SourceFailed."""

OpenLiveSource = Callable[[Any, SourceContext], LiveSource]
"""Opens a source whose cuts are planned. Raises SourceFailed."""
