"""Schemas of Avro records: parsed from their JSON, with names resolved.

Paper: Avro 1.12, "Schema Declaration", "Names", "Aliases".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_DEPTH = 100
"""Of types inside each other. Less than what the interpreter allows, which depends on the caller: a
schema is read by all replicas, or by none."""
_MOST_BYTES = (1 << 31) - 1
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


class InvalidAvroSchema(ValueError):
    """Names the field that is wrong."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """`logical`, `precision`, `scale`: of its logical type, if it has one."""

    kind: str
    logical: str = ""
    precision: int = 0
    scale: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    size: int
    logical: str = ""
    precision: int = 0
    scale: int = 0


@dataclass(frozen=True, slots=True)
class Enumeration:
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArrayOf:
    items: AvroType


@dataclass(frozen=True, slots=True)
class MapOf:
    values: AvroType


@dataclass(frozen=True, slots=True)
class UnionOf:
    branches: tuple[AvroType, ...]


@dataclass(frozen=True, slots=True)
class RecordName:
    """Of a record of the schema; it may be inside itself."""

    name: str


AvroType = Primitive | Fixed | Enumeration | ArrayOf | MapOf | UnionOf | RecordName


@dataclass(frozen=True, slots=True)
class AvroField:
    """`names`: its own and its aliases. `default`: as JSON, if `has_default`."""

    name: str
    type: AvroType
    names: tuple[str, ...]
    has_default: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """`root`: the name of the record that a value is."""

    root: str
    records: Mapping[str, tuple[AvroField, ...]]

    @property
    def fields(self) -> tuple[AvroField, ...]:
        return self.records[self.root]


def parse_avro_schema(text: str, references: tuple[str, ...] = ()) -> AvroSchema:
    """`references`: schemas whose names it uses, each after those that it uses itself. Raises
    InvalidAvroSchema."""
    parser = _Parser()
    try:
        for reference in references:
            parser.parse(_decoded(reference), "", "referenced schema")
        found = parser.parse(_decoded(text), "", "schema")
    except RecursionError as error:
        raise InvalidAvroSchema("the schema is nested too deeply") from error
    if not isinstance(found, RecordName):
        raise InvalidAvroSchema("it is not the schema of a record")
    return AvroSchema(found.name, parser.records)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidAvroSchema(f"not JSON from character {error.pos + 1} on") from error
    except ValueError as error:  # such as a number of thousands of digits
        raise InvalidAvroSchema(f"not JSON: {error}") from error


@dataclass(slots=True)
class _Parser:
    records: dict[str, tuple[AvroField, ...]] = field(default_factory=dict)
    _named: dict[str, AvroType] = field(default_factory=dict)
    _depth: int = 0

    def parse(self, given: Any, namespace: str, where: str) -> AvroType:
        if self._depth == _MOST_DEPTH:
            raise InvalidAvroSchema(f"more than {_MOST_DEPTH} types inside each other")
        self._depth += 1
        found = self._parse(given, namespace, where)
        self._depth -= 1
        return found

    def _parse(self, given: Any, namespace: str, where: str) -> AvroType:
        match given:
            case str():
                return self._by_name(given, namespace, where)
            case list():
                branches = [self.parse(b, namespace, where) for b in given]
                return UnionOf(tuple(branches))
            case {"type": "record" | "error"}:
                return self._record(given, namespace, where)
            case {"type": "enum"}:
                return self._enumeration(given, namespace, where)
            case {"type": "fixed"}:
                return self._fixed(given, namespace, where)
            case {"type": "array", "items": items}:
                return ArrayOf(self.parse(items, namespace, f"{where}[]"))
            case {"type": "map", "values": values}:
                return MapOf(self.parse(values, namespace, f"{where}[]"))
            case {"type": str(kind)} if kind in _PRIMITIVES:
                return Primitive(kind, *_logical(given, where))
            case {"type": dict() | list() | str() as inner} if inner not in ("array", "map"):
                return self.parse(inner, namespace, where)
            case _:
                raise InvalidAvroSchema(f"{where}: {json.dumps(given)[:80]} is no type")

    def _by_name(self, name: str, namespace: str, where: str) -> AvroType:
        if name in _PRIMITIVES:
            return Primitive(name)
        for full in (_full_name(name, namespace), name):
            if full in self._named:
                return self._named[full]
        raise InvalidAvroSchema(f"{where}: there is no type {name}")

    def _define(self, given: Mapping[str, Any], namespace: str, where: str) -> str:
        name = given.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidAvroSchema(f"{where}: a {given['type']} has no name")
        full = _full_name(name, str(given.get("namespace", namespace) or ""))
        if full in self._named:
            raise InvalidAvroSchema(f"{where}: {full} is defined twice")
        return full

    def _record(self, given: Mapping[str, Any], namespace: str, where: str) -> RecordName:
        full = self._define(given, namespace, where)
        fields = given.get("fields")
        if not isinstance(fields, list):
            raise InvalidAvroSchema(f"{where}: record {full} has no fields")
        self._named[full] = RecordName(full)  # before its fields, which may be of it
        inner = full.rpartition(".")[0]
        found = [self._field(each, inner, f"record {full}") for each in fields]
        names = [each.name for each in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InvalidAvroSchema(f"record {full}: field {twice} is there twice")
        self.records[full] = tuple(found)
        return RecordName(full)

    def _field(self, given: Any, namespace: str, where: str) -> AvroField:
        match given:
            case {"name": str(name), "type": type_}:
                aliases = given.get("aliases") or []
                if not isinstance(aliases, list) or not all(isinstance(a, str) for a in aliases):
                    raise InvalidAvroSchema(f"{where}, field {name}: aliases are a list of names")
                parsed = self.parse(type_, namespace, f"{where}, field {name}")
                has_default = "default" in given
                return AvroField(name, parsed, (name, *aliases), has_default, given.get("default"))
            case _:
                raise InvalidAvroSchema(f"{where}: a field has a name and a type")

    def _enumeration(self, given: Mapping[str, Any], namespace: str, where: str) -> Enumeration:
        full, symbols = self._define(given, namespace, where), given.get("symbols")
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise InvalidAvroSchema(f"{where}: enum {full} has no symbols")
        found = Enumeration(tuple(symbols))
        self._named[full] = found
        return found

    def _fixed(self, given: Mapping[str, Any], namespace: str, where: str) -> Fixed:
        full, size = self._define(given, namespace, where), given.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MOST_BYTES:
            raise InvalidAvroSchema(f"{where}: fixed {full} has no size, or too large a one")
        found = Fixed(size, *_logical(given, where))
        self._named[full] = found
        return found


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _logical(given: Mapping[str, Any], where: str) -> tuple[str, int, int]:
    """(name, precision, scale) of a logical type; an unknown one is ignored."""
    logical = given.get("logicalType")
    if logical != "decimal":
        return (logical if isinstance(logical, str) else ""), 0, 0
    precision, scale = given.get("precision"), given.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision:
        raise InvalidAvroSchema(f"{where}: a decimal has a precision, and a scale within it")
    return "decimal", precision, scale
