"""Sinks of the kind `kafka`: fields and their validation.

Design: docs/design/exactly-once.md#topics-as-sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from rekindle.errors import Problem
from rekindle.topology.durations import Duration
from rekindle.topology.kinds.base import SinkOptions
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec
from rekindle.topology.problems import nearest
from rekindle.topology.schema import Schema
from rekindle.topology.units import format_duration

MARKERS_SUFFIX: Final = ".rekindle-epochs"
"""The topic of a sink's markers has the name of its topic with this suffix."""
_TOPIC_LENGTH = 249 - len(MARKERS_SUFFIX)


class KafkaSinkSpec(SinkOptions):
    connector: ClassVar[str | None] = "kafka_sink:open_sink"
    wrong_field_names: ClassVar[Mapping[str, str]] = {
        "bootstrap": "bootstrapServers",
        "brokers": "bootstrapServers",
        "keys": "key",
        "keyColumns": "key",
    }

    bootstrap_servers: str = Field(min_length=1)
    """Brokers to begin with: `kafka-0:9092,kafka-1:9092`."""
    topic: str = Field(min_length=1, max_length=_TOPIC_LENGTH, pattern=r"^[A-Za-z0-9._-]+$")
    """The topic, which has to exist."""
    format: Literal["json"] = "json"
    """Format of the values; `json` is one object in each."""
    key: tuple[str, ...] = Field((), max_length=16)
    """Columns that make the key of each record. Records with equal keys are in one partition of the
    topic, in the order of their epochs."""
    security: KafkaSecuritySpec | None = None
    """How the sink signs in, and TLS."""
    commit_interval: Duration | None = Field(None, gt=0)
    """How often a transaction ends; a multiple of `epochInterval` that divides
    `checkpoint.interval`. Without it, each epoch that has rows is a transaction."""

    @property
    def format_of_files(self) -> str:
        return self.format

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.security.secrets if self.security is not None else ()

    @property
    def waits_for(self) -> str:
        return f"topic {self.topic} at {self.bootstrap_servers}"

    def epochs_per_commit(self, epoch_interval: int) -> int:
        """`epoch_interval`: microseconds."""
        return 1 if self.commit_interval is None else self.commit_interval // epoch_interval

    def check(self, epoch_interval: int, checkpoint_interval: int, path: str) -> Iterator[Problem]:
        if self.commit_interval is None:
            return
        is_multiple = self.commit_interval % epoch_interval == 0
        if not is_multiple or checkpoint_interval % self.commit_interval:
            what = (
                f"{format_duration(self.commit_interval)} is not a multiple of epochInterval "
                f"({format_duration(epoch_interval)}) that divides checkpoint.interval "
                f"({format_duration(checkpoint_interval)})"
            )
            hint = "a checkpoint needs all results before it: write such a time, or leave it out"
            yield Problem(f"{path}.commitInterval", "NotAMultiple", what, hint)

    def check_columns(self, schema: Schema, path: str) -> Iterator[Problem]:
        for at, column in enumerate(self.key):
            where = f"{path}.key[{at}]"
            if column not in schema.names:
                hint = nearest(column, schema.names)
                yield Problem(where, "UnknownColumn", f"unknown column {column}", hint)
            elif column in self.key[:at]:
                what = f"column {column} occurs twice"
                yield Problem(where, "DuplicateColumn", what, "name it once")
