"""The environment and the command line of a container.

Pure: ConfigMaps and Secrets come in as they were read from the API server.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rekindle_testing.embedded.process_node.fields import (
    DownwardValues,
    FieldError,
    Json,
    field_value,
    resource_value,
)

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)")


class ConfigError(Exception):
    """The container cannot be created from its spec: CreateContainerConfigError."""


@dataclass(frozen=True, slots=True, order=True)
class ObjectReference:
    """A ConfigMap or Secret in the pod's namespace."""

    kind: str
    name: str


# None: the object does not exist.
Objects = Mapping[ObjectReference, Json | None]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` by its value, `$$` by `$`; a name that is unknown stays as written."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def references(container: Json) -> Iterator[ObjectReference]:
    """The objects that are needed to build the environment."""
    for source in container.get("envFrom") or []:
        if "configMapRef" in source:
            yield ObjectReference("ConfigMap", source["configMapRef"]["name"])
        if "secretRef" in source:
            yield ObjectReference("Secret", source["secretRef"]["name"])
    for variable in container.get("env") or []:
        value_from = variable.get("valueFrom") or {}
        if "configMapKeyRef" in value_from:
            yield ObjectReference("ConfigMap", value_from["configMapKeyRef"]["name"])
        if "secretKeyRef" in value_from:
            yield ObjectReference("Secret", value_from["secretKeyRef"]["name"])


def build(
    pod: Json,
    container: Json,
    objects: Objects,
    service_variables: Mapping[str, str],
    downward_values: DownwardValues,
) -> dict[str, str]:
    """`service_variables` (of the Service of the API server) first, then envFrom, then env in
    order. The image's variables are not here: `$(NAME)` does not see them, as with a kubelet."""
    variables = dict(service_variables)
    for source in container.get("envFrom") or []:
        variables.update(_from_source(source, objects))
    for variable in container.get("env") or []:
        value = _value(pod, container, variable, objects, variables, downward_values)
        if value is not None:
            variables[variable["name"]] = value
    return variables


def _from_source(source: Json, objects: Objects) -> dict[str, str]:
    kind, field = (
        ("ConfigMap", "configMapRef") if "configMapRef" in source else ("Secret", "secretRef")
    )
    reference = ObjectReference(kind, source[field]["name"])
    data = objects.get(reference)
    if data is None:
        if source[field].get("optional"):
            return {}
        raise ConfigError(f"{kind} {reference.name!r} not found")
    prefix = source.get("prefix", "")
    return {prefix + key: value for key, value in text_data(reference, data).items()}


def _value(
    pod: Json,
    container: Json,
    variable: Json,
    objects: Objects,
    variables: Mapping[str, str],
    downward_values: DownwardValues,
) -> str | None:
    value_from = variable.get("valueFrom")
    if not value_from:
        return expand(variable.get("value", ""), variables)
    try:
        if "fieldRef" in value_from:
            return field_value(pod, value_from["fieldRef"]["fieldPath"], downward_values)
        if "resourceFieldRef" in value_from:
            return resource_value(
                pod, value_from["resourceFieldRef"], container["name"], downward_values
            )
    except FieldError as error:
        raise ConfigError(f"env {variable['name']}: {error}") from error
    for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if field in value_from:
            return _key(
                ObjectReference(kind, value_from[field]["name"]), value_from[field], objects
            )
    raise ConfigError(f"env {variable['name']}: valueFrom {sorted(value_from)} is not supported")


def _key(reference: ObjectReference, selector: Json, objects: Objects) -> str | None:
    data = objects.get(reference)
    values = {} if data is None else text_data(reference, data)
    if selector["key"] in values:
        return values[selector["key"]]
    if selector.get("optional"):
        return None
    missing = "not found" if data is None else f"has no key {selector['key']!r}"
    raise ConfigError(f"{reference.kind} {reference.name!r} {missing}")


def file_data(reference: ObjectReference, content: Json) -> dict[str, bytes]:
    """The keys of a ConfigMap or Secret, as a volume shows them."""
    if reference.kind == "Secret":
        return {key: base64.b64decode(v) for key, v in (content.get("data") or {}).items()}
    files = {key: value.encode() for key, value in (content.get("data") or {}).items()}
    binary = content.get("binaryData") or {}
    return files | {key: base64.b64decode(value) for key, value in binary.items()}


def text_data(reference: ObjectReference, content: Json) -> dict[str, str]:
    if reference.kind == "ConfigMap":
        return dict(content.get("data") or {})
    return {key: v.decode(errors="replace") for key, v in file_data(reference, content).items()}
