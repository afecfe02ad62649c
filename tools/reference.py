"""Write docs/reference.md: every field of a StreamTopology's spec.

Types, limits, defaults, required fields and the rules between fields come from the CRD, meanings
from the texts below the fields in `rekindle.topology.spec` and `rekindle.topology.kinds`. `--check`
writes nothing and fails if the page is outdated.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rekindle.topology import spec
from rekindle.topology.checks.unsupported import UNSUPPORTED
from rekindle.topology.kinds.base import spec_in

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference.md"
CRD = ROOT / "crds/rekindle.dev_streamtopologies.yaml"
HEAD = """\
# Reference of the resource

Every field of the `spec` of a `StreamTopology`, written by `make reference`.
[StreamTopology](topology.md) explains how to use them.

- A *duration* is a number with a unit, or several of them: `250ms`, `10s`, `1h30m`, `7d`; the units
  are `us`, `ms`, `s`, `m`, `h`, `d`.
- A *size* is a number of bytes with an optional unit: `512Mi`, `1Gi`; the units are `k`, `M`, `G`,
  `T`, `P` (of 1000) and `Ki`, `Mi`, `Gi`, `Ti`, `Pi` (of 1024).
- A *name* is at most 40 of `a-z`, `0-9`, `-` and `_`, begins with a letter and ends in a letter or
  digit.
- A field that is not *required* may be omitted; then its default is used, if it has one.
- Below a table are the rules between its fields, in the words of the API server.
- *Not yet*: values other than the default are refused with the reason `NotSupportedYet`.
"""
_DURATION = "us|ms|s|m|h|d"
_SIZE = "[KMGTP]i"
_NUMBERS = {"integer": "integer", "number": "number"}


def page() -> str:
    """The text of the page."""
    resource = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    sections = _sections("spec", resource["properties"]["spec"], spec.TopologySpec)
    return "\n".join([HEAD, *sections])


def _sections(path: str, node: dict[str, Any], model: type[BaseModel]) -> Iterator[str]:
    """A table of an object's fields, then those of the objects in it."""
    meanings = _meanings()[model.__name__]
    rows = []
    nested: list[tuple[str, dict[str, Any], type[BaseModel]]] = []
    for field, info in model.model_fields.items():
        name = info.alias or field
        schema = node["properties"][name]
        inner = schema.get("items", schema)
        child = spec_in(info.annotation)
        if child is not None and child.model_fields:
            brackets = "[]" if "items" in schema else ""
            nested.append((f"{path}.{name}{brackets}", inner, child))
        required = name in node.get("required", [])
        default = "*required*" if required else _default(schema)
        not_yet = "*Not yet.* " if field in UNSUPPORTED.get(model, {}) else ""
        text = " ".join(meanings[field].split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(schema, name)} | {default} | {not_yet}{text} |")
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    yield "\n".join([f"## `{path}`", "", *table, *_rules(node), ""])
    for nested_path, nested_schema, nested_model in nested:
        yield from _sections(nested_path, nested_schema, nested_model)


def _rules(node: dict[str, Any]) -> Iterator[str]:
    """What must hold between the fields of an object, as a list below the table."""
    for at, rule in enumerate(node.get("x-kubernetes-validations", ())):
        if at == 0:
            yield ""
        yield f"- {rule['message']}"


def _type(schema: dict[str, Any], name: str) -> str:
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    pattern = schema.get("pattern", "")
    if _DURATION in pattern:
        return "duration, `Infinite`" if "Infinite" in pattern else "duration"
    if "anyOf" in schema or _SIZE in pattern:
        return "size"
    match schema["type"]:
        case "array":
            maximum = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
            objects = schema["items"]["type"] == "object"
            return f"list of {'objects' if objects else 'strings'}{maximum}"
        case "object":
            strings = schema.get("additionalProperties", {}).get("type") == "string"
            return "map of strings" if strings else "object"
        case "boolean":
            return "`true` or `false`"
        case "string":
            return "name" if "a-z0-9_-" in pattern else "string"
        case number:
            return _NUMBERS[number] + _limits(schema)


def _limits(schema: dict[str, Any]) -> str:
    minimum, maximum = schema.get("minimum"), schema.get("maximum")
    if schema.get("exclusiveMinimum"):
        return f", more than {minimum}"
    if minimum is not None and maximum is not None:
        return f", {minimum} to {maximum}"
    return f", {minimum} or more" if minimum is not None else ""


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if value is None or value == {}:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the text below it."""
    found: dict[str, dict[str, str]] = {}
    topology = Path(spec.__file__).parent
    for module in (topology / "spec.py", *topology.glob("kinds/*.py")):
        for item in _classes(module):
            fields = found.setdefault(item.name, {})
            for field, after in zip(item.body, item.body[1:], strict=False):
                match field, after:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        fields[name] = text
    return found


def _classes(module: Path) -> list[ast.ClassDef]:
    return [i for i in ast.parse(module.read_text()).body if isinstance(i, ast.ClassDef)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is outdated")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is outdated; run make reference", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
