"""The same topology with other places: inputs from one directory, outputs into another. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rekindle.topology.spec import QuerySpec, SourceSpec, TopologySpec


def redirect(spec: TopologySpec, *, input: Path | None, output: Path | None) -> TopologySpec:
    """`input`: files sources read a file of the same name in this directory. `output`: each query
    writes files into a directory of its own name in this one, whatever its sink was."""
    changes: dict[str, Any] = {}
    if input is not None:
        changes["sources"] = tuple(_read_from(source, input) for source in spec.sources)
    if output is not None:
        changes["queries"] = tuple(_write_to(query, output) for query in spec.queries)
    return spec.model_copy(update=changes)


def _read_from(source: SourceSpec, directory: Path) -> SourceSpec:
    if source.files is None:
        return source
    name = source.files.url.rstrip("/").rpartition("/")[2]
    files = source.files.model_copy(update={"url": f"file://{directory.absolute()}/{name}"})
    return source.model_copy(update={"files": files})


def _write_to(query: QuerySpec, directory: Path) -> QuerySpec:
    format = query.sink.files.format if query.sink.files is not None else "parquet"
    url = f"file://{directory.absolute()}/{query.name}"
    sink = {"files": {"url": url, "format": format}}
    return query.model_copy(update={"sink": type(query.sink).model_validate(sink)})
