"""The `spec` of a StreamTopology as Python objects: names and defaults of v1alpha1.

Parsing only: shapes, durations, quantities, unknown fields. What needs the graph, SQL or the list
of what this version supports is `rekindle.topology.validate`. Durations are integers of
microseconds, sizes integers of bytes. No Kubernetes and no Spark here.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rekindle.topology.units import SECOND, parse_duration, parse_size

Duration = Annotated[int, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
MaxDelay = Annotated[
    int | None, BeforeValidator(lambda v: None if v in ("Infinite", None) else parse_duration(v))
]


class _Spec(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=False
    )

    @classmethod
    def name_of(cls, field: str) -> str:
        """What the manifest calls a field."""
        return cls.model_fields[field].alias or field


class AvailabilitySpec(_Spec):
    delay_fraction: float = Field(0.9, ge=0, le=1)
    during_failure: Literal["Process", "Delay"] = "Process"
    during_stabilization: Literal["Process", "Delay", "Suspend"] = "Process"


class CheckpointSpec(_Spec):
    interval: Duration = 10 * SECOND
    store: str
    retain: int = Field(3, ge=1)
    secret_ref: str | None = None
    volume: str | None = None


class RecoverySpec(_Spec):
    mode: Literal["Progressive", "Blocking"] = "Progressive"
    burst_threshold: int = Field(2, ge=0)
    burst_window: Duration = 10 * SECOND
    autoscale: bool = False


class EventTimeSpec(_Spec):
    column: str
    lateness: Duration = 0
    idle_after: Duration | None = None


class FilesSourceSpec(_Spec):
    """`speedup`: event time runs this many times faster than the clock; else `rowsPerSecond`."""

    url: str
    format: Literal["csv", "parquet", "json"]
    order_by: str | None = None
    speedup: float | None = Field(None, gt=0)
    rows_per_second: float | None = Field(None, gt=0)
    null_value: str = "NA"


class GeneratorSourceSpec(_Spec):
    """`columns`: column name -> expression, see `rekindle.topology.generator.columns`."""

    rows_per_second: float = Field(gt=0)
    seed: int = 0
    columns: dict[str, str] = Field(default_factory=dict)
    rows: int | None = Field(None, gt=0)


class SourceSpec(_Spec):
    name: str
    schema_: str = Field(alias="schema")
    event_time: EventTimeSpec | None = None
    files: FilesSourceSpec | None = None
    generator: GeneratorSourceSpec | None = None
    kafka: dict[str, Any] | None = None
    replicas: int | None = Field(None, ge=1)
    resources: dict[str, Any] | None = None


class WindowSpec(_Spec):
    """Kinds of windows: `rekindle.topology.windows`."""

    SELECTORS: ClassVar = ("size", "session", "rows")
    """Of these exactly one says of which kind a window is."""

    size: Duration | None = None
    slide: Duration | None = None
    session: Duration | None = None
    rows: int | None = None
    slide_rows: int | None = None
    group_by: tuple[str, ...] = ()
    aggregate: str


class OperatorCheckpointSpec(_Spec):
    mode: Literal["Global", "PerWindow"] = "Global"
    load_target: Size | None = None
    replay_target: Duration | None = None


class OperatorSpec(_Spec):
    """Exactly one of sql, window, join, distinct, python."""

    name: str
    inputs: tuple[str, ...]
    key_by: tuple[str, ...] = ()
    partitions: int | None = Field(None, ge=1)
    replicas: int | None = Field(None, ge=1)
    sql: str | None = None
    window: WindowSpec | None = None
    join: dict[str, Any] | None = None
    distinct: dict[str, Any] | None = None
    python: dict[str, Any] | None = None
    checkpoint: OperatorCheckpointSpec = Field(default_factory=OperatorCheckpointSpec)
    resources: dict[str, Any] | None = None


class FilesSinkSpec(_Spec):
    url: str
    format: Literal["parquet", "json"] = "parquet"


class SinkSpec(_Spec):
    files: FilesSinkSpec | None = None
    kafka: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None


class QuerySpec(_Spec):
    name: str
    from_: str = Field(alias="from")
    priority: int = Field(0, ge=0)
    sink: SinkSpec

    @property
    def identity(self) -> str:
        """What it reads and where it writes: changed, the query starts anew."""
        return self.model_dump_json(
            include={"from_", "sink"}, by_alias=True, exclude_defaults=True, exclude_none=True
        )


class TopologySpec(_Spec):
    epoch_interval: Duration = SECOND
    max_delay: MaxDelay = None
    availability: AvailabilitySpec = Field(default_factory=AvailabilitySpec)
    checkpoint: CheckpointSpec
    log_budget: Size = 1024**3
    buffering: Literal["Adaptive", "Always", "SourcesOnly"] = "Always"
    recovery: RecoverySpec = Field(default_factory=RecoverySpec)
    replicas: int = Field(1, ge=1)
    pod_template: dict[str, Any] = Field(default_factory=dict)
    resources: dict[str, Any] = Field(default_factory=dict)
    executors: int = Field(0, ge=0)
    suspend: bool = False
    image: str | None = None
    image_pull_secrets: tuple[dict[str, str], ...] = ()
    service_account_name: str | None = None
    spark_conf: dict[str, str] = Field(default_factory=dict)
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    sources: tuple[SourceSpec, ...]
    operators: tuple[OperatorSpec, ...] = ()
    queries: tuple[QuerySpec, ...]

    @property
    def checkpoint_every(self) -> int:
        """Epochs between two global checkpoints."""
        return max(1, self.checkpoint.interval // self.epoch_interval)
