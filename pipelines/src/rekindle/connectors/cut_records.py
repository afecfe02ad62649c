"""Cut records of a live source: what the epochs of one partition of it contain. Pure.

A record defines consecutive epochs, of which the first has all the rows. Records of a partition are
a chain: each begins with the epoch after the last one of the record before it, from whose ends and
event times the next one is made.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rekindle.objects import to_json
from rekindle.streams.epochs import NO_WATERMARK

FORMAT = 1

Position = Mapping[str, int]
"""By split (a part of the input with positions of its own): the first position that is not read."""


@dataclass(frozen=True, slots=True)
class CutRecord:
    """The epochs `first` to `last`: `first` has the rows from `start` to `end` of each split, the
    others have none. `newest_us`: the newest event time of each split that has had any,
    microseconds UTC. `quiet`: through `last`, the number of epochs since which a split that has
    been read to its end has had no rows; without splits for which it is 0. `idle`: splits that do
    not hold the watermark. `watermark`: after each of the epochs. `identity`: of the source
    (`Reach`)."""

    first: int
    last: int
    start: Position
    end: Position
    newest_us: Mapping[str, int] = field(default_factory=dict)
    quiet: Mapping[str, int] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    watermark: int = NO_WATERMARK
    identity: str = ""

    @property
    def all_idle(self) -> bool:
        """Whether no split holds the watermark; so it is without splits."""
        return self.end.keys() <= set(self.idle)


def encode_cut_record(record: CutRecord) -> bytes:
    return to_json({"format": FORMAT, **asdict(record)})


def decode_cut_record(data: bytes) -> CutRecord:
    """The inverse. Raises ValueError if `data` is not a cut record, or has a newer format."""
    try:
        fields = json.loads(data)
        if fields.pop("format") > FORMAT:
            raise ValueError(f"a cut record of a newer format; this release reads {FORMAT}")
        return CutRecord(**{**fields, "idle": tuple(fields["idle"])})
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{data[:80]!r} is not a cut record") from e
