"""Base classes of the kinds of sources and sinks.

Design: docs/design/compilation.md#resource.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticKnownError

from rekindle.errors import Problem
from rekindle.topology.schema import Field, Schema

FIELDS_BELOW = "write its fields below it, each as name: value"
_Error = Literal["bool_type", "int_type", "float_type"]
_ACCEPTED: Mapping[type, tuple[tuple[type, ...], _Error]] = {
    bool: ((bool,), "bool_type"),
    int: ((int, float), "int_type"),
    float: ((int, float), "float_type"),
}
"""By the type of a field: types of its values, and the error of others."""


class Spec(BaseModel):
    """A part of the resource: unknown fields are refused, names are camelCase."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=False,
        allow_inf_nan=False,
    )

    wrong_field_names: ClassVar[Mapping[str, str]] = {}
    """Wrong names that users may write -> the right field name, for a hint."""

    @classmethod
    def name_of(cls, field: str) -> str:
        """The name of a field in the resource."""
        return cls.model_fields[field].alias or field

    @classmethod
    def how_to_write(cls) -> str:
        """A hint for an object of this class that is written without fields."""
        if any(field.is_required() for field in cls.model_fields.values()):
            return FIELDS_BELOW
        return FIELDS_BELOW.replace("write", "write {}, or", 1)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_converted_values(cls, value: Any, info: ValidationInfo) -> Any:
        """The API server takes neither "2" for 2 nor 1 for true, as pydantic would."""
        field = cls.model_fields[info.field_name or ""]
        if any(isinstance(m, BeforeValidator) for m in field.metadata) or value is None:
            return value
        wanted = set(get_args(field.annotation) or (field.annotation,)) - {NoneType}
        for kind, (accepted, error) in _ACCEPTED.items():
            if wanted == {kind} and type(value) not in accepted:
                raise PydanticKnownError(error)
        return value


def spec_in(annotation: Any) -> type[Spec] | None:
    """The class of the object, or of the objects of a list, that a field holds."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next((m for a in get_args(annotation) if (m := spec_in(a))), None)


class SourceOptions(Spec):
    """The fields of one kind of source. `connector`: `module:function` in `rekindle.connectors`
    that opens a source of this kind; None: the kind is not supported yet."""

    connector: ClassVar[str | None] = None
    has_raw_columns: ClassVar[bool] = False
    """Whether `eventTime.expression` can compute event time from its columns."""
    can_be_partitioned: ClassVar[bool] = False
    """Whether `partitions` may be more than 1."""
    is_live: ClassVar[bool] = False
    """Whether its cuts are planned and recorded: it has no end, and its rows come when they
    like."""

    not_in_id: ClassVar[frozenset[str]] = frozenset()
    """Fields whose edit changes no epoch that has been computed: the operator id is without them,
    so the source goes on where it was. They apply to pods that are created after the edit. Those of
    an object are written `object.field`: whether the object is there remains in the id."""

    @property
    def added_columns(self) -> dict[str, Field]:
        """Columns that it adds to those of the schema, by the field that names them."""
        return {}

    @property
    def applied_to_new_pods(self) -> dict[str, Any]:
        """The values of the fields that are not in the id."""
        found = dict[str, Any]()
        for path in sorted(self.not_in_id):
            value: Any = self
            for name in path.split("."):
                value = getattr(value, name, None)  # of an object that is not there
            found[path] = value
        return found

    def remove_fields_of_new_pods(self, definition: dict[str, Any]) -> None:
        """From the definition of this source as JSON: they are not in the id."""
        for path in self.not_in_id:
            *above, name = map(to_camel, path.split("."))
            inside = definition
            for field in above:
                inside = inside.get(field) or {}
            inside.pop(name, None)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the Secrets that its tasks need as files."""
        return ()

    @property
    def input_url(self) -> str | None:
        """The URL of the files that it reads (field `url`); None if it reads none."""
        return None

    @property
    def output_url(self) -> str | None:
        """The URL (field `dead_letters`) to which it writes what are no rows; None if it writes
        nothing."""
        return None

    @property
    def dead_letter_connector(self) -> str | None:
        """`module:function` in `rekindle.connectors` that opens the place of what are no rows, if
        that has no URL."""
        return None

    @property
    def speed_field(self) -> tuple[str, float] | None:
        """The field that sets how fast the source gives its rows, and its value; None if no
        field does."""
        return None

    def with_url(self, url: str) -> Self:
        """A copy of this source that reads another URL."""
        return self.model_copy(update={"url": url})

    def describe(self) -> str:
        """What it reads, in a few words, for a drawing."""
        raise NotImplementedError

    def check(self, event_time: str | None, path: str) -> Iterator[Problem]:
        """Problems of the fields at `path`; `event_time` is the source's column."""
        yield from ()

    def check_declared(self, schema: Schema, path: str) -> Iterator[Problem]:
        """Problems of the columns of the source's `schema`, without those that are added."""
        yield from ()

    def check_columns(self, schema: Schema, event_time: str | None, path: str) -> Iterator[Problem]:
        """Problems of the columns that the fields name."""
        yield from ()


class SinkOptions(Spec):
    """The fields of one kind of sink. `connector`: as for a source."""

    model_config = ConfigDict(serialize_by_alias=True)  # polls bring sinks to tasks

    connector: ClassVar[str | None] = None
    edited_in_place: ClassVar[frozenset[str]] = frozenset()
    """Fields whose edit takes effect in the running sink (in place). After an edit of another one
    the query starts over (`QuerySpec.input_and_sink`)."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the Secrets that its tasks need as files."""
        return ()

    @property
    def output_url(self) -> str | None:
        """The URL (field `url`) that no other query may write to; None if it has none."""
        return None

    @property
    def retained_bytes(self) -> int:
        """How much of its newest output a task keeps for readers of this sink."""
        return 0

    @property
    def format_of_files(self) -> str:
        """The format in which a run on one machine writes files instead."""
        return "parquet"

    @property
    def waits_for(self) -> str:
        """What a call that does not return waits for, for a person."""
        return "the storage"

    def check(self, epoch_interval: int, checkpoint_interval: int, path: str) -> Iterator[Problem]:
        """Problems of the fields at `path`. The intervals are the topology's, in microseconds."""
        yield from ()

    def check_columns(self, schema: Schema, path: str) -> Iterator[Problem]:
        """Problems of the columns that the fields name, of the rows that are written."""
        yield from ()
