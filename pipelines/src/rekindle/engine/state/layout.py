"""The layout of an operator's state as JSON: which run is where. Pure.

Runs are named by places: (object, batch), as small numbers. Restoring a layout with the runs of its
places gives the same state, with the same pages, deltas and order of compaction.

Design: docs/design/checkpoints.md#formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rekindle.engine.state.operator import Delta, OperatorState, Page
from rekindle.engine.state.runs import Run

Place = tuple[int, int]
"""The number of an object, and of a batch in it."""
_NOWHERE = (-1, -1)


def encode(state: OperatorState, place: Callable[[Run], Place]) -> dict[str, Any]:
    """Lists of equal length, one value for each page or delta, because they are shorter in JSON."""
    at = [_NOWHERE if page.run is None else place(page.run) for page in state.pages]
    deltas = [place(delta.run) for delta in state.deltas]
    return {
        "pages": {
            "pane": [page.pane for page in state.pages],
            "bucket": [page.bucket for page in state.pages],
            "object": [o for o, _ in at],
            "batch": [b for _, b in at],
            "through": state.through.tolist(),
            "pending": state.pending.tolist(),
        },
        "deltas": {
            "seq": [delta.seq for delta in state.deltas],
            "level": [delta.level for delta in state.deltas],
            "object": [o for o, _ in deltas],
            "batch": [b for _, b in deltas],
        },
        "floor": state.first_live_pane_us,
        "panes": state.panes.tolist(),
        "seq": state.seq,
        "credit": state.credit,
        "digest": state.digest,
    }


def places(layout: Mapping[str, Any]) -> Iterator[Place]:
    """Of all runs. Raises KeyError if a field is missing."""
    for part in (layout["pages"], layout["deltas"]):
        yield from (p for p in zip(part["object"], part["batch"], strict=True) if p != _NOWHERE)


def decode(layout: Mapping[str, Any], runs: Mapping[Place, Run]) -> OperatorState:
    """Raises KeyError for a place without a run, or if a field is missing."""
    pages, deltas = layout["pages"], layout["deltas"]
    at = list(zip(pages["object"], pages["batch"], strict=True))
    found = [None if place == _NOWHERE else runs[place] for place in at]
    places = zip(deltas["object"], deltas["batch"], strict=True)
    order = zip(deltas["seq"], deltas["level"], places, strict=True)
    return OperatorState(
        pages=tuple(Page(*low) for low in zip(pages["pane"], pages["bucket"], found, strict=True)),
        deltas=tuple(Delta(seq, runs[place], level) for seq, level, place in order),
        through=np.array(pages["through"], dtype=np.int64),
        pending=np.array(pages["pending"], dtype=np.int64),
        first_live_pane_us=layout["floor"],
        panes=np.array(layout["panes"], dtype=np.int64),
        seq=layout["seq"],
        credit=layout["credit"],
        digest=layout["digest"],
    )
