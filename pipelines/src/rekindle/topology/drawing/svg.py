"""A compiled topology as an SVG: segments in columns by depth, left to right.

A simple layered layout (two of the steps of Sugiyama's method): the column of a segment is the
length of the longest path to it, and within a column segments are ordered by the mean vertical
position of their inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree as ET

from rekindle.topology.drawing.text import box_lines, describe_input
from rekindle.topology.model import Topology

_BOX_WIDTH = 300
_MAX_CHARS = 42
"""Maximum characters of a line in a box; its tooltip has the full text."""
_LINE_HEIGHT = 16
_PADDING = 10
_COLUMN_GAP = 80
_ROW_GAP = 28
_MARGIN = 24
_FONT = "ui-sans-serif, system-ui, Helvetica, Arial, sans-serif"
_TITLE_COLOUR, _TEXT_COLOUR, _EDGE_COLOUR = "#1f2933", "#52606d", "#829ab1"
_SOURCE_FILL, _OPERATOR_FILL, _QUERY_FILL = "#e3f2ea", "#eef2f7", "#fdf1dc"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with lines of text, the first of them the title; `tooltip` has the full text."""

    x: float
    y: float
    height: float
    lines: tuple[str, ...]
    fill: str
    tooltip: str

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    def entry(self, number: int, total: int) -> float:
        """The y coordinate where edge `number` of `total` enters; all are different."""
        return self.y + self.height * (number + 1) / (total + 1)


def draw_svg(topology: Topology) -> str:
    """The SVG document."""
    boxes = _layout(topology)
    width = max(b.x for b in boxes.values()) + _BOX_WIDTH + _MARGIN
    height = max(b.y + b.height for b in boxes.values()) + _MARGIN
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
    view = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "font-family": _FONT}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"} | size | view)
    ET.SubElement(root, "title").text = f"topology {topology.name}"
    ET.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    for segment in topology.segments:
        end = boxes[segment.id]
        for n, stream in enumerate(segment.inputs):
            y = end.entry(n, len(segment.inputs))
            _edge(root, boxes[topology.producer(stream.stream).id], end, y)
        for query in segment.queries:
            box = boxes[f"query {query}"]
            _edge(root, end, box, box.middle)
    for box in boxes.values():
        _box(root, box)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _layout(topology: Topology) -> dict[str, Box]:
    """Boxes by segment id and by `query <name>`."""
    depths: dict[str, int] = {}
    inputs: dict[str, list[str]] = {}
    for segment in topology.segments:
        inputs[segment.id] = [topology.producer(i.stream).id for i in segment.inputs]
        depths[segment.id] = 1 + max((depths[f] for f in inputs[segment.id]), default=-1)
    texts = {
        s.id: (
            (*box_lines(topology, s), *(f"reads {describe_input(i)}" for i in s.inputs)),
            _SOURCE_FILL if s.is_source else _OPERATOR_FILL,
        )
        for s in topology.segments
    }
    for query in topology.spec.queries:
        key = f"query {query.name}"
        inputs[key] = [s.id for s in topology.segments if query.name in s.queries]
        depths[key] = 1 + depths[inputs[key][0]]
        texts[key] = ((query.name, f"priority {query.priority}"), _QUERY_FILL)
    boxes: dict[str, Box] = {}
    for depth in range(max(depths.values()) + 1):
        column = [key for key in depths if depths[key] == depth]
        column.sort(key=lambda key: _mean([boxes[f].middle for f in inputs[key]]))
        y = float(_MARGIN)
        for key in column:
            lines, fill = texts[key]
            shown = tuple(_truncated(line) for line in lines)
            height = _PADDING * 2 + _LINE_HEIGHT * len(lines)
            beside_inputs = _mean([boxes[f].middle for f in inputs[key]]) - height / 2
            y = max(y, beside_inputs)
            x = float(_MARGIN + depth * (_BOX_WIDTH + _COLUMN_GAP))
            boxes[key] = Box(x, y, height, shown, fill, "\n".join(lines))
            y += height + _ROW_GAP
    return boxes


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _truncated(line: str) -> str:
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"


def _box(root: ET.Element, box: Box) -> None:
    frame = {"x": f"{box.x:.1f}", "y": f"{box.y:.1f}", "height": f"{box.height:.1f}"}
    look = {"width": str(_BOX_WIDTH), "rx": "6", "fill": box.fill, "stroke": _EDGE_COLOUR}
    group = ET.SubElement(root, "g")
    ET.SubElement(group, "title").text = box.tooltip
    ET.SubElement(group, "rect", frame | look)
    for at, line in enumerate(box.lines):
        y = box.y + _PADDING + _LINE_HEIGHT * (at + 0.75)
        size, colour = ("11", _TEXT_COLOUR) if at else ("13", _TITLE_COLOUR)
        style = {"font-size": size, "fill": colour}
        weight = {} if at else {"font-weight": "600"}
        place = {"x": f"{box.x + _PADDING:.1f}", "y": f"{y:.1f}"}
        ET.SubElement(group, "text", place | style | weight).text = line


def _edge(root: ET.Element, start: Box, end: Box, y: float) -> None:
    """An edge from the middle of `start` to the y coordinate `y` of `end`."""
    x1, x2 = start.x + _BOX_WIDTH, end.x
    bend = (x2 - x1) / 2
    curve = (
        f"M {x1:.1f} {start.middle:.1f} C {x1 + bend:.1f} {start.middle:.1f} "
        f"{x2 - bend:.1f} {y:.1f} {x2:.1f} {y:.1f}"
    )
    ET.SubElement(
        root, "path", {"d": curve, "fill": "none", "stroke": _EDGE_COLOUR, "stroke-width": "1.5"}
    )
    back = x2 - 7
    tip = f"{x2:.1f},{y:.1f} {back:.1f},{y - 4:.1f} {back:.1f},{y + 4:.1f}"
    ET.SubElement(root, "polygon", {"points": tip, "fill": _EDGE_COLOUR})
