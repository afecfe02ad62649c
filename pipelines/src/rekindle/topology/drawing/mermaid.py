"""A compiled topology as a Mermaid flowchart: for READMEs, wikis and merge requests.

Same boxes and edges as `rekindle.topology.drawing.svg`; the viewer computes the layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.topology.drawing.text import box_lines, describe_exchange
from rekindle.topology.model import Topology

_STYLES = {
    "source": "fill:#e3f2ea,stroke:#829ab1,color:#1f2933",
    "operator": "fill:#eef2f7,stroke:#829ab1,color:#1f2933",
    "query": "fill:#fdf1dc,stroke:#829ab1,color:#1f2933",
}


def draw_mermaid(topology: Topology) -> str:
    """The text of a ```mermaid block."""
    return "\n".join(_lines(topology)) + "\n"


def _lines(topology: Topology) -> Iterator[str]:
    # Generated ids: a node named `end` or `class` would be a Mermaid keyword.
    ids = {s.id: f"s{n}" for n, s in enumerate(topology.segments)}
    yield "flowchart LR"
    for segment in topology.segments:
        kind = "source" if segment.is_source else "operator"
        title, *rest = map(_escaped, box_lines(topology, segment))
        label = "<br/>".join([f"<b>{title}</b>", *rest])
        yield f'    {ids[segment.id]}["{label}"]:::{kind}'
    for n, query in enumerate(topology.spec.queries):
        label = f"<b>{_escaped(query.name)}</b><br/>priority {query.priority}"
        yield f'    q{n}(["{label}"]):::query'
    for segment in topology.segments:
        for consumed in segment.inputs:
            start = ids[topology.producer(consumed.stream).id]
            yield f'    {start} -->|"{_escaped(describe_exchange(consumed))}"| {ids[segment.id]}'
    for n, query in enumerate(topology.spec.queries):
        yield f"    {ids[topology.queried_segment(query).id]} --> q{n}"
    for kind, style in _STYLES.items():
        yield f"    classDef {kind} {style}"


def _escaped(text: str) -> str:
    """Mermaid reads labels as HTML, and `#` as the start of an entity."""
    for character, entity in (("#", "#35;"), ("&", "#amp;"), ('"', "#quot;"), ("<", "#lt;")):
        text = text.replace(character, entity)
    return text.replace(">", "#gt;")
