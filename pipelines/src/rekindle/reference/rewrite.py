"""Redirects a topology: inputs are read from one directory, outputs written to another. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from rekindle.errors import RekindleError
from rekindle.topology.spec import QuerySpec, SourceSpec, TopologySpec

_WILDCARDS = "*?["


def redirect(spec: TopologySpec, *, input: Path | None, output: Path | None) -> TopologySpec:
    """`input`: `files` sources read the file of the same name in this directory; if that would be
    the same file for two different URLs, parent directories are added to the name. `output`: each
    query writes files to a subdirectory with its name, whatever its sink was. Raises
    RekindleError."""
    changes: dict[str, Any] = {}
    if input is not None:
        inputs = [
            given.input_url
            for source in spec.sources
            for given in source.kinds.values()
            if given is not None
        ]
        paths = relative_paths([url for url in inputs if url is not None])
        changes["sources"] = tuple(_read_from(source, input, paths) for source in spec.sources)
    if output is not None:
        changes["queries"] = tuple(_write_to(query, output) for query in spec.queries)
    return spec.model_copy(update=changes)


def relative_paths(urls: Sequence[str]) -> dict[str, str]:
    """The path of each URL in the directory that replaces its own: its file name, or the part from
    its first wildcard on, with as many parent directories as make it unique. Raises
    RekindleError."""
    parts = {url: [p for p in url.replace("://", "/", 1).split("/") if p] for url in urls}
    kept = {url: _tail_length(names) for url, names in parts.items()}
    while clashing := _clashing(parts, kept):
        longer = [url for url in clashing if kept[url] < len(parts[url]) - 1]
        if not longer:
            raise RekindleError(
                f"--input cannot distinguish {' and '.join(sorted(clashing))}: give the "
                "sources' files different names, or run without --input"
            )
        for url in longer:
            kept[url] += 1
    return {url: "/".join(parts[url][-kept[url] :]) for url in urls}


def _tail_length(names: list[str]) -> int:
    """Number of path parts from the first one with a wildcard, at least 1."""
    first = next((at for at, name in enumerate(names) if any(c in name for c in _WILDCARDS)), None)
    return 1 if first is None else len(names) - first


def _clashing(parts: dict[str, list[str]], kept: dict[str, int]) -> set[str]:
    """URLs that would have the same path as another one, although their files differ."""
    clashing = set()
    for one, two in combinations(parts, 2):
        ends = parts[one][-kept[one] :], parts[two][-kept[two] :]
        if all(map(_overlap, *ends)) and not all(map(_overlap, parts[one], parts[two])):
            clashing |= {one, two}
    return clashing


def _overlap(one: str, two: str) -> bool:
    """Whether some name matches both patterns; `[...]` counts as `?`."""

    @cache
    def overlap_from(i: int, j: int) -> bool:
        a, b = one[i : i + 1], two[j : j + 1]
        if a == "*":
            return overlap_from(i + 1, j) or (b != "" and overlap_from(i, j + 1))
        if b == "*":
            return overlap_from(i, j + 1) or (a != "" and overlap_from(i + 1, j))
        if not a or not b:
            return a == b
        same = a == b or a in "?[" or b in "?["
        return same and overlap_from(_next_index(one, i), _next_index(two, j))

    return "**" in (one, two) or overlap_from(0, 0)


def _next_index(pattern: str, at: int) -> int:
    """The index after the character, or after the `[...]`, at `at`."""
    end = pattern.find("]", at + 2) if pattern[at] == "[" else -1
    return at + 1 if end < 0 else end + 1


def _read_from(source: SourceSpec, directory: Path, paths: dict[str, str]) -> SourceSpec:
    changes = {
        kind: given.with_url(f"file://{directory.absolute()}/{paths[given.input_url]}")
        for kind, given in source.kinds.items()
        if given is not None and given.input_url is not None
    }
    return source.model_copy(update=changes)


def _write_to(query: QuerySpec, directory: Path) -> QuerySpec:
    given = (options for options in query.sink.kinds.values() if options is not None)
    format = next((options.format_of_files for options in given), "parquet")
    url = f"file://{os.path.normpath(directory.absolute())}/{query.name}"
    sink = {"files": {"url": url, "format": format}}
    return query.model_copy(update={"sink": type(query.sink).model_validate(sink)})
