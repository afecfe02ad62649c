"""`rekindle graph FILE`: segments, tasks and exchanges as text, SVG or Mermaid."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.cli.option_types import not_empty
from rekindle.cli.topology_file import add_file_argument, read_file

if TYPE_CHECKING:
    from rekindle.topology.model import Topology

EXAMPLES = """\
  rekindle graph topology.yaml
  rekindle graph topology.yaml --format svg -o topology.svg
  rekindle graph topology.yaml --format mermaid  # for a README or a merge request
"""
_FORMATS = ("text", "svg", "mermaid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_argument(parser)
    parser.add_argument("--format", choices=_FORMATS, default="text", help="default: %(default)s")
    parser.add_argument(
        "-o",
        "--output",
        type=not_empty,
        metavar="OUT",
        default="-",
        help="a file; - is stdout (default)",
    )
    parser.add_argument(
        "--svg", type=not_empty, metavar="OUT", help="the same as --format svg --output OUT"
    )


def run(args: argparse.Namespace) -> int:
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_topology

    name, spec = load_topology(read_file(args.file))
    topology = compile_topology(spec, name, skip_cluster_checks=True)
    style, output = ("svg", args.svg) if args.svg is not None else (args.format, args.output)
    text = _renderer(style)(topology)
    if output == "-":
        print(text, end="")
    else:
        Path(output).write_text(text)
    return 0


def _renderer(style: str) -> Callable[[Topology], str]:
    if style == "svg":
        from rekindle.topology.drawing.svg import draw_svg

        return draw_svg
    if style == "mermaid":
        from rekindle.topology.drawing.mermaid import draw_mermaid

        return draw_mermaid
    from rekindle.topology.drawing.text import describe

    return lambda topology: describe(topology) + "\n"
