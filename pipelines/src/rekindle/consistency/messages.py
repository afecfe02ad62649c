"""The settings and effects of the consistency manager. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from rekindle.errors import RekindleError
from rekindle.streams.epochs import EpochInput
from rekindle.streams.sunion import Channel


class InvalidInput(RekindleError):
    """What contradicts the effects before it: a bug in the task."""


class Policy(StrEnum):
    """When new input is processed: at once, as late as is allowed, or not at all for now."""

    PROCESS = "Process"
    DELAY = "Delay"
    SUSPEND = "Suspend"  # during stabilization only


@dataclass(frozen=True, slots=True)
class ConsistencySettings:
    """`inputs`: the partitions read, for each input; `blocking_inputs`: indices of inputs without
    which no epoch is processed (a join with `whenMissing: Block`); `max_delay_s`: None if infinite:
    then no result is ever tentative, and `schemas` (of each input) are not needed.

    What is buffered is bounded in bytes of memory (`read_ahead_bytes`, as for `SUnion`, and the
    same again in complete epochs, and for the tentative branch if there may be one) and in epochs
    of each channel.
    """

    inputs: Sequence[Sequence[int]]
    schemas: Sequence[pa.Schema] = ()
    blocking_inputs: frozenset[int] = frozenset()
    max_delay_s: float | None = None
    delay_fraction: float = 0.9
    during_failure: Policy = Policy.PROCESS
    during_stabilization: Policy = Policy.PROCESS
    first_attempt: int = 1
    replica: int = 0
    has_partner: bool = False
    lease_s: float = 10.0
    read_ahead_bytes: int = 256 << 20
    max_buffered_epochs: int = 1024
    max_call_epochs: int = 64

    def __post_init__(self) -> None:
        if self.during_failure is Policy.SUSPEND:
            raise ValueError("during a failure, input cannot be suspended: use an infinite delay")


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessStable:
    """Take as many complete epochs as fit into one call (`take_stable`), process them on the stable
    branch, and append the output to the log."""


@dataclass(frozen=True, slots=True)
class ForkState:
    """Begin a tentative branch with the stable state after an epoch."""

    attempt: int
    after: int


@dataclass(frozen=True, slots=True)
class ProcessTentative:
    """Process an epoch on a tentative branch; `channels`: those whose batches it has."""

    attempt: int
    epoch: EpochInput
    channels: tuple[Channel, ...]


@dataclass(frozen=True, slots=True)
class DropFork:
    """Forget the state of a tentative branch. Its output stays readable until retention drops
    it."""

    attempt: int


@dataclass(frozen=True, slots=True)
class EmitUndo:
    """Notify readers that tentative epochs from this one on are about to be corrected."""

    from_epoch: int


@dataclass(frozen=True, slots=True)
class EmitReconciliationDone:
    """Notify readers that all epochs through this one are corrected."""

    through: int


@dataclass(frozen=True, slots=True)
class ReadLive:
    """Read the newest version of each epoch, stable or tentative, with UNDO and REC_DONE."""

    channel: Channel
    from_epoch: int


@dataclass(frozen=True, slots=True)
class StopLive:
    channel: Channel


@dataclass(frozen=True, slots=True)
class ResumeStable:
    """Stable epochs from this one on were not buffered: read them from the upstream's log."""

    channel: Channel
    from_epoch: int


@dataclass(frozen=True, slots=True)
class RequestPostponement:
    """Ask the partner to serve while this replica stabilizes."""

    lease_s: float


@dataclass(frozen=True, slots=True)
class EndPostponement:
    """Notify the partner that it need not serve for this replica any longer."""


@dataclass(frozen=True, slots=True)
class AnswerPartner:
    promised: bool
    lease_s: float


ConsistencyEffect = (
    ProcessStable
    | ForkState
    | ProcessTentative
    | DropFork
    | EmitUndo
    | EmitReconciliationDone
    | ReadLive
    | StopLive
    | ResumeStable
    | RequestPostponement
    | EndPostponement
    | AnswerPartner
)
