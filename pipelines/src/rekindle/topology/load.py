"""Parses a StreamTopology from YAML, JSON or an object of the API server.

Errors of pydantic become problems with field paths of the resource.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rekindle.errors import InvalidTopology, Problem
from rekindle.names import API_VERSION, KIND
from rekindle.topology.documents import Document, read_documents
from rekindle.topology.durations import DURATION_UNITS_REQUIRED
from rekindle.topology.kinds.base import FIELDS_BELOW, Spec, spec_in
from rekindle.topology.problems import nearest
from rekindle.topology.spec import TopologySpec
from rekindle.topology.unparsable_fields import (
    field_at,
    field_path,
    problems_of_parsed_fields,
)

MAX_SHOWN_CHARS = 60
"""Characters of a value in a message."""


def load_topology(source: str | bytes | Mapping[str, Any]) -> tuple[str, TopologySpec]:
    """(metadata.name, spec) of one StreamTopology. Raises InvalidTopology if fields cannot be
    parsed; `rekindle.topology.validate` checks the rest."""
    resource = _parse_resource(source)
    problems = list(_problems_of_metadata(resource))
    try:
        spec = load_spec(resource["spec"]) if "spec" in resource else None
    except InvalidTopology as error:
        problems += error.problems
    else:
        problems += problems_of_parsed_fields(resource["spec"], []) if problems and spec else []
    if problems or spec is None:
        raise InvalidTopology(list(dict.fromkeys(problems)))
    return str(resource["metadata"]["name"]), spec


def load_spec(data: Any) -> TopologySpec:
    """Parses the `spec` alone. Raises InvalidTopology, also with the problems of the fields that
    can be parsed."""
    try:
        return TopologySpec.model_validate(data, context=DURATION_UNITS_REQUIRED)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        misnamed = {e["loc"][:-1] for e in errors if e["type"] == "invalid_key"}
        # A required field that seems to be missing there is the one with the wrong name.
        errors = [e for e in errors if e["type"] != "missing" or e["loc"][:-1] not in misnamed]
        problems = [_problem(e) for e in errors]
    rest = problems_of_parsed_fields(data, [p.path for p in problems])
    raise InvalidTopology(problems + rest)


def _parse_resource(source: str | bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    data: Any = source
    if isinstance(source, str | bytes):
        document = _topology_in(source)
        if document.problems:
            raise InvalidTopology(list(document.problems))
        data = document.data
    if not isinstance(data, Mapping):
        what, hint = "the file is not a Kubernetes object", "give a StreamTopology in YAML"
        raise InvalidTopology([Problem("", "NotAManifest", what, hint)])
    return data


def _topology_in(source: str | bytes) -> Document:
    try:
        documents = read_documents(source)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a 13th month, say
        what = " ".join(str(error).split())
        hint = "write it in UTF-8" if isinstance(error, yaml.reader.ReaderError) else ""
        raise InvalidTopology([Problem("", "NotYaml", f"not YAML: {what}", hint)]) from error
    topologies = [d for d in documents if isinstance(d.data, dict) and d.data.get("kind") == KIND]
    if len(topologies) > 1:
        what = f"has {len(topologies)} topologies, and only one would be read"
        hint = "write each into a file of its own"
        raise InvalidTopology([Problem("", "NotAManifest", what, hint)])
    return (topologies or documents or [Document(None, ())])[0]


def _problems_of_metadata(resource: Mapping[str, Any]) -> Iterator[Problem]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if resource.get(field) != wanted:
            yield Problem(field, "InvalidValue", f"is {resource.get(field)!r}", f"write {wanted}")
    metadata = resource.get("metadata")
    if not isinstance(metadata, Mapping) or not metadata.get("name"):
        yield Problem("metadata.name", "Missing", "a topology needs a name")
    if not isinstance(resource.get("spec"), Mapping):
        yield Problem("spec", "Missing", "a topology needs a spec")


def _problem(error: ErrorDetails) -> Problem:
    path = field_path(error["loc"])
    message = re.sub(r"^Value error, ", "", error["msg"])
    shown = _as_written(error["input"])
    if error["type"] == "invalid_key" or error["loc"][-1:] == ("[key]",):
        what = f"a field is called {shown}: YAML reads on, off, yes and no as true and false"
        parent = error["loc"][:-1] if error["type"] == "invalid_key" else error["loc"][:-2]
        return Problem(field_path(parent), "InvalidValue", what, "write it in quotes")
    match error["type"]:
        case "extra_forbidden":
            field = str(error["loc"][-1])
            spec = _spec_at(error["loc"][:-1])
            hint = _field_hint(field, spec) if spec else ""
            return Problem(path, "UnknownField", f"unknown field {field}", hint)
        case "missing":
            return Problem(path, "Missing", "is missing", "it is required")
        case "value_error":
            what, _, hint = message.replace(repr(error["input"]), shown, 1).partition("; ")
            return Problem(path, "InvalidValue", what, hint)
        case "literal_error":
            expected = str(error.get("ctx", {}).get("expected", "")).replace("'", "")
            meant = _encoding_of_alias(shown, re.split(", | or ", expected))
            return Problem(path, "InvalidValue", f"is {shown}", f"write {meant or expected}")
    what, hint = _wrong_value(error, shown)
    return Problem(path, "InvalidValue", what, hint)


def _wrong_value(error: ErrorDetails, shown: str) -> tuple[str, str]:
    """(message, hint) in terms of the resource."""
    if error["input"] is None:
        return "has no value", "write one, or leave the field out"
    limits = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"{shown} is less than {limits['ge']}", f"write {limits['ge']} or more"
        case "less_than_equal":
            return f"{shown} is more than {limits['le']}", f"write {limits['le']} or less"
        case "greater_than":
            return f"{shown} is not more than {limits['gt']}", f"write more than {limits['gt']}"
        case "tuple_type" if not isinstance(error["input"], Mapping):
            return f"{shown} is not a list", f"write [{shown}]"
        case "tuple_type":
            return f"{shown} is not a list", "write each item on a line of its own, after a -"
        case "string_type" if isinstance(error["input"], list):
            one = ", ".join(map(_as_written, error["input"]))
            return f"{shown} is not a string", f'write one string: "{one}"'
        case "string_type" if isinstance(error["input"], Mapping):
            # As the API of pods has it: {name: s3-rekindle}, {claimName: data}.
            values = list(error["input"].values())
            only = len(values) == 1 and isinstance(values[0], str)
            hint = f"write {_as_written(values[0])}" if only else "write one string"
            return f"{shown} is not a string", hint
        case "string_type":
            return f"{shown} is not a string", "write it in quotes"
        case kind if kind.startswith(("int_", "float_")) and _is_quoted_number(error["input"]):
            return f'"{shown}" is a string', f"write {shown}, without quotes"
        case kind if kind.startswith("int_"):
            return f"{shown} is not a whole number", "write it without quotes, like 2"
        case kind if kind.startswith(("float_", "finite_")):
            return f"{shown} is not a number", "write it without quotes, like 2.5"
        case kind if kind.startswith("bool_") and error["input"] in ("true", "false"):
            return f'"{shown}" is a string', f"write {shown}, without quotes"
        case kind if kind.startswith("bool_"):
            return f"{shown} is not true or false", "write true or false, without quotes"
        case "dict_type" if error["loc"][-2:-1] == ("imagePullSecrets",):
            return f"{shown} is not an object", f"write {{name: {shown}}}"
        case kind if kind.startswith(("model_", "dict_", "mapping_")):
            spec = _spec_at(error["loc"])
            return f"{shown} has no fields", spec.how_to_write() if spec else FIELDS_BELOW
        case _:
            return f"{error['msg'][:1].lower()}{error['msg'][1:]}, not {shown}", ""


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _encoding_of_alias(name: str, known: Iterable[str]) -> str:
    """The supported encoding of which `name` is an alias; "" if there is none."""
    codecs_known = {codec: other for other in known if (codec := _codec(other))}
    return codecs_known.get(_codec(name), "") if codecs_known else ""


def _codec(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        return ""


def _as_written(value: Any) -> str:
    """A value as in YAML, truncated if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _field_hint(field: str, spec: type[Spec]) -> str:
    """A hint with the field that was probably meant."""
    if meant := spec.wrong_field_names.get(field):
        return f"write {meant}"
    if spec is not TopologySpec and field in _fields_of(TopologySpec):
        return f"write spec.{field}, for the whole topology"
    return nearest(field, _fields_of(spec))


def _fields_of(spec: type[Spec]) -> list[str]:
    return [field.alias or name for name, field in spec.model_fields.items()]


def _spec_at(location: Sequence[int | str]) -> type[Spec] | None:
    """The class of the object at a location."""
    if not [part for part in location if isinstance(part, str)]:
        return TopologySpec
    field = field_at(location)
    return spec_in(field.annotation) if field is not None else None
