"""The settings, events and effects of `TaskCore`, which only simulators and tests run. Pure.

What happened to its loop, saver, sinks and tentative inputs (`branches`) is a call of a method of
those cores; their effects are in their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.memory import MemoryPlan, plan_memory
from rekindle.exchange.state_mover.donor import DonorCoreEvent, DonorEffect, DonorLimits
from rekindle.exchange.state_mover.newcomer import (
    NewcomerCoreEvent,
    NewcomerEffect,
    NewcomerLimits,
)
from rekindle.identity import Identity
from rekindle.protocol import PollRequest, PollResponse, SinkAssignment, TaskRef
from rekindle.task.core.branches import BranchEffect, InputEvent
from rekindle.task.core.events import Woken
from rekindle.task.core.loop import LoopCore, LoopEffect, LoopRequest
from rekindle.task.core.saver import SaverCore, SaverEffect
from rekindle.task.core.sink import SinkCore, SinkEffect
from rekindle.task.core.start import CompleteStart, StartCall, StartStepFailed, StartStepSucceeded
from rekindle.task.core.supervisor import (
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    RouteInputs,
    StopRequested,
    TruncateLog,
)
from rekindle.task.state import TaskState


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """`origin_us`: start of epoch 0, Unix time; `engine`: its version."""

    ref: TaskRef
    boot_id: str
    checkpoint_interval_epochs: int
    epoch_interval_us: int
    origin_us: int = 0
    engine: str = ""
    fence: int = -1  # the highest one that earlier boots have seen; -1: none
    identity: Identity = field(default_factory=Identity)
    memory: MemoryPlan = field(default_factory=plan_memory)
    donor: DonorLimits = field(default_factory=DonorLimits)
    newcomer: NewcomerLimits = field(default_factory=NewcomerLimits)
    consistency: ConsistencySettings | None = None  # of a task whose output may be tentative
    input_names: Sequence[str] = ()  # by `Channel.input`


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PollReceived:
    poll: PollRequest


@dataclass(frozen=True, slots=True)
class TaskRestored:
    """State, inputs, engine and log are ready; the log holds `log_base` to `log_last`. `complete`:
    none of the state has to be fetched; otherwise StateComplete follows. `written_through`: the
    newest epoch that sinks certainly have; None: that of the state. `compare_files_from`: the first
    epoch of which an earlier boot may have written a wrong file; None: it has not."""

    state: TaskState
    log_base: int
    log_last: int
    compare_files_from: int | None = None
    complete: bool = True
    written_through: int | None = None


@dataclass(frozen=True, slots=True)
class StateComplete:
    """All of the restored state has been fetched."""


@dataclass(frozen=True, slots=True)
class HeadAdvanced:
    """`head`: the newest epoch that time, or the upstreams, have released."""

    head: int


@dataclass(frozen=True, slots=True)
class HeadsChecked:
    """`heads`: the newest epoch that a replica of each channel has released, NO_EPOCH if none has
    responded. Repeated; only for a task whose output may be tentative."""

    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogTruncated:
    base: int


@dataclass(frozen=True, slots=True)
class CallFailedPermanently:
    """A call failed, and a retry would not help: the task cannot continue."""

    error: Exception


@dataclass(frozen=True, slots=True)
class LoopReported:
    """`happened`: a call of a method of the loop's core, at a time."""

    happened: Callable[[LoopCore, float], list[LoopEffect]]


@dataclass(frozen=True, slots=True)
class SaverReported:
    """`happened`: a call of a method of the saver's core, at a time."""

    happened: Callable[[SaverCore, float], list[SaverEffect]]


@dataclass(frozen=True, slots=True)
class SinkReported:
    """`happened`: a call of a method of the assignment's core, at a time."""

    assigned: SinkAssignment
    happened: Callable[[SinkCore, float], list[SinkEffect]]


@dataclass(frozen=True, slots=True)
class NewcomerEventReceived:
    """An event of the newcomer's core: of a state movement to this task."""

    event: NewcomerCoreEvent


@dataclass(frozen=True, slots=True)
class DonorEventReceived:
    """An event of the donor's core: of state movements from this task."""

    event: DonorCoreEvent


@dataclass(frozen=True, slots=True)
class InputReported:
    """Of a task whose output may be tentative; inputs of other tasks answer `TakeEpochs`."""

    happened: InputEvent


TaskCoreEvent = (
    PollReceived
    | TaskRestored
    | HeadAdvanced
    | HeadsChecked
    | LogTruncated
    | CallFailedPermanently
    | SinkReported
    | NewcomerEventReceived
    | DonorEventReceived
    | LoopReported
    | StateComplete
    | SaverReported
    | StartStepSucceeded
    | StartStepFailed
    | StopRequested
    | InputReported
    | Woken
)

# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Respond:
    response: PollResponse


@dataclass(frozen=True, slots=True)
class RefusePoll:
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class CallSink:
    """A call of the sink of an assignment."""

    assigned: SinkAssignment
    call: SinkEffect


TaskEffect = (
    Respond
    | RefusePoll
    | CallSink
    | NewcomerEffect
    | DonorEffect
    | LoopRequest
    | BranchEffect
    | SaverEffect
    | StartCall
    | CompleteStart
    | RouteInputs
    | TruncateLog
    | DiscardLog
    | CompareSinkFiles
    | EndProcess
)
