"""Documents of a YAML text, and keys that a mapping has twice.

PyYAML silently takes the last of two equal keys. A tool that takes the first would run another
topology than the one that was checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from rekindle.errors import Problem

_PLAIN_KEY = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True)
class Document:
    data: Any
    problems: tuple[Problem, ...]
    """Repeated keys, by line."""


def read_documents(source: str | bytes) -> list[Document]:
    """All documents but empty ones. Raises yaml.YAMLError, and ValueError (a 13th month, for
    example)."""
    loader = yaml.SafeLoader(source)
    found = []
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node has found one"
            repeated = sorted(_repeated_keys(node), key=lambda at: at[0])
            data = loader.construct_document(node)
            if data is not None:
                found.append(Document(data, tuple(problem for _, problem in repeated)))
    finally:
        loader.dispose()
    return found


def _repeated_keys(root: yaml.Node) -> Iterator[tuple[int, Problem]]:
    """(line, problem) for each repeated key. An anchor and its aliases are one node, which may
    contain itself."""
    waiting, seen = [("", root)], set()
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(f"{path}[{at}]", item) for at, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            yield from _repeated_keys_of(node, path)
            waiting += [(_below(path, key), value) for key, value in node.value]


def _repeated_keys_of(node: yaml.MappingNode, path: str) -> Iterator[tuple[int, Problem]]:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line, same = key.start_mark.line + 1, (key.tag, key.value)
        if same in lines:
            where = f"line {lines[same]} and again in line {line}"
            if line == lines[same]:
                where = f"line {line} twice"
            what = f"is in {where}: only the last one would be read"
            yield line, Problem(_below(path, key), "DuplicateKey", what, "leave one out")
        lines.setdefault(same, line)


def _below(path: str, key: yaml.Node) -> str:
    name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
    if not _PLAIN_KEY.fullmatch(name):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name
