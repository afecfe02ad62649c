"""Edits of a running topology: which windows of the new definitions are written, what is missing.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_specs import query, source, sql, topology_spec, window

from rekindle.checkpoints.codec import decode_manifest, encode_manifest
from rekindle.checkpoints.manifest import Gap, Manifest
from rekindle.coordinator.checkpoints.beginnings import Beginnings, EventTimes, Unanswered
from rekindle.coordinator.checkpoints.new_generation import start_generation
from rekindle.coordinator.model import Generation
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.protocol import EntryRef
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH, NO_WATERMARK
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology
from rekindle.topology.spec import OperatorSpec, SourceSpec, WindowSpec
from rekindle.topology.windows.hopping import HoppingWindows
from rekindle.topology.windows.registry import windows_of

HOUR = 3_600_000_000
LATENESS = HOUR


def spec(**more: Any) -> dict[str, Any]:
    """Two sources; windows over both, over one, and over windows; rows as they are."""
    time = {"eventTime": {"column": "ts", "lateness": "1h"}}
    return topology_spec(
        [source("a", **time), source("b", **time)],
        [
            sql("clean", "a"),
            sql("both", "clean", "b"),
            window("daily", "both", window=of("4h"), keyBy=["origin"], partitions=2),
            window("hopping", "clean", window=of("4h", slide="1h")),
            sql("busy", "daily", sql="SELECT * FROM daily"),
            window("weekly", "busy", window=of("12h", slide="1h")),
        ],
        [query(f"q-{name}", name) for name in ("clean", "daily", "hopping", "busy", "weekly")],
        checkpoint={
            "interval": "2s",
            "store": "file:///var/lib/rekindle/checkpoints",
            "volume": "shared",
        },
        **more,
    )


def of(size: str, **more: str) -> dict[str, Any]:
    return {"size": size, "groupBy": ["origin"], "aggregate": "count(*) AS rows", **more}


Rows = Mapping[str, list[tuple[int, int]]]
"""By source: (epoch, event time)."""


def event_times(rows: Rows, name: str, epoch: int) -> EventTimes:
    newest = max((t for e, t in rows[name] if e <= epoch), default=NO_WATERMARK)
    return newest, NO_WATERMARK if newest == NO_WATERMARK else newest - LATENESS


@dataclass
class World:
    """A topology that is edited: manifests, and what each definition writes."""

    rows: Rows
    epoch: int = 0

    def __post_init__(self) -> None:
        self.manifest: Manifest | None = None
        self.operator_ids: dict[str, tuple[str, ...]] = {}
        self.number = 0
        self.beginnings = Beginnings()

    def edit(self, data: dict[str, Any], head: int) -> None:
        """Accept a generation; running tasks have checkpoints of the epoch before."""
        self.number += 1
        topology = compile_topology(load_spec(data), "t")
        self.operator_ids |= {
            s.id: tuple(topology.nodes[n].id for n in s.nodes) for s in topology.segments
        }
        self.generation = Generation(self.number, topology, dict(self.operator_ids))
        graph = build_graph(topology)
        if self.manifest is not None:
            self.manifest = replace(self.manifest, entries=self._saved(head))
        started = start_generation(self.manifest, self.generation, graph, head)
        manifest = Manifest(
            seq=self.number,
            epoch=head if self.manifest is not None else NO_EPOCH,
            generation=self.number,
            fence=1,
            time="",
            entries=started.entries,
            queries=started.queries,
            begun=started.begun,
        )
        self.manifest = decode_manifest(encode_manifest(manifest, "u"), "u")
        assert self.manifest == manifest
        self.beginnings.update(self.generation, self.manifest)

    def _saved(self, head: int) -> dict[str, tuple[EntryRef, ...]]:
        """Partitions that have reached their beginning have saved, at a checkpoint epoch."""
        assert self.manifest is not None
        newest = (head + 1) // 2 * 2 - 1
        return {
            key: (EntryRef(newest, f"entries/{key}", "d"),) if newest > refs[0].epoch else refs
            for key, refs in self.manifest.entries.items()
        }

    def answer(self) -> None:
        """All sources say their event times."""
        for segment in self.generation.topology.segments:
            name = segment.nodes[0]
            if segment.is_source:
                asked = self.beginnings.epochs_to_ask(segment)
                times = {e: event_times(self.rows, name, e) for e in asked}
                self.beginnings.answered(segment, times)

    def bounds(self) -> dict[str, int]:
        """By window: the event time through which it lacks rows."""
        found = {}
        for segment in self.generation.topology.segments:
            assert self.manifest is not None
            for begun in self.beginnings.begun_windows(segment, NO_EPOCH):
                own = [event_times(self.rows, segment.nodes[0], e)[0] + us for e, us in begun.own]
                found[begun.operator] = max([begun.after_us, *own])
        return found


Stream = list[tuple[int, int, int]]
"""Rows, each with its number, epoch, and event time."""


class Streams:
    """What each operator gives, by a model of it. `begun`: by operator id the epoch after which it
    began, and `bounds` the event times through which windows lack rows; none for the oracle."""

    def __init__(
        self,
        topology: Topology,
        rows: Rows,
        last: int,
        begun: Mapping[str, int],
        bounds: Mapping[str, int],
    ) -> None:
        self.topology, self.begun, self.bounds = topology, begun, bounds
        self.rows, self.last = rows, last
        self.windows: dict[str, dict[int, tuple[int, tuple[int, ...]]]] = {}
        """By operator, by start: the epoch in which it closed, and its rows."""

    def watermark(self, name: str, epoch: int) -> int:
        node = self.topology.nodes[name]
        if isinstance(node.spec, SourceSpec):
            return END_OF_INPUT if epoch >= self.last else event_times(self.rows, name, epoch)[1]
        return min(self.watermark(i, epoch) for i in node.inputs)

    def of(self, name: str) -> Stream:
        node = self.topology.nodes[name]
        begun = self.begun.get(node.id, NO_EPOCH)
        if isinstance(node.spec, SourceSpec):
            number = 1000 * sorted(self.rows).index(name)
            own = [(number + n, e, t) for n, (e, t) in enumerate(self.rows[name])]
            return [row for row in own if row[1] > begun]
        read = [row for i in node.inputs for row in self.of(i) if row[1] > begun]
        window = node.spec.window
        return self._windows(name, read, window) if window is not None else read

    def _windows(self, name: str, read: Stream, definition: WindowSpec) -> Stream:
        node, of_window = self.topology.nodes[name], windows_of(definition)
        assert isinstance(of_window, HoppingWindows)
        size, slide = of_window.size_us, of_window.slide_us
        begun = self.begun.get(node.id, NO_EPOCH)
        found: dict[int, list[int]] = {}
        for number, epoch, time in read:
            before = self.watermark(name, epoch - 1) if epoch - 1 > begun else NO_WATERMARK
            taken = time - 1 if self._is_of_window(name) else time
            for start in range(taken // slide * slide, taken - size, -slide):
                if start + size > before and start > self.bounds.get(node.id, NO_WATERMARK):
                    found.setdefault(start, []).append(number)
        closed = {
            start: (self._closes(name, start + size, begun), tuple(sorted(numbers)))
            for start, numbers in found.items()
        }
        self.windows[name] = closed
        return [(hash(rows) % 997, e, start + size) for start, (e, rows) in closed.items()]

    def _is_of_window(self, name: str) -> bool:
        """Whether its rows have the time of the end of a window."""
        node = self.topology.nodes[name]
        up = self.topology.nodes[node.inputs[0]]
        while isinstance(up.spec, OperatorSpec) and up.spec.sql is not None:
            up = self.topology.nodes[up.inputs[0]]
        return isinstance(up.spec, OperatorSpec)

    def _closes(self, name: str, end: int, begun: int) -> int:
        return next(e for e in range(begun + 1, self.last + 1) if self.watermark(name, e) >= end)


OTHER_SINK = {"files": {"url": "file:///var/lib/rekindle/other"}}
EDITS: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "partitions": lambda s: s["operators"][2].update(partitions=4),
    "where": lambda s: s["operators"][0].update(sql="SELECT * FROM a WHERE n > 7"),
    "size": lambda s: s["operators"][3]["window"].update(slide="2h"),
    "weekly": lambda s: s["operators"][5]["window"].update(slide="2h"),
    "busy": lambda s: s["operators"][4].update(sql="SELECT * FROM daily WHERE rows > 0"),
    "source": lambda s: s["sources"][1]["files"].update(speedup=61),
    "sink": lambda s: s["queries"][1].update(query("q-daily", "daily", sink=OTHER_SINK)),
    "back": lambda s: None,
    "priority": lambda s: s["queries"][0].update(priority=5),
}


def edited(*names: str) -> dict[str, Any]:
    data = copy.deepcopy(spec())
    for name in names:
        EDITS[name](data)
    return data


jumps = st.lists(st.tuples(st.integers(-3, 6), st.integers(0, 2)), min_size=10, max_size=40)


def rows_of(drawn: list[tuple[int, int]], origin: int) -> list[tuple[int, int]]:
    """Event times that go back up to three hours, of which two are late; epochs grow."""
    found, time, epoch = [], origin, 0
    for jump, later in drawn:
        epoch += later
        found.append((epoch, (time + jump) * HOUR + 7))
        time = max(time, time + jump)
    return found


@given(
    drawn=st.tuples(jumps, jumps),
    apart=st.integers(-40, 40),
    edits=st.lists(
        st.tuples(st.lists(st.sampled_from(sorted(EDITS)), max_size=3), st.integers(0, 12)),
        min_size=1,
        max_size=4,
    ),
)
def test_each_window_that_is_written_has_all_rows(
    drawn: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    apart: int,
    edits: list[tuple[list[str], int]],
) -> None:
    """Also after an edit of an edit, of one that nothing has run of, and an edit back."""
    rows = {"a": rows_of(drawn[0], 100), "b": rows_of(drawn[1], 100 + apart)}
    world, head = World(rows), 0
    world.edit(spec(), NO_EPOCH)
    for names, later in edits:
        head += later
        world.edit(edited(*names), head)
        world.answer()
    assert world.manifest is not None
    last = max(e for found in rows.values() for e, _ in found) + 40
    topology, begun = world.generation.topology, world.manifest.begun
    written = Streams(topology, rows, last, begun, world.bounds())
    oracle = Streams(topology, rows, last, {}, {})
    for name in ("weekly", "hopping"):
        written.of(name)
        oracle.of(name)
    for name, found in written.windows.items():
        for start, window_written in found.items():
            assert window_written == oracle.windows[name][start], (name, start)


def started(data: dict[str, Any] | None = None) -> World:
    """An hour an epoch; `b` is ten hours ahead of `a`."""
    rows = {
        "a": [(e, e * HOUR) for e in range(200)],
        "b": [(e, (e + 10) * HOUR) for e in range(200)],
    }
    world = World(rows)
    world.edit(data or spec(), NO_EPOCH)
    return world


def test_windows_of_a_new_topology_are_all_written() -> None:
    world = started()
    world.answer()
    assert world.bounds() == {}
    assert world.manifest is not None
    assert world.manifest.begun == {}


def test_a_window_that_begins_anew_waits_for_the_event_times_of_its_sources() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    daily = next(s for s in world.generation.topology.segments if "daily" in s.nodes)
    with pytest.raises(Unanswered):
        world.beginnings.begun_windows(daily, 43)
    world.answer()
    (begun,) = world.beginnings.begun_windows(daily, 43)
    assert (begun.after_us, begun.own) == (53 * HOUR, ())
    assert world.beginnings.begun_windows(daily, 45) == ()  # a checkpoint of its own


def test_a_window_over_one_that_began_shortly_before_lacks_its_first_windows() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    world.edit(edited("partitions", "weekly"), 42)
    world.answer()
    ids = {name: node.id for name, node in world.generation.topology.nodes.items()}
    assert world.manifest is not None
    assert world.manifest.begun == {
        **{ids[name]: 43 for name in ("daily", "busy")},
        ids["weekly"]: 45,
    }
    assert world.bounds() == {ids["daily"]: 53 * HOUR, ids["weekly"]: 59 * HOUR - 1}


def joined(select: str) -> dict[str, Any]:
    """`a` is ten hours behind `b`; a row of `b` matches up to 2 h earlier and 3 h later."""
    data = copy.deepcopy(spec())
    on = "a.origin = b.origin"
    join = {"type": "Left", "on": on, "before": "2h", "after": "3h", "select": select}
    data["operators"].append({"name": "left", "inputs": ["a", "b"], "join": join})
    data["queries"].append(query("q-left", "left"))
    return data


def test_an_outer_join_that_begins_anew_lacks_what_might_have_a_match() -> None:
    world = started(joined("a.ts, b.delay"))
    world.edit(joined("a.ts, b.delay AS late"), 40)
    world.answer()
    ids = {name: node.id for name, node in world.generation.topology.nodes.items()}
    assert world.bounds() == {ids["left"]: 53 * HOUR}
    left = next(q for q in world.generation.topology.spec.queries if q.name == "q-left")
    (missing,) = world.beginnings.missing(left)
    assert (missing.from_epoch, missing.to_epoch) == (40, 43)
    assert (
        missing.from_time == "1970-01-02T11:00:00Z"
    )  # the watermark of 40 epochs, 38 h, minus 3 h
    assert missing.to_time == "1970-01-03T07:00:00.000001Z"  # 53 h, and 2 h


def test_sources_of_an_older_release_do_not_delay_a_start() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    for segment in world.generation.topology.segments:
        world.beginnings.answered(segment, None)
    daily = next(s for s in world.generation.topology.segments if "daily" in s.nodes)
    (begun,) = world.beginnings.begun_windows(daily, 43)
    assert begun.after_us == NO_WATERMARK


def missing(world: World, name: str) -> list[tuple[int, int, int, str | None, str | None]]:
    specs = {q.name: q for q in world.generation.topology.spec.queries}
    return [
        (m.from_epoch, m.to_epoch, m.since_generation, m.from_time, m.to_time)
        for m in world.beginnings.missing(specs[name])
    ]


def test_what_an_edit_loses_is_reported() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    assert missing(world, "q-daily") == []  # not known yet
    world.answer()
    assert missing(world, "q-clean") == []
    assert missing(world, "q-daily") == [
        # The checkpoint of epoch 39 has all windows that end by its watermark, 38:00.
        (40, 43, 2, "1970-01-02T12:00:00Z", "1970-01-03T08:00:00Z")
    ]


@pytest.mark.parametrize(
    ("window", "first", "last"),
    [
        ({"size": "4h", "step": "1h"}, "02T12:00:00Z", "03T08:00:00Z"),
        ({"session": "2h"}, "02T12:00:00.000001Z", "03T07:00:00Z"),
        ({"rows": 100}, "02T14:00:00Z", "03T05:00:00.000001Z"),
    ],
)
def test_what_an_edit_loses_is_reported_of_each_kind_of_windows(
    window: dict[str, Any], first: str, last: str
) -> None:
    """The watermark of what was written is 38:00, the newest event time that is missed 53:00."""
    before, after = spec(), edited("partitions")
    for data in (before, after):
        daily = next(o for o in data["operators"] if o["name"] == "daily")
        daily["window"] = {**daily["window"], "size": None, **window}
    world = started(before)
    world.edit(after, 40)
    world.answer()
    assert missing(world, "q-daily") == [(40, 43, 2, f"1970-01-{first}", f"1970-01-{last}")]


def test_rows_that_an_edit_loses_are_reported() -> None:
    world = started()
    world.edit(edited("where"), 40)
    world.answer()
    assert missing(world, "q-clean") == [
        (40, 43, 2, "1970-01-02T14:00:00Z", "1970-01-02T19:00:00Z")
    ]


def test_a_moved_sink_lacks_what_closed_between() -> None:
    world = started()
    world.edit(edited("sink"), 40)
    world.answer()
    assert missing(world, "q-daily") == [
        (40, 43, 2, "1970-01-02T12:00:00Z", "1970-01-02T16:00:00Z")
    ]


def test_an_edit_of_an_edit_that_has_written_nothing_is_one_gap() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    world.edit(edited("partitions", "where"), 41)
    assert world.manifest is not None
    assert world.manifest.queries["q-daily"].gaps == (Gap(39, 44, 3),)


def test_gaps_of_older_edits_stay() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    world.edit(edited(), 80)
    world.answer()
    assert world.manifest is not None
    assert world.manifest.queries["q-daily"].gaps == (Gap(39, 44, 2), Gap(79, 84, 3))
    assert len(missing(world, "q-daily")) == 2


def test_a_new_coordinator_finds_the_same() -> None:
    world = started()
    world.edit(edited("partitions"), 40)
    before = world.manifest
    assert before is not None
    again = start_generation(before, world.generation, build_graph(world.generation.topology), 60)
    assert (again.queries, again.begun) == (before.queries, before.begun)
