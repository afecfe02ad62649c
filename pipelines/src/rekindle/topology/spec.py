"""The `spec` of a StreamTopology as Python objects: names and defaults of v1alpha1.

Parsing only: shapes, durations, quantities, unknown fields. Checks that need the graph, SQL or the
list of supported features are in `rekindle.topology.validate`. Durations are integers of
microseconds, sizes integers of bytes. No Kubernetes and no Spark here. The text below a field is
its description in docs/reference.md, which `make reference` writes. Fields of the kinds of sources
and sinks are in `rekindle.topology.kinds`.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, model_validator

from rekindle.topology.durations import Duration, read_duration
from rekindle.topology.kinds.base import SinkOptions, SourceOptions, Spec
from rekindle.topology.kinds.files import FilesSinkSpec, FilesSourceSpec
from rekindle.topology.kinds.generator import GeneratorSourceSpec
from rekindle.topology.kinds.kafka import KafkaSourceSpec
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec
from rekindle.topology.kinds.stream import StreamSinkSpec
from rekindle.topology.units import SECOND, parse_size


def _read_max_delay(value: Any, info: ValidationInfo) -> int | None:
    if value in ("Infinite", None):
        return None
    try:
        return read_duration(value, info)
    except ValueError as error:
        what = str(error).rpartition("; ")[0]
        raise ValueError(f"{what}; write it like 3s, or Infinite") from error


Size = Annotated[int, BeforeValidator(parse_size)]
MaxDelay = Annotated[int | None, BeforeValidator(_read_max_delay)]


def kinds_of(spec: type[BaseModel]) -> dict[str, type[SourceOptions | SinkOptions]]:
    """The kinds of `SourceSpec` or `SinkSpec` by name: their fields whose types are options."""
    return {
        name: given
        for name, field in spec.model_fields.items()
        for given in get_args(field.annotation)
        if isinstance(given, type) and issubclass(given, SourceOptions | SinkOptions)
    }


class AvailabilitySpec(Spec):
    delay_fraction: float = Field(0.9, ge=0, le=1)
    """Fraction of `maxDelay` that a task waits before it continues with tentative results."""
    during_failure: Literal["Process", "Delay"] = "Process"
    """What tasks do with tentative input while an input is missing."""
    during_stabilization: Literal["Process", "Delay", "Suspend"] = "Process"
    """What tasks do with new input while results are corrected."""


class CheckpointSpec(Spec):
    interval: Duration = 10 * SECOND
    """Time between two checkpoints; a multiple of `epochInterval`."""
    replay_target: Duration | None = None
    """How long the replay after a restart may take.
    [Checkpoints are left out](topology.md#checkpoint) as long as no operator needs more time."""
    store: str
    """URL of the checkpoints: `s3://...`, `gs://...`, `file:///...`, or another scheme
    [that can create an object only if it is absent](design/checkpoints.md#the-store). Cannot be
    changed."""
    retain: int = Field(3, ge=1)
    """Number of checkpoints that are kept."""
    secret_ref: str | None = None
    """Name of a Secret whose keys become environment variables of the tasks and the coordinator,
    such as [credentials of a store](operations.md#an-object-store). The name ends with `-rekindle`,
    unless [the administrator](operations.md#what-topologies-may-ask-of-their-pods) allows
    others."""
    volume: str | None = None
    """Name of a [PersistentVolumeClaim](operations.md#a-claim) (ReadWriteMany) that all tasks and
    the coordinator mount at `/var/lib/rekindle`. In a cluster, `file://` URLs of checkpoints and
    sinks have to be below that. Cannot be changed."""


class RecoverySpec(Spec):
    mode: Literal["Progressive", "Blocking"] = "Progressive"
    """Which missing tasks start while capacity is short, after any loss and at the first start:
    those of the queries that are worth most for what they cost (`Progressive`), or none before
    there is [capacity for all](design/recovery.md#plan) (`Blocking`)."""
    autoscale: bool = False
    """Let a cluster autoscaler see [what waiting queries lack](topology.md#nodes-on-demand):
    placeholder pods that request the same."""
    rebalance: bool = False
    """Move tasks to emptier nodes, one at a time, while nothing is wrong:
    [after a recovery](topology.md#moves-to-emptier-nodes) they are packed tightly."""
    standby: int | None = Field(None, ge=0, le=64)
    """How many [standbys](topology.md#standbys) to keep: pods with a started Spark, each of which
    can become any task with the same pod template in about a second. None by default."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_fields(cls, data: Any) -> Any:
        """Generation records of earlier releases have fields that decided nothing."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if k not in ("burstThreshold", "burstWindow")}


class CoordinatorSpec(Spec):
    resources: dict[str, Any] = Field(default_factory=dict)
    """`requests` and `limits` of the coordinator: `cpu` and `memory`. Each one that is missing is
    the chart's `coordinator.resources`."""


class EventTimeSpec(Spec):
    column: str
    """A TIMESTAMP column of the schema, or the one that `expression` computes."""
    expression: str | None = None
    """Computes the column from [the columns of the files](topology.md#event-time):
    `to_timestamp(started, 'dd/MM/yyyy HH:mm')`."""
    lateness: Duration = 0
    """How much older than the newest row a row may be. Windows close this much later.
    [Counted from epoch to epoch](topology.md#late-rows)."""
    idle_after: Duration | None = None
    """Time after which a partition of a topic without rows, or a whole source, no longer holds
    windows open; only for `kafka`."""


class SourceSpec(Spec):
    name: str
    """Name of the stream, by which operators and queries read it."""
    schema_: str = Field(alias="schema")
    """Columns and types as [Spark DDL](topology.md#sources):
    `origin STRING, delay DOUBLE, at TIMESTAMP`."""
    event_time: EventTimeSpec | None = None
    """Event-time column. Required if a window reads the source."""
    files: FilesSourceSpec | None = None
    """Rows of files."""
    generator: GeneratorSourceSpec | None = None
    """Generated rows, the same in every run."""
    kafka: KafkaSourceSpec | None = None
    """Rows of a Kafka topic."""
    partitions: int = Field(1, ge=1)
    """Number of partitions, which [share the rows](topology.md#partitions-of-a-source); more than 1
    only for `files` and `kafka`."""
    replicas: int | None = Field(None, ge=1)
    """Replaces `spec.replicas` for this source."""
    resources: dict[str, Any] | None = None
    """Replaces `spec.resources` for this source."""

    @property
    def kinds(self) -> dict[str, SourceOptions | None]:
        """Every kind by name, with its options; None if it is not set."""
        return {name: getattr(self, name) for name in kinds_of(type(self))}

    @property
    def kind(self) -> tuple[str, SourceOptions]:
        """The kind that is set; only for a valid source."""
        return next((name, given) for name, given in self.kinds.items() if given is not None)


class WindowSpec(Spec):
    """Kinds of windows: `rekindle.topology.windows`."""

    size: Duration | None = None
    """Length of each window."""
    slide: Duration | None = None
    """A window begins each `slide`; `size` is a multiple of it. Without it, windows do not
    overlap."""
    step: Duration | None = None
    """Windows that begin together, each `size`: the first one is a `step` long, each next one a
    `step` longer, up to `size`, which is a multiple of it."""
    session: Duration | None = None
    """A window ends after this time without rows of its group."""
    rows: int | None = None
    """Number of rows of each window."""
    slide_rows: int | None = None
    """Number of rows between the starts of two windows."""
    group_by: tuple[str, ...] = ()
    """Columns by which rows are grouped."""
    aggregate: str
    """List of [aggregates](topology.md#window): `count(*) AS flights, avg(delay) AS delay`."""


class JoinSpec(Spec):
    type: Literal["Inner", "Left", "Right", "Full", "Semi", "Anti"] = "Inner"
    """Which rows are written: pairs that match, with `Left`, `Right` and `Full` also rows of the
    first, the second and either input that match none; rows of the first input that match one
    (`Semi`) or none (`Anti`)."""
    on: str
    """[Condition](topology.md#join) over both inputs, with at least one equality:
    `orders.id = payments.order_id AND payments.amount > 0`."""
    within: Duration | None = None
    """How far apart the event times of two rows may be, in both directions."""
    before: Duration | None = None
    """How much earlier than the first row the second one may be; with `after`, in place of
    `within`."""
    after: Duration | None = None
    """How much later than the first row the second one may be."""
    select: str | None = None
    """Columns of the output: `orders.*, payments.amount`. Without it all columns of both."""
    when_missing: Literal["EmitMatches", "Block"] = "EmitMatches"
    """What is written while an input is missing and `maxDelay` is over: pairs that match, or
    nothing before it is back."""


class DistinctSpec(Spec):
    keys: tuple[str, ...]
    """Columns: rows with the same values in all of them are repetitions of each other."""
    within: Duration
    """How far apart the event times of two repetitions are at most, exclusive."""
    keep: Literal["First", "Last"] = "First"
    """Which [row](topology.md#distinct) is written: the first one at once, or the last one when
    event time says that it is."""


class OperatorCheckpointSpec(Spec):
    replay_target: Duration | None = None
    """Replaces `spec.checkpoint.replayTarget` for this operator."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_mode(cls, data: Any) -> Any:
        """CRDs and generation records of earlier releases have its only value."""
        if isinstance(data, dict) and data.get("mode") == "Global":
            return {k: v for k, v in data.items() if k != "mode"}
        return data


class OperatorSpec(Spec):
    KINDS: ClassVar = ("sql", "window", "join", "distinct", "python")
    """Of these fields exactly one says what the operator does."""

    name: str
    """Name of the stream, by which operators and queries read it."""
    inputs: tuple[str, ...]
    """Names of sources and operators."""
    key_by: tuple[str, ...] = ()
    """Columns by whose hash rows are distributed over the partitions."""
    partitions: int | None = Field(None, ge=1)
    """Number of partitions. Without it: 1 with `keyBy` or `window`, else as many as the input
    has."""
    replicas: int | None = Field(None, ge=1)
    """Replaces `spec.replicas` for this operator."""
    sql: str | None = None
    """[Row by row](topology.md#sql): `SELECT ... FROM input WHERE ...`."""
    window: WindowSpec | None = None
    """[Aggregates](topology.md#window) over windows of event time."""
    join: JoinSpec | None = None
    """[Rows of two inputs](topology.md#join) that match."""
    distinct: DistinctSpec | None = None
    """[One row](topology.md#distinct) for each key within a time."""
    python: dict[str, Any] | None = None
    """A Python function."""
    checkpoint: OperatorCheckpointSpec = Field(default_factory=OperatorCheckpointSpec)
    """How state is saved."""
    resources: dict[str, Any] | None = None
    """Replaces `spec.resources` for this operator."""


class SinkSpec(Spec):
    files: FilesSinkSpec | None = None
    """Files in a directory, one for each epoch with rows."""
    kafka: KafkaSinkSpec | None = None
    """Records of a Kafka topic, one for each row."""
    stream: StreamSinkSpec | None = None
    """A stream that other programs read over Arrow Flight."""

    @property
    def kinds(self) -> dict[str, SinkOptions | None]:
        """Every kind by name, with its options; None if it is not set."""
        return {name: getattr(self, name) for name in kinds_of(type(self))}

    @property
    def kind(self) -> tuple[str, SinkOptions]:
        """The kind that is set; only for a valid sink."""
        return next((name, given) for name, given in self.kinds.items() if given is not None)

    @property
    def output_url(self) -> str | None:
        """The URL that only this sink writes to; None if it has none."""
        return next((given.output_url for given in self.kinds.values() if given is not None), None)

    @property
    def waits_for(self) -> str:
        """What a call that does not return waits for, for a person."""
        given = (options.waits_for for options in self.kinds.values() if options is not None)
        return next(given, "the storage")

    @property
    def edited_in_place(self) -> dict[str, set[str]]:
        """The fields of each kind whose edit takes effect in the running sink, for `exclude` of
        pydantic."""
        return {name: set(given.edited_in_place) for name, given in self.kinds.items() if given}

    def writes_same_output_as(self, other: SinkSpec) -> bool:
        """Whether only fields differ that take effect in place."""
        return self == other or self._written() == other._written()

    def _written(self) -> dict[str, Any]:
        return self.model_dump(exclude=self.edited_in_place)

    @property
    def retained_bytes(self) -> int:
        """How much of its newest output a task keeps for readers of this sink."""
        return sum(given.retained_bytes for given in self.kinds.values() if given is not None)


class QuerySpec(Spec):
    name: str
    """Name of the query."""
    from_: str = Field(alias="from")
    """Name of the source or operator whose rows are written."""
    priority: int = Field(1, ge=0)
    """Value of the query if not all queries can run. Queries start in the order of
    [value for what they cost](design/recovery.md#plan). That finds a large sum of the values of
    those that run, not always the largest. Queries of value 0 start after all others."""
    sink: SinkSpec
    """Where rows are written."""

    @property
    def input_and_sink(self) -> str:
        """Both as JSON, without fields that take effect in place: if they change, the query
        starts over."""
        return self.model_dump_json(
            include={"from_", "sink"},
            exclude={"sink": self.sink.edited_in_place},
            by_alias=True,
            exclude_defaults=True,
            exclude_none=True,
        )


class TopologySpec(Spec):
    epoch_interval: Duration = SECOND
    """Length of an epoch. Results become stable at the ends of epochs. Between `100ms` and `60s`.
    Cannot be changed."""
    max_delay: MaxDelay = None
    """How long a task waits for a missing input before results become tentative."""
    availability: AvailabilitySpec = Field(default_factory=AvailabilitySpec)
    """Handling of tentative results."""
    checkpoint: CheckpointSpec
    """Where and how often state is saved."""
    log_budget: Size = 1024**3
    """Local disk for the output log of one task; at least `16Mi`."""
    buffering: Literal["Always"] = "Always"
    """Each task keeps its output [for readers that reconnect](design/streams.md#output-log)."""
    recovery: RecoverySpec = Field(default_factory=RecoverySpec)
    """How queries are recovered after failures."""
    replicas: int = Field(1, ge=1)
    """Number of replicas of each partition; all of them are active. Sources and operators can
    override it."""
    pod_template: dict[str, Any] = Field(default_factory=dict)
    """`metadata.labels`, `metadata.annotations` and `spec`, merged into the pod of each task, and
    [in part](operations.md#the-coordinators-pod) into that of the coordinator. Not everything
    [is allowed](operations.md#what-topologies-may-ask-of-their-pods). Names of labels and
    annotations do not begin with `rekindle.dev/`."""
    resources: dict[str, Any] = Field(default_factory=dict)
    """`requests` and `limits` of a task: `cpu` and `memory`; without them 500m and 1Gi. A segment
    has the maximum of its nodes. Other resources (`nvidia.com/gpu`, `ephemeral-storage`) are in
    `podTemplate.spec`, `resources` of the container `task`."""
    coordinator: CoordinatorSpec | None = None
    """The pod that coordinates the tasks."""
    executors: int = Field(0, ge=0)
    """Number of Spark executors of a task."""
    suspend: bool = False
    """Stop all tasks and keep their state."""
    image: str | None = None
    """Image of the tasks and the coordinator; without it the chart's `pipelines.image`."""
    image_pull_secrets: tuple[dict[str, str], ...] = ()
    """Secrets of the topology's namespace for pulling the image: `[{name: registry}]`."""
    service_account_name: str | None = None
    """Service account of the tasks. Not every one
    [is allowed](operations.md#what-topologies-may-ask-of-their-pods)."""
    spark_conf: dict[str, str] = Field(default_factory=dict)
    """Spark configuration of each task. What results depend on (time zone, ANSI mode, case) cannot
    be set."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """What happens to checkpoints and outputs when the resource is deleted."""
    sources: tuple[SourceSpec, ...]
    """[Where rows come from](topology.md#sources)."""
    operators: tuple[OperatorSpec, ...] = ()
    """[What is computed](topology.md#operators)."""
    queries: tuple[QuerySpec, ...]
    """[What is written](topology.md#queries), and how important it is."""

    @property
    def checkpoint_interval_epochs(self) -> int:
        """Epochs between two global checkpoints."""
        return max(1, self.checkpoint.interval // self.epoch_interval)
