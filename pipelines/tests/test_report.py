"""The report as it is written to the status, and read there by another version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.protocol import ConsistencyState, TaskPhase
from rekindle.report import (
    CheckpointProblem,
    CheckpointProblemKind,
    CheckpointReport,
    MissingResults,
    QueryReport,
    Report,
    TaskReport,
    read_report,
    report_json,
)

FULL = Report(
    fence=1,
    tasks={
        "seg/0/1": TaskReport(
            "seg/0/1",
            2,
            TaskPhase.LIVE,
            suspected=True,
            pod="t-seg-0-1-2",
            suspected_since="2026-01-01T00:00:00.000Z",
            silent_s=1.5,
            stable_epoch=131,
            restored_from=-1,
            replay_from=119,
            replay_s=0.25,
            state_bytes=4096,
            problem="x",
            wrong_definition="daily",
            saving_fails=True,
            output_state=ConsistencyState.UP_FAILURE,
            tentative_epoch=131,
            missing_inputs=("rows",),
            durable_epoch=128,
            untrusted=True,
            source_behind=7,
            bad_records=2,
            bad_record="x",
            hot_key="x",
        )
    },
    queries={
        "delays": QueryReport("delays", 128, 0.4, True, (MissingResults(40, 59, 2, "a", "b"),))
    },
    diverged=("seg/0/1",),
    inconsistent=("x",),
    problems=("x",),
    checkpoint_problems=tuple(CheckpointProblem(kind, "x") for kind in CheckpointProblemKind),
    stream_protocol=3,
    stream_conflict=(2, 3),
    generation=1,
    head_epoch=1,
    store="x",
    checkpoint=CheckpointReport(1, 2, "2026-01-01T00:00:00.000Z", 3, 11),
    number=7,
)
WRITTEN = {
    "fence": 1,
    "tasks": [
        {
            "slot": "seg/0/1",
            "incarnation": 2,
            "pod": "t-seg-0-1-2",
            "phase": "Live",
            "suspected": True,
            "suspectedSince": "2026-01-01T00:00:00.000Z",
            "silentSeconds": 1.5,
            "stableEpoch": 131,
            "restoredFrom": -1,
            "replayFrom": 119,
            "replaySeconds": 0.25,
            "stateBytes": 4096,
            "problem": "x",
            "refused": "daily",
            "savingFails": True,
            "outputState": "UP_FAILURE",
            "tentativeEpoch": 131,
            "missingInputs": ["rows"],
            "durableEpoch": 128,
            "untrusted": True,
            "sourceBehind": 7,
            "badRecords": 2,
            "badRecord": "x",
            "hotKey": "x",
        }
    ],
    "queries": [
        {
            "name": "delays",
            "stableEpoch": 128,
            "lagSeconds": 0.4,
            "finished": True,
            "missing": [
                {"fromEpoch": 40, "toEpoch": 59, "sinceGeneration": 2, "from": "a", "to": "b"}
            ],
        }
    ],
    "diverged": ["seg/0/1"],
    "inconsistent": ["x"],
    "problems": ["x"],
    "checkpointProblems": [{"kind": kind, "message": "x"} for kind in CheckpointProblemKind],
    "streamProtocol": 3,
    "streamConflict": [2, 3],
    "generation": 1,
    "headEpoch": 1,
    "store": "x",
    "checkpoint": {
        "epoch": 1,
        "seq": 2,
        "time": "2026-01-01T00:00:00.000Z",
        "bytes": 3,
        "nextEpoch": 11,
    },
    "report": 7,
}
EMPTY = {
    "fence": 1,
    "tasks": [{"slot": "s/0/0", "incarnation": 1, "phase": "Waiting", "suspected": False}],
    "queries": [{"name": "q", "stableEpoch": -1}],
    "diverged": [],
    "inconsistent": [],
    "problems": [],
    "checkpointProblems": [],
    "streamProtocol": 3,
}
"""Of a coordinator that knows nothing yet."""


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Of a field with this type."""
    arguments = get_args(hint)
    if get_origin(hint) is UnionType:
        return st.none() | _values(arguments[0])
    if get_origin(hint) is tuple:
        return st.lists(_values(arguments[0]), max_size=2).map(tuple)
    if hint is float:
        return st.floats(0, 1e9)
    if get_origin(hint) is Mapping:
        kind, key = arguments[1], next(iter(get_type_hints(arguments[1])))
        return st.lists(_values(kind), max_size=3, unique_by=lambda v: getattr(v, key)).map(
            lambda found: {getattr(v, key): v for v in found}
        )
    if hint in (int, str, bool) or issubclass(hint, (TaskPhase, CheckpointProblemKind)):
        return st.from_type(hint)
    return st.builds(hint, **{n: _values(h) for n, h in get_type_hints(hint).items()})


@given(_values(Report), st.booleans())
def test_what_is_written_is_read(report: Report, by_another: bool) -> None:
    document = json.loads(json.dumps(report_json(report)))
    for part in (document, *document["tasks"], *document["queries"]) if by_another else ():
        part["ofANewerCoordinator"] = {"x": [1]}
    assert read_report(document) == report


def test_names_in_the_json_do_not_change() -> None:
    assert report_json(FULL) == WRITTEN
    assert read_report(WRITTEN) == FULL


def test_what_is_not_known_is_left_out() -> None:
    assert report_json(read_report(EMPTY)) == EMPTY


@pytest.mark.parametrize("raw", [None, 3, {}, {"tasks": 1, "checkpoint": [], "fence": None}])
def test_what_is_missing_is_empty(raw: Any) -> None:
    report = read_report(raw)
    assert report == Report(0, {}, {}, (), (), (), ())
    assert report.stream_protocol == 2, "of coordinators that do not report it"


def test_entries_that_cannot_be_read_are_left_out() -> None:
    task = {"slot": "s/0/0", "incarnation": "x", "phase": "OfANewerCoordinator"}
    report = read_report({"tasks": [None, 3, task], "streamConflict": [2, "x", 3]})
    assert report.tasks == {"s/0/0": TaskReport("s/0/0", 0, None, suspected=False)}
    assert report.stream_conflict == (2, 3)
