"""Validates a spec with unparsable fields, so that all problems are reported at once.

Unparsable fields are replaced by defaults or placeholders, and problems that may follow from that
are left out: those of the same source, operator or query, and of all that read it.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rekindle.errors import Problem
from rekindle.topology.graph import edges_of, nodes_and_ancestors, nodes_with_paths
from rekindle.topology.kinds.base import Spec, spec_in
from rekindle.topology.spec import TopologySpec
from rekindle.topology.validate import validate

Location = tuple[int | str, ...]

_MAX_ATTEMPTS = 8
"""Attempts to replace fields: the placeholder of an object may itself lack fields."""
_PLACEHOLDER = "placeholder"
_GRAPH_REASONS = frozenset({"UnknownInput", "Unused", "Cycle", "DuplicateName", "UnreadInput"})
_SPEC_FIELDS = frozenset(field.alias or name for name, field in TopologySpec.model_fields.items())
_FIELDS_WITH_NAMES = frozenset({"name", "inputs", "from", "sources", "operators", "queries"})
"""Fields that are names, or hold objects with names."""
_CONSEQUENCES = {
    "spec.epochInterval": frozenset({"NotAMultiple"}),
    "spec.checkpoint.interval": frozenset({"NotAMultiple"}),
    "spec.checkpoint.volume": frozenset({"NoVolume"}),
}
"""By field: reasons of problems that are left out if the field cannot be parsed."""


def problems_of_parsed_fields(data: Any, unparsable: Sequence[str]) -> list[Problem]:
    """Further problems of a spec whose fields at these paths cannot be parsed; [] if it cannot be
    validated at all. `file://` URLs are accepted: whether this is a local run is not known."""
    spec = _with_placeholders(data)
    if spec is None:
        return []
    found = validate(spec, "topology", skip_cluster_checks=True)
    unparsable_paths = [_parts(path) for path in unparsable]
    return [p for p in found if not _is_consequence(p, spec, unparsable_paths)]


def _with_placeholders(data: Any) -> TopologySpec | None:
    """The spec with defaults and placeholders for unparsable fields."""
    data = copy.deepcopy(data)
    for _ in range(_MAX_ATTEMPTS):
        try:
            return TopologySpec.model_validate(data)
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_context=False):
                if not _replace(data, problem["loc"], problem["type"]):
                    return None
    return None


def _replace(data: Any, location: Location, error_type: str) -> bool:
    *parents, last = location or (None,)
    parent = data
    try:
        for part in parents:
            parent = parent[part]
        if error_type == "extra_forbidden":
            del parent[last]
            return True
        field = field_at(location)
        if field is None:
            return False
        if isinstance(last, str) and not field.is_required():
            del parent[last]
        elif isinstance(last, int):
            parent[last] = _placeholder(typing.get_args(field.annotation)[0])
        else:
            parent[last] = _placeholder(field.annotation)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def field_at(location: Iterable[int | str]) -> FieldInfo | None:
    """The field at a location; for an item of a list, the field that is the list."""
    model: type[Spec] | None = TopologySpec
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            continue
        if model is None:
            return None
        by_alias = {f.alias or n: f for n, f in model.model_fields.items()}
        field = by_alias.get(part)
        model = spec_in(field.annotation) if field is not None else None
    return field


def _placeholder(annotation: Any) -> Any:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is tuple:
        return []
    if annotation in (int, float):
        return 1
    return _PLACEHOLDER if annotation is str else {}


def _is_consequence(
    problem: Problem, spec: TopologySpec, unparsable_paths: Sequence[Sequence[str]]
) -> bool:
    """Whether a problem may only be a consequence of an unparsable field."""
    at = _parts(problem.path)
    if at[:1] == ["metadata"]:
        return True
    if any(at[: len(bad)] == bad or bad[: len(at)] == at for bad in unparsable_paths):
        return True
    if problem.reason in _GRAPH_REASONS and any(map(_may_hold_names, unparsable_paths)):
        return True
    if any(problem.reason in _CONSEQUENCES.get(".".join(bad), ()) for bad in unparsable_paths):
        return True
    return _node_of(at) in _affected(spec, unparsable_paths)


def _may_hold_names(parts: Sequence[str]) -> bool:
    """Whether there are names of sources and operators at a path: an unknown field of the spec may
    be `operators`, misspelt."""
    is_unknown = len(parts) == 2 and parts[1] not in _SPEC_FIELDS
    return is_unknown or _field_of(parts) in _FIELDS_WITH_NAMES


def _field_of(parts: Sequence[str]) -> str:
    """The field of a path, without indices."""
    return next((part for part in reversed(parts) if not part.isdigit()), "")


def _affected(spec: TopologySpec, unparsable_paths: Sequence[Sequence[str]]) -> set[str]:
    """Paths of the sources, operators and queries with unparsable fields, and of all that read
    them."""
    paths = {"/".join(_parts(path)): node.name for path, node in nodes_with_paths(spec)}
    names = {paths[n] for bad in unparsable_paths if (n := _node_of(bad)) in paths}
    edges = edges_of(spec)
    affected = {_node_of(bad) for bad in unparsable_paths} - {""}
    affected |= {path for path, name in paths.items() if names & nodes_and_ancestors(edges, [name])}
    for at, query in enumerate(spec.queries):
        if names & nodes_and_ancestors(edges, [query.from_]):
            affected.add(f"spec/queries/{at}")
    return affected


def _node_of(parts: Sequence[str]) -> str:
    """Path of the source, operator or query that has the field; "" if none has."""
    return "/".join(parts[:3]) if len(parts) >= 3 and parts[1] in _FIELDS_WITH_NAMES else ""


def _parts(path: str) -> list[str]:
    return path.replace("[", ".").replace("]", "").split(".") if path else []


def field_path(location: Iterable[int | str]) -> str:
    """A location of pydantic as field path of the resource."""
    path = "spec"
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path
