"""Write docs/reference.md, and the descriptions of the CRD: every field of a StreamTopology's spec,
and what its status says of queries.

Types, limits, defaults, required fields and the rules between fields come from the CRD, meanings
from the texts below the fields in `rekindle.topology.spec` and `rekindle.topology.kinds`. `--check`
writes nothing and fails if a file is outdated.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
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

Every field of the `spec` of a `StreamTopology`, and of its `status.queries[]`, written by
`make reference`. [StreamTopology](topology.md) explains how to use them.

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
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_WIDTH = 118
_DURATION = "us|ms|s|m|h|d"
_SIZE = "[KMGTP]i"
_NUMBERS = {"integer": "integer", "number": "number"}


def crd() -> str:
    """The text of the CRD, with the descriptions that `kubectl explain` shows."""
    text = CRD.read_text()
    node: Any = yaml.compose(text)
    for key in ("spec", "versions", 0, "schema", "openAPIV3Schema", "properties", "spec"):
        node = _child(node, key)
    for start, end, new in sorted(_descriptions(text, node, spec.TopologySpec), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _child(node: Any, key: str | int) -> Any:
    if isinstance(key, int):
        return node.value[key]
    return next(value for name, value in node.value if name.value == key)


def _descriptions(
    text: str, node: yaml.MappingNode, model: type[BaseModel]
) -> Iterator[tuple[int, int, str]]:
    """Replacements of the text between two positions, for the fields of an object and of those in
    it."""
    for field, info in model.model_fields.items():
        schema = _child(_child(node, "properties"), info.alias or field)
        meaning = _LINK.sub(r"\1", " ".join(_meanings()[model.__name__][field].split()))
        yield _description(text, schema, meaning.replace("`", ""))
        child = spec_in(info.annotation)
        if child is not None and child.model_fields:
            keys = [name.value for name, _ in schema.value]
            yield from _descriptions(
                text, _child(schema, "items") if "items" in keys else schema, child
            )


def _description(text: str, schema: yaml.MappingNode, meaning: str) -> tuple[int, int, str]:
    first = schema.value[0][0].start_mark
    old = next((pair for pair in schema.value if pair[0].value == "description"), None)
    if schema.flow_style:  # at the end of {type: string}
        indent = text[: schema.start_mark.index].rpartition("\n")[2]
        margin = " " * (len(indent) - len(indent.lstrip()) + 2)
        escaped = meaning.replace("\\", "\\\\").replace('"', "'")
        quoted = f'description: "{escaped}"'
        new = f",\n{_wrapped(quoted, margin)}"
        start = old[0].start_mark.index if old else schema.end_mark.index - 1
        if old:
            start = text.rindex(",", 0, start)
        return start, schema.end_mark.index - 1, new
    margin = " " * first.column
    body = _wrapped(meaning, margin + "  ")
    new = f"description: >-\n{body}\n{margin}"
    if old is None:
        return first.index, first.index, new
    end = old[1].end_mark.index
    following = text[end:].lstrip()
    return old[0].start_mark.index, len(text) - len(following), new


def _wrapped(text: str, margin: str) -> str:
    lines = textwrap.wrap(
        text, _WIDTH - len(margin), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(margin + line for line in lines)


def page() -> str:
    """The text of the page."""
    resource = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    sections = _sections("spec", resource["properties"]["spec"], spec.TopologySpec)
    queries = resource["properties"]["status"]["properties"]["queries"]["items"]
    return "\n".join([HEAD, *sections, _status_section("status.queries[]", queries)])


def _status_section(path: str, node: dict[str, Any]) -> str:
    """A table of the fields, whose meanings are in the CRD."""
    fields = node["properties"].items()
    rows = [f"| `{name}` | {schema['description']} |" for name, schema in fields]
    return "\n".join([f"## `{path}`", "", "| field | meaning |", "|---|---|", *rows, ""])


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
    parser.add_argument("--check", action="store_true", help="fail if a file is outdated")
    texts = {PAGE: page(), CRD: crd()}
    outdated = [path for path, text in texts.items() if path.read_text() != text]
    if not parser.parse_args().check:
        for path in outdated:
            path.write_text(texts[path])
        return 0
    for path in outdated:
        print(f"{path.relative_to(ROOT)} is outdated; run make reference", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
