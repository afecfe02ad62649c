"""The layout of an operator's state as JSON: where each run is saved, and how large it is. Pure.

The place of a run is (object, batch), as small numbers. Decoding a layout with the runs at its
places gives the same state, with the same pages, deltas and order of compaction. The layout also
has facts about each run, with which a state is restored before its runs are available
(`engine.state.remote`).

Design: docs/design/checkpoints.md#formats.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.engine.state.operator import BEGIN_OF_PANES, END_OF_PANES, Delta, OperatorState, Page
from rekindle.engine.state.remote import RunFacts
from rekindle.engine.state.runs import Int64s, Run

Place = tuple[int, int]
"""The number of an object, and of a batch in it."""
_NO_PLACE = (-1, -1)
_NO_PANES = (END_OF_PANES, BEGIN_OF_PANES)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What is known of an object with runs. `rows`, `nbytes` (in memory): of all its runs, also
    those that are not used any more; `schema`: that of all its runs."""

    rows: int
    nbytes: int
    schema: pa.Schema


def encode(
    state: OperatorState, place: Callable[[Run], Place], objects: Sequence[ObjectFacts]
) -> dict[str, Any]:
    """Pages and deltas are columns: lists of equal length, with one value for each page or delta,
    because that is shorter in JSON. `first` and `last`: the first and last live pane of a run, by
    their index in `panes`; `floor`: `first_live_pane_us`. For the other fields see
    `OperatorState`."""
    return {
        "pages": {
            "pane": [page.pane for page in state.pages],
            "bucket": [page.bucket for page in state.pages],
            **_runs([page.run for page in state.pages], place, state.panes),
            "through": state.folded_through.tolist(),
            "pending": state.pending.tolist(),
        },
        "deltas": {
            "seq": [delta.seq for delta in state.deltas],
            "level": [delta.level for delta in state.deltas],
            "values": [int(delta.has_values) for delta in state.deltas],
            **_runs([delta.run for delta in state.deltas], place, state.panes),
        },
        "objects": _encode_objects(objects),
        "floor": state.first_live_pane_us,
        "panes": state.panes.tolist(),
        "seq": state.seq,
        "credit": state.credit,
        "digest": state.digest,
    }


def _runs(
    runs: Sequence[Run | None], place: Callable[[Run], Place], panes: Int64s
) -> dict[str, list[int]]:
    at = [_NO_PLACE if run is None else place(run) for run in runs]
    live = [(0, -1) if run is None else _live_panes(run, panes) for run in runs]
    return {
        "object": [o for o, _ in at],
        "batch": [b for _, b in at],
        "rows": [0 if run is None else run.rows for run in runs],
        "first": [first for first, _ in live],
        "last": [last for _, last in live],
    }


def _live_panes(run: Run, panes: Int64s) -> tuple[int, int]:
    if not len(panes):
        return 0, -1
    first, last = run.pane_range
    low, high = np.searchsorted(panes, first), np.searchsorted(panes, last, "right") - 1
    return int(low), int(high)


def _encode_objects(objects: Sequence[ObjectFacts]) -> dict[str, Any]:
    schemas = list(dict.fromkeys(_encode_schema(facts.schema) for facts in objects))
    return {
        "rows": [facts.rows for facts in objects],
        "bytes": [facts.nbytes for facts in objects],
        "schema": [schemas.index(_encode_schema(facts.schema)) for facts in objects],
        "schemas": schemas,
    }


def _encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def objects(layout: Mapping[str, Any]) -> list[ObjectFacts] | None:
    """The facts about the operator's objects, in order; None if an earlier release saved the
    layout. Raises KeyError if a field is missing, ArrowInvalid."""
    found = layout.get("objects")
    if found is None:
        return None
    read = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(s))) for s in found["schemas"]]
    of_each = zip(found["rows"], found["bytes"], found["schema"], strict=True)
    return [ObjectFacts(rows, nbytes, read[schema]) for rows, nbytes, schema in of_each]


def facts(
    layout: Mapping[str, Any], objects: Sequence[ObjectFacts]
) -> Iterator[tuple[Place, RunFacts]]:
    """The place of each run, and the facts about it; deltas first. Raises KeyError if a field is
    missing."""
    panes = layout["panes"]
    for part in (layout["deltas"], layout["pages"]):
        names = ("object", "batch", "rows", "first", "last")
        for at, batch, rows, first, last in zip(*(part[name] for name in names), strict=True):
            if (at, batch) == _NO_PLACE:
                continue
            whole = objects[at]
            pane_range = (panes[first], panes[last]) if first <= last else _NO_PANES
            nbytes = whole.nbytes * rows // max(1, whole.rows)
            yield (at, batch), RunFacts(rows, nbytes, pane_range, whole.schema)


def places(layout: Mapping[str, Any]) -> Iterator[Place]:
    """The places of all runs. Raises KeyError if a field is missing."""
    for part in (layout["pages"], layout["deltas"]):
        yield from (p for p in zip(part["object"], part["batch"], strict=True) if p != _NO_PLACE)


def decode(layout: Mapping[str, Any], runs: Mapping[Place, Run]) -> OperatorState:
    """The state with this layout. Raises KeyError for a place without a run, or if a field is
    missing."""
    pages, deltas = layout["pages"], layout["deltas"]
    at = list(zip(pages["object"], pages["batch"], strict=True))
    found = [None if place == _NO_PLACE else runs[place] for place in at]
    places = zip(deltas["object"], deltas["batch"], strict=True)
    values = deltas.get("values", [0] * len(deltas["seq"]))  # releases with format 3 have none
    order = zip(deltas["seq"], deltas["level"], values, places, strict=True)
    pending = np.array(pages["pending"], dtype=np.int64)
    return OperatorState(
        pages=tuple(
            Page(*fields) for fields in zip(pages["pane"], pages["bucket"], found, strict=True)
        ),
        deltas=tuple(
            Delta(seq, runs[place], level, bool(has_values))
            for seq, level, has_values, place in order
        ),
        folded_through=np.array(pages["through"], dtype=np.int64),
        pending=pending,
        pending_at_restore=pending,
        first_live_pane_us=layout["floor"],
        panes=np.array(layout["panes"], dtype=np.int64),
        seq=layout["seq"],
        credit=layout["credit"],
        digest=layout["digest"],
        complete=all(run.is_available for run in runs.values()),
    )
