"""Changes of one place of a Kubernetes manifest. Pure."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rekindle_testing.fuzz import values
from rekindle_testing.fuzz.schema import Path, boundary_values, pool, random_value, schema_at

_SHOWN_CHARS = 60  # characters of a value in the name of a change
_MAX_PLACEHOLDERS = 4  # {0}, {1}, ... in a SELECT of `values`


@dataclass(frozen=True, slots=True)
class Mutation:
    path: Path
    what: str

    def __str__(self) -> str:
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return f"{path[1:]} {self.what}"


def mutate(manifest: dict[str, Any], rng: random.Random) -> Mutation:
    """Changes the manifest in place. Fields of the spec are changed most often."""
    if rng.random() < 0.04 or "spec" not in manifest:
        return _change_outside_spec(manifest, rng)
    inside = list(_paths(manifest["spec"], ("spec",)))
    if rng.random() < 0.3:
        found = _add_declared(manifest, rng.choice(inside), rng)
        if found is not None:
            return found
    path = rng.choice(inside)
    change = rng.choices(list(_CHANGES), weights=list(_CHANGES.values()))[0]
    return Mutation(path, change(manifest, path, rng))


def _paths(node: Any, path: Path) -> Iterator[Path]:
    yield path
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _paths(child, (*path, key))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _paths(child, (*path, index))


def at(manifest: Any, path: Path) -> Any:
    for part in path:
        manifest = manifest[part]
    return manifest


def _put(manifest: dict[str, Any], path: Path, new: Any) -> str:
    at(manifest, path[:-1])[path[-1]] = copy.deepcopy(new)
    text = repr(new)
    return f"= {text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + '...'}"


# --- changes ------------------------------------------------------------------


def _from_pool(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    """A value of the pool for this field (`fuzz.schema.pool`), valid or not."""
    chosen = rng.choice(pool(path, schema_at(path)))
    if isinstance(chosen, str) and "{0}" in chosen:
        streams = _streams(manifest)
        parent = at(manifest, path[:-1])
        inputs = parent.get("inputs") if isinstance(parent, dict) else None
        if isinstance(inputs, list) and inputs and rng.random() < 0.8:
            streams = [str(name) for name in inputs]
        chosen = chosen.format(*(rng.choice(streams) for _ in range(_MAX_PLACEHOLDERS)))
    return _put(manifest, path, chosen)


def _value_of_type(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    schema = schema_at(path)
    if schema is None:
        return _any_value(manifest, path, rng)
    return _put(manifest, path, random_value(path, schema, rng))


def _boundary_value(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    found = boundary_values(schema_at(path) or {})
    return _put(manifest, path, rng.choice(found or values.NUMBERS))


def _any_value(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    return _put(manifest, path, rng.choice((*values.ANYTHING, *values.NUMBERS, *values.TEXTS)))


def _name_of_stream(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    """A name, or a reference, anywhere in the spec becomes a stream's name: cycles, duplicates,
    inputs without any event time."""
    places = [p for p in _paths(manifest["spec"], ("spec",)) if _names_stream(p)]
    if not places:
        return _any_value(manifest, path, rng)
    place = rng.choice(places)
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)
    return f"and {where[1:]} {_put(manifest, place, rng.choice(_streams(manifest)))}"


def _names_stream(path: Path) -> bool:
    match path:
        case ("spec", "queries", int(), "from" | "name"):
            return True
        case ("spec", "sources" | "operators", int(), "name"):
            return True
        case ("spec", "operators", int(), "inputs", int()):
            return True
    return False


def _hostile_name(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    return _put(manifest, path, rng.choice(values.BAD_NAMES))


def _text(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    return _put(manifest, path, rng.choice(values.TEXTS))


def _within_text(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    """Insert a character or a text, drop a part, or repeat a part."""
    old = at(manifest, path)
    if not isinstance(old, str) or not old:
        return _from_pool(manifest, path, rng)
    start, end = sorted((rng.randrange(len(old) + 1), rng.randrange(len(old) + 1)))
    part = rng.choice(("", old[start:end] * 2, rng.choice(values.TEXTS), "(", "'", ",", " "))
    return _put(manifest, path, old[:start] + part + old[end:])


def _drop(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    del at(manifest, path[:-1])[path[-1]]
    return "dropped"


def _null(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    return _put(manifest, path, None)


def _wrapped(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    """The value as a text, in a list, or as the value of a field."""
    old = at(manifest, path)
    return _put(manifest, path, rng.choice((str(old), [old], {"value": old}, [[old]])))


def _repeat(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    """Repeat an item of a list, up to more items than any list may have."""
    lists = [p for p in _paths(manifest["spec"], ("spec",)) if isinstance(at(manifest, p), list)]
    place = rng.choice(lists) if lists else None
    if place is None or not (items := at(manifest, place)):
        return _drop(manifest, path, rng)
    one, times = rng.choice(items), rng.choice((1, 1, 1, 2, 16, 65))
    for n in range(times):
        again = copy.deepcopy(one)
        if isinstance(again, dict) and rng.random() < 0.7:
            again["name"] = f"r{n}"
        items.append(again)
    return f"and an item of {place[-1]} {times} times"


def _reorder(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    for field in ("sources", "operators", "queries"):
        items = manifest["spec"].get(field) if isinstance(manifest["spec"], dict) else None
        if isinstance(items, list):
            rng.shuffle(items)
    return "and lists in another order"


def _unknown_field(manifest: dict[str, Any], path: Path, rng: random.Random) -> str:
    key, new = rng.choice(values.BAD_NAMES), rng.choice(values.ANYTHING)
    old = at(manifest, path)
    if isinstance(old, dict):
        old[key] = copy.deepcopy(new)
        return f"has a field {key!r}"
    if not isinstance(path[-1], str) or len(path) < 2:
        return _any_value(manifest, path, rng)
    parent = at(manifest, path[:-1])
    renamed = rng.choice((path[-1].lower(), path[-1].upper(), path[-1] + "s", path[-1] + " "))
    parent[renamed] = parent.pop(path[-1])
    return f"renamed to {renamed!r}"


_Change = Callable[[dict[str, Any], Path, random.Random], str]
_CHANGES: dict[_Change, int] = {
    _from_pool: 10,
    _within_text: 4,
    _value_of_type: 4,
    _boundary_value: 3,
    _any_value: 3,
    _name_of_stream: 3,
    _drop: 3,
    _repeat: 2,
    _null: 2,
    _wrapped: 1,
    _text: 1,
    _hostile_name: 1,
    _reorder: 1,
    _unknown_field: 1,
}
"""With their weights."""


def _add_declared(manifest: dict[str, Any], path: Path, rng: random.Random) -> Mutation | None:
    """A field that the schema declares and the object lacks."""
    node, schema = at(manifest, path), schema_at(path)
    if not isinstance(node, dict) or schema is None:
        return None
    missing = [f for f in schema.get("properties") or {} if f not in node]
    if not missing:
        return None
    where: Path = (*path, rng.choice(missing))
    return Mutation(where, "added " + _from_pool(manifest, where, rng))


def _change_outside_spec(manifest: dict[str, Any], rng: random.Random) -> Mutation:
    metadata: dict[str, Any] = {
        "labels": rng.choice(
            ({"a": "b"}, {"a": 1}, {"a/b/c": "x"}, {"rekindle.dev/topology": "x"})
        ),
        "annotations": rng.choice(({"a": "ä" * 1000}, {"": ""}, {"a": None}, {"a": "x" * 300000})),
        "finalizers": rng.choice((["example.org/hold"], ["foregroundDeletion"], ["x"], [1])),
        "generateName": rng.choice(("g-", "G", "a" * 60, "")),
        "namespace": rng.choice(("other", "", 1)),
        "ownerReferences": rng.choice(([], [{}], [{"apiVersion": "v1", "kind": "Pod"}])),
        "uid": "x",
        "generation": rng.choice((7, -1, 2**63)),
        "resourceVersion": rng.choice(("", "0", "7")),
        "creationTimestamp": rng.choice((None, "yesterday")),
        "deletionTimestamp": "2013-01-01T00:00:00Z",
    }
    key = rng.choice([*metadata, "apiVersion", "kind", "metadata", "spec", "status", "data"])
    if key in metadata and isinstance(manifest.get("metadata"), dict):
        manifest["metadata"][key] = metadata[key]
        return Mutation(("metadata", key), f"= {str(metadata[key])[:_SHOWN_CHARS]}")
    if key == "status":
        status = {"conditions": [{"type": "Valid", "status": "True"}], "phase": "Running"}
        return Mutation((key,), _put(manifest, (key,), status))
    return Mutation((key,), _put(manifest, (key,), rng.choice(values.ANYTHING)))


def _streams(manifest: dict[str, Any]) -> list[str]:
    """Names of sources and operators."""
    spec = manifest.get("spec")
    lists = [spec.get(f) for f in ("sources", "operators")] if isinstance(spec, dict) else []
    nodes = [node for nodes in lists if isinstance(nodes, list) for node in nodes]
    found = [str(n["name"]) for n in nodes if isinstance(n, dict) and "name" in n]
    return found or ["nowhere"]
