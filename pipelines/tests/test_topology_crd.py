"""The CRD and the classes of the spec say the same: names, values, defaults, what is required."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter

from rekindle.topology.kinds.base import spec_in
from rekindle.topology.spec import TopologySpec
from rekindle_testing.fixtures.crd import resource_schema

Place = tuple[str, dict[str, Any], type[BaseModel]]


def _places(path: str, schema: dict[str, Any], model: type[BaseModel]) -> Iterator[Place]:
    """Every object of a spec with fields of its own: path, schema, class."""
    if not model.model_fields:  # of a kind that is not built
        return
    yield path, schema, model
    for name, field in model.model_fields.items():
        alias = field.alias or name
        inner, child = schema["properties"].get(alias, {}), spec_in(field.annotation)
        if child is not None and inner:
            yield from _places(f"{path}.{alias}", inner.get("items", inner), child)


PLACES = list(_places("spec", resource_schema()["properties"]["spec"], TopologySpec))
each = pytest.mark.parametrize(
    ("schema", "model"), [p[1:] for p in PLACES], ids=[p[0] for p in PLACES]
)


@each
def test_fields_have_the_same_names(schema: dict[str, Any], model: type[BaseModel]) -> None:
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert set(schema["properties"]) == names


@each
def test_the_same_fields_are_required(schema: dict[str, Any], model: type[BaseModel]) -> None:
    required = {f.alias or name for name, f in model.model_fields.items() if f.is_required()}
    assert set(schema.get("required", ())) == required


@each
def test_defaults_are_the_same(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        shape = schema["properties"][field.alias or name]
        default = field.get_default(call_default_factory=True)
        if "default" in shape:
            given: Any = Annotated[field.annotation, name, *field.metadata]
            assert TypeAdapter(given).validate_python(shape["default"]) == default, name
        elif not field.is_required():
            assert default in (None, (), {}), name


@each
def test_the_same_values_are_allowed(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        values = schema["properties"][field.alias or name].get("enum")
        is_literal = get_origin(field.annotation) is Literal
        assert values == (list(get_args(field.annotation)) if is_literal else None), name
