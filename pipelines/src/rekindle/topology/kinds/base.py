"""What every kind of source and sink says of itself.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from rekindle.errors import Problem


class Spec(BaseModel):
    """A part of a manifest: unknown fields are refused, names are camelCase."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=False,
        allow_inf_nan=False,
    )

    other_names: ClassVar[Mapping[str, str]] = {}
    """Names that somebody may write for a field -> the field's, for a hint."""

    @classmethod
    def name_of(cls, field: str) -> str:
        """What the manifest calls a field."""
        return cls.model_fields[field].alias or field


class SourceOptions(Spec):
    """The fields of one kind of source. `connector`: `module:function` below
    `rekindle.connectors` that opens it; None: the kind is named, and not built."""

    connector: ClassVar[str | None] = None
    raw_rows: ClassVar[bool] = False
    """Whether it reads rows of which `eventTime.expression` can make event time."""

    @property
    def added_columns(self) -> dict[str, pa.Field]:
        """Columns that it adds to those of the schema, by the field that names them."""
        return {}

    @property
    def input_url(self) -> str | None:
        """The files that it reads, as its field `url` names them; None: it reads none."""
        return None

    def reading(self, url: str) -> Self:
        """The same source with other files."""
        return self.model_copy(update={"url": url})

    def describe(self) -> str:
        """What it reads, in a few words, for a drawing."""
        raise NotImplementedError

    def check(self, event_time: str | None, path: str) -> Iterator[Problem]:
        """What is wrong with the fields at `path`; `event_time` is the source's column."""
        yield from ()

    def check_columns(
        self, schema: pa.Schema, event_time: str | None, path: str
    ) -> Iterator[Problem]:
        """What is wrong with the columns that the fields name."""
        yield from ()


class SinkOptions(Spec):
    """The fields of one kind of sink. `connector`: as for a source."""

    connector: ClassVar[str | None] = None

    @property
    def output_url(self) -> str | None:
        """The place that no other query may write to, as its field `url` names it; None: none."""
        return None
