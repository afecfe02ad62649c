"""The argument FILE of commands: a StreamTopology in YAML."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rekindle.cli.option_types import not_empty


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=not_empty, metavar="FILE", help="a StreamTopology in YAML; - is stdin"
    )


def read_file(file: str) -> bytes:
    """Raises OSError."""
    return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
