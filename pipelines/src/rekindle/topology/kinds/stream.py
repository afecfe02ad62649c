"""Sinks of the kind `stream`: fields and their validation.

Design: docs/design/stream-sinks.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from rekindle.topology.kinds.base import SinkOptions
from rekindle.topology.units import parse_size

DEFAULT_RETAIN_BYTES = 256 * 1024**2


class StreamSinkSpec(SinkOptions):
    connector: ClassVar[str | None] = "stream_sink:open_sink"
    edited_in_place: ClassVar[frozenset[str]] = frozenset({"tentative", "retain"})
    wrong_field_names: ClassVar[Mapping[str, str]] = {
        "retention": "retain",
        "retainBytes": "retain",
    }

    tentative: bool = False
    """Whether readers may ask for tentative results, and their corrections."""
    retain: Annotated[int, BeforeValidator(parse_size)] = DEFAULT_RETAIN_BYTES
    """How much of its newest output each task keeps for readers, besides what its topology still
    needs; at least `1Mi`, and at most half of `spec.logBudget`, of which it is a part."""

    @property
    def retained_bytes(self) -> int:
        return self.retain
