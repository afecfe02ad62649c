"""The settings and effects of `TaskCore`. Pure.

The effects of its loop, saver, sinks and streams are in their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.memory import MemoryPlan, plan_memory
from rekindle.identity import Identity
from rekindle.protocol import PollResponse, SinkAssignment, TaskRef
from rekindle.task.core.loop import LoopRequest
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.saver import SaverEffect
from rekindle.task.core.shipping import ShipLog
from rekindle.task.core.sink import SinkEffect
from rekindle.task.core.start import CompleteStart, StartCall
from rekindle.task.core.streams import InputEffect
from rekindle.task.core.supervisor import (
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    RouteInputs,
    TruncateLog,
)


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
    consistency: ConsistencySettings | None = None  # of a task that reads streams
    input_names: Sequence[str] = ()  # by `Channel.input`
    segment_name: str = ""  # for problems
    held_log: tuple[int, int] | None = None  # see `PollResponse`
    left_out_intervals: int = 0  # see `ShippingCore`


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


@dataclass(frozen=True, slots=True)
class StopSink:
    """What the calls of this sink return is not needed any more."""

    assigned: SinkAssignment


@dataclass(frozen=True, slots=True)
class ServeStreamSinks:
    """Serve these stream sinks and no others, no epoch above `through` (None: all)."""

    through: int | None
    sinks: Sequence[SinkAssignment]


@dataclass(frozen=True, slots=True)
class EndComparison:
    """Sinks have compared all files that earlier boots may have written, and they are equal."""


TaskEffect = (
    Respond
    | RefusePoll
    | CallSink
    | StopSink
    | ServeStreamSinks
    | EndComparison
    | SetProblem
    | LoopRequest
    | InputEffect
    | SaverEffect
    | ShipLog
    | StartCall
    | CompleteStart
    | RouteInputs
    | TruncateLog
    | DiscardLog
    | CompareSinkFiles
    | EndProcess
)
TaskCoreEvent = Callable[[float], list[TaskEffect]]
"""What happened: a method of the core, but for the time."""
