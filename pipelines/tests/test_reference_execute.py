"""The reference execution's own work: calls, exchanges, merges, ends. Chains are fakes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_parts import count_state, value_in_state

from rekindle.cli import main
from rekindle.connectors.compare import compare_sinks, read_sink
from rekindle.connectors.sink import Sink
from rekindle.connectors.source import SourceSummary
from rekindle.engine.model import Chain, ChainResult, DroppedRows, EpochOutput, State
from rekindle.errors import InvalidTopology, RekindleError
from rekindle.exchange.hashing import hash_rows
from rekindle.reference import (
    OpenedSource,
    RunEvent,
    RunProgress,
    SourcesOpened,
    SparkOptions,
    redirect,
    run_reference,
)
from rekindle.reference.execute import CallInput, Execution
from rekindle.reference.rewrite import relative_paths
from rekindle.reference.run import _remove_output
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK, EpochBatch, EpochInput
from rekindle.streams.sunion import Channel, SUnion
from rekindle.topology.compile import compile_topology
from rekindle.topology.kinds.files import FilesSourceSpec
from rekindle.topology.load import load_topology
from rekindle.topology.model import Segment

TOPOLOGY = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: fake}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: a
    schema: "k BIGINT, t TIMESTAMP"
    eventTime: {column: t}
    generator: {rowsPerSecond: 10, rows: 95, columns: {k: sequence, t: timestamp}}
  - name: b
    schema: "k BIGINT, t TIMESTAMP"
    eventTime: {column: t}
    generator: {rowsPerSecond: 3, rows: 12, columns: {k: "sequence(1000, 1)", t: timestamp}}
  operators:
  - name: keyed
    inputs: [a, b]
    keyBy: [k]
    partitions: 3
    sql: "SELECT k, t FROM a UNION ALL SELECT k, t FROM b"
  - {name: all, inputs: [keyed], partitions: 1, sql: "SELECT k, t FROM keyed"}
  queries:
  - {name: q, from: keyed, sink: {files: {url: "file:///out/q"}}}
  - {name: everything, from: all, sink: {files: {url: "file:///out/everything"}}}
"""


SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC"))])


@dataclass
class FakeChain:
    """Passes rows through, keeps what it was given, and counts rows in its state."""

    output_schema: pa.Schema
    seen: list[EpochInput]
    dropped: dict[str, DroppedRows] = field(default_factory=dict)

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        self.seen += epochs
        count = value_in_state(state, "n")
        outputs = []
        for e in epochs:
            rows = pa.concat_tables(e.inputs)
            count += rows.num_rows
            outputs.append(EpochOutput(e.epoch, e.watermark, rows, e.idle))
        return ChainResult(tuple(outputs), count_state("n", count))

    def match_columns(self, state: State) -> State:
        return state

    def join_deltas(self, state: State) -> State:
        return state

    def begins_after(self, state: State, bounds: Mapping[str, int]) -> State:
        return state


class Chains:
    """A fake chain for each partition, kept by segment name in the order of creation."""

    def __init__(self) -> None:
        self.made: dict[str, list[FakeChain]] = {}

    def __call__(self, segment: Segment) -> Chain:
        chain = FakeChain(SCHEMA, [])
        self.made.setdefault(segment.name, []).append(chain)
        return chain


def loaded(text: str = TOPOLOGY) -> tuple[str, Any]:
    return load_topology(text)


def run(tmp_path: Path, **options: Any) -> tuple[Any, Chains]:
    name, spec = loaded()
    chains = Chains()
    result = run_reference(spec, name, output=tmp_path, make_chain=chains, **options)
    return result, chains


def test_all_rows_arrive_once_through_hash_and_gather(tmp_path: Path) -> None:
    result, chains = run(tmp_path)
    assert result.rows == {"q": 107, "everything": 107}
    assert result.epochs == 11
    everything = read_sink(f"file://{tmp_path}/everything")
    assert sorted(everything.column("k").to_pylist()) == [*range(95), *range(1000, 1012)]
    keyed = read_sink(f"file://{tmp_path}/q")
    targets = [int(h) % 3 for h in hash_rows(keyed, ["k"])]
    assert targets == keyed.column("_partition").to_pylist()
    assert len(chains.made["keyed"]) == 3


def test_rows_are_merged_by_input_then_partition(tmp_path: Path) -> None:
    _, chains = run(tmp_path)
    for chain in chains.made["keyed"]:
        epoch = next(e for e in chain.seen if all(t.num_rows for t in e.inputs))
        assert max(epoch.inputs[0].column("k").to_pylist()) < 1000
        assert min(epoch.inputs[1].column("k").to_pylist()) >= 1000
    gathered = chains.made["all"][0].seen[0].inputs[0].column("k").to_pylist()
    parts = [c.seen[0].inputs for c in chains.made["keyed"]]
    assert gathered == [k for inputs in parts for t in inputs for k in t.column("k").to_pylist()]


def test_watermarks_are_the_minimum_and_end_with_the_last_input(tmp_path: Path) -> None:
    _, chains = run(tmp_path)
    seen = chains.made["keyed"][0].seen
    assert [e.epoch for e in seen] == list(range(11))
    assert all(a.watermark == b.watermark_before for a, b in itertools.pairwise(seen))
    assert seen[0].watermark == 666_666  # b's third row; a's tenth is at 0.9 s
    assert [e.watermark == END_OF_INPUT for e in seen] == [False] * 10 + [True]


MARKS = st.tuples(st.integers(0, 20) | st.just(END_OF_INPUT), st.booleans())


@given(st.lists(st.tuples(MARKS, MARKS), min_size=1, max_size=8))
def test_the_reference_merges_idle_inputs_as_tasks_do(
    epochs: list[tuple[tuple[int, bool], tuple[int, bool]]],
) -> None:
    name, spec = loaded()
    chains, topology = Chains(), compile_topology(spec, name, skip_cluster_checks=True)
    execution = Execution(topology, chains, lambda *_: Mock(spec=Sink))
    rows = pa.table({"k": [1], "t": [0]}, SCHEMA)
    cuts: dict[tuple[str, int], list[EpochInput]] = {("a", 0): [], ("b", 0): []}
    union = SUnion([[0], [0]], 0, NO_WATERMARK)
    merged: list[EpochInput] = []
    for number, marks in enumerate(epochs):
        for at, (key, (watermark, idle)) in enumerate(zip(cuts, marks, strict=True)):
            before = cuts[key][-1].watermark if cuts[key] else NO_WATERMARK
            after = max(before, watermark)
            cuts[key].append(EpochInput(number, before, after, (rows,), idle=idle))
            merged += union.add(
                Channel(at, 0), EpochBatch(key[0], 0, number, after, rows, "", idle=idle)
            )
    inputs = {key: tuple(found) for key, found in cuts.items()}
    execution.run_call(CallInput(tuple(range(len(epochs))), inputs))
    for name in ("keyed", "all"):
        for chain in chains.made[name]:
            seen = [(e.watermark_before, e.watermark, e.idle) for e in chain.seen]
            assert seen == [(e.watermark_before, e.watermark, e.idle) for e in merged]


def test_the_output_does_not_depend_on_the_size_of_calls(tmp_path: Path) -> None:
    for size in (5, 1, 64):
        run(tmp_path / f"{size}", epochs_per_call=size)
    for query, other in itertools.product(("q", "everything"), (1, 64)):
        urls = [f"file://{tmp_path}/{size}/{query}" for size in (5, other)]
        assert not compare_sinks(*urls)


def test_sinks_and_epochs_without_rows_have_the_types_that_chains_put_out(tmp_path: Path) -> None:
    """The type of `hash(k)` is unknown to the topology, but known to the chain."""
    text = TOPOLOGY.replace("SELECT k, t FROM", "SELECT k, hash(k) AS h FROM")
    name, spec = loaded(text.replace("hash(k) AS h FROM keyed", "h FROM keyed"))
    hashed = pa.schema([("k", pa.int64()), ("h", pa.list_(pa.int32()))])

    class Hashes(FakeChain):
        def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
            rows = pa.table({"k": [7], "h": [[1]]}, schema=hashed)
            outputs = (EpochOutput(e.epoch, 0, rows.slice(0, int(e.epoch == 3))) for e in epochs)
            return ChainResult(tuple(outputs), state)

    last = FakeChain(hashed, [])
    made = Chains()
    chains: dict[str, Chain] = {"keyed": Hashes(hashed, []), "all": last}
    run_reference(spec, name, output=tmp_path, make_chain=lambda s: chains.get(s.name) or made(s))
    everything = read_sink(f"file://{tmp_path}/everything")
    assert everything.column("h").to_pylist() == [[1]] * 3
    assert all(e.inputs[0].schema == hashed for e in last.seen)


def test_a_run_stops_after_until_epoch_and_reports_progress(tmp_path: Path) -> None:
    reported: list[RunEvent] = []
    result, _ = run(tmp_path, until_epoch=4, epochs_per_call=2, on_event=reported.append)
    opened, *later = reported
    progress = [event for event in later if isinstance(event, RunProgress)]
    assert progress == later
    assert isinstance(opened, SourcesOpened)
    assert (opened.last_epoch, opened.epoch_interval_us) == (4, 1_000_000)
    assert opened.sources == (
        OpenedSource(
            "a",
            SourceSummary(rows=95, first_us=0, last_us=9_400_000),
            last_epoch=9,
            speed_field=("rowsPerSecond", 10.0),
            generated=True,
        ),
        OpenedSource(
            "b",
            SourceSummary(rows=12, first_us=0, last_us=3_666_666),
            last_epoch=3,
            speed_field=("rowsPerSecond", 3.0),
            generated=True,
        ),
    )
    assert [p.epoch for p in progress] == [1, 3, 4]
    assert [p.rows for p in progress] == sorted({p.rows for p in progress})
    assert result.rows["q"] == 50 + 12
    whole, _ = run(tmp_path / "far", until_epoch=999)
    assert whole.epochs == 11
    assert (result.ends_early, whole.ends_early) == (True, False)


def test_overwrite_deletes_earlier_output_and_nothing_else(tmp_path: Path) -> None:
    first, _ = run(tmp_path)
    left = tmp_path / "q" / ".tmp" / "unfinished"
    left.parent.mkdir(exist_ok=True)
    left.touch()
    with pytest.raises(RekindleError, match="--overwrite"):
        run(tmp_path)
    rows: list[tuple[str, int, int]] = []
    again, _ = run(
        tmp_path,
        overwrite=True,
        until_epoch=4,
        on_rows=lambda query, epoch, table: rows.append((query, epoch, table.num_rows)),
    )
    assert again.epochs == 5 < first.epochs
    assert sum(number for query, _, number in rows if query == "q") == again.rows["q"]
    assert max(epoch for _, epoch, _ in rows) <= 4
    assert not left.exists()
    mine = tmp_path / "q" / "notes.txt"
    mine.touch()
    with pytest.raises(RekindleError, match=r"notes.txt is not of an earlier run"):
        run(tmp_path, overwrite=True)
    assert list(mine.parent.glob("*.parquet"))


def test_overwrite_deletes_no_input_nor_what_is_not_its_own(tmp_path: Path) -> None:
    run(tmp_path)
    marker = tmp_path / "q" / "_rekindle.json"
    own = marker.read_text()
    marker.write_text('{"topologyUid": "8d7c-cluster"}')
    with pytest.raises(RekindleError, match="q is not of an earlier run of"):
        run(tmp_path, overwrite=True)
    marker.write_text(own)
    (copied,) = list((tmp_path / "q").glob("*000.parquet"))[:1]
    for place in ("backup/" + copied.name, "other-p000-e000000000001.parquet", "a/.tmp/thesis"):
        mine = tmp_path / "q" / place
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_bytes(copied.read_bytes())
        with pytest.raises(RekindleError, match="is not of an earlier run"):
            run(tmp_path, overwrite=True)
        mine.unlink()
    notes = tmp_path / "everything" / "notes.txt"
    notes.touch()
    with pytest.raises(RekindleError, match=r"notes\.txt"):
        run(tmp_path, overwrite=True)
    assert copied.exists(), "nothing is deleted before all is checked"


def test_overwrite_deletes_no_file_that_a_source_reads(tmp_path: Path) -> None:
    run(tmp_path)
    file = sorted((tmp_path / "q").glob("*.parquet"))[0]
    name, spec = loaded()
    files = {"url": f"file://{file.parent}/q-p0*.parquet", "format": "parquet", "rowsPerSecond": 1}
    read = FilesSourceSpec.model_validate(files)
    reading = spec.sources[0].model_copy(update={"generator": None, "files": read})
    topology = compile_topology(spec, name, skip_cluster_checks=True)
    topology = replace(topology, spec=spec.model_copy(update={"sources": (reading,)}))
    with pytest.raises(RekindleError, match="is read by a source"):
        _remove_output(topology, tmp_path)
    assert file.exists()


def test_overwrite_needs_an_output(tmp_path: Path) -> None:
    name, spec = loaded()
    with pytest.raises(RekindleError, match="give both"):
        run_reference(spec, name, output=None, overwrite=True, make_chain=Chains())


SPARSE = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: sparse}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: a
    schema: "k BIGINT, t TIMESTAMP"
    eventTime: {column: t}
    files: {url: "file://DIR/a.csv", format: csv, orderBy: t, speedup: 1}
  - name: b
    schema: "k BIGINT, t TIMESTAMP"
    eventTime: {column: t}
    generator: {rowsPerSecond: 0.0001, rows: 5, columns: {k: sequence, t: timestamp}}
  operators:
  - name: both
    inputs: [a, b]
    keyBy: [k]
    partitions: 2
    sql: "SELECT k, t FROM a UNION ALL SELECT k, t FROM b"
  queries:
  - {name: q, from: both, sink: {files: {url: "file:///out/q"}}}
"""


def sparse(directory: Path, *times: str) -> tuple[str, Any]:
    rows = "".join(f"{100 + i},{t}\n" for i, t in enumerate(times))
    (directory / "a.csv").write_text(f"k,t\n{rows}")
    return load_topology(SPARSE.replace("DIR", str(directory)))


@pytest.mark.timeout(30)
def test_runs_of_empty_epochs_cost_nothing(tmp_path: Path) -> None:
    name, spec = sparse(tmp_path, "0001-01-01", "2013-01-01", "2013-01-15")
    chains = Chains()
    reported: list[RunEvent] = []
    result = run_reference(
        spec, name, output=tmp_path / "out", make_chain=chains, on_event=reported.append
    )
    days = 734_868  # from the first time to the second one; an epoch is a second
    last = (days + 14) * 86_400 + 1
    assert result.epochs == last + 1
    assert result.rows == {"q": 8}
    newest = reported[-1]
    assert isinstance(newest, RunProgress)
    assert newest.epoch == last
    seen = chains.made["both"][0].seen
    a = [0, days * 86_400, last - 1, last]
    b = [0, 10_000, 20_000, 30_000, 40_000, 40_001]
    assert [e.epoch for e in seen] == sorted({*a, *b})
    assert all(x.watermark == y.watermark_before for x, y in itertools.pairwise(seen))
    assert seen[-1].watermark == END_OF_INPUT
    epochs = read_sink(f"file://{tmp_path}/out/q").column("_epoch").to_pylist()
    assert sorted(epochs) == sorted([*a[:-1], *b[:-1]])


@pytest.mark.parametrize("until", [1, 10_000, 15_000, 86_400, 90_000])
def test_a_run_may_end_among_empty_epochs(tmp_path: Path, until: int) -> None:
    name, spec = sparse(tmp_path, "2013-01-01", "2013-01-02")
    reported: list[RunEvent] = []
    result = run_reference(
        spec,
        name,
        output=tmp_path / "out",
        make_chain=Chains(),
        until_epoch=until,
        on_event=reported.append,
    )
    newest = reported[-1]
    assert isinstance(newest, RunProgress)
    assert newest.epoch == newest.last_epoch == result.epochs - 1 == min(until, 86_401)
    of_a = 1 + (until >= 86_400)
    assert result.rows == {"q": of_a + min(until // 10_000 + 1, 5)}


def test_an_unbounded_source_needs_until_epoch(tmp_path: Path) -> None:
    name, spec = loaded(TOPOLOGY.replace("rows: 95, ", ""))
    with pytest.raises(RekindleError, match="source a is unbounded; give --until-epoch"):
        run_reference(spec, name, output=tmp_path, make_chain=Chains())
    result = run_reference(spec, name, output=tmp_path, make_chain=Chains(), until_epoch=20)
    assert result.rows["q"] == 210 + 12


def test_an_output_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(RekindleError, match="holds output of an earlier run"):
        run(tmp_path)


def test_an_earlier_output_is_refused_before_any_chain_is_made(tmp_path: Path) -> None:
    run(tmp_path)
    name, spec = loaded(TOPOLOGY)

    def never(segment: Segment) -> Chain:
        raise AssertionError("Spark would have started")

    with pytest.raises(RekindleError, match="holds output of an earlier run"):
        run_reference(spec, name, output=tmp_path, make_chain=never)


def test_urls_are_rewritten_by_name() -> None:
    text = (Path(__file__).parents[2] / "examples/flights/topology.yaml").read_text()
    _, spec = load_topology(text)
    other = redirect(spec, input=Path("/in"), output=Path("/out"))
    assert [s.files.url for s in other.sources if s.files] == [
        "file:///in/flights.csv",
        "file:///in/weather.csv",
    ]
    assert [(q.sink.files.url, q.sink.files.format) for q in other.queries if q.sink.files] == [
        ("file:///out/delay-alarms", "parquet"),
        ("file:///out/storm-watch", "json"),
        ("file:///out/route-report", "parquet"),
    ]
    assert redirect(spec, input=None, output=None) == spec


def test_a_source_of_no_kind_is_left_to_validation(tmp_path: Path) -> None:
    name, spec = loaded(TOPOLOGY)
    bare = spec.sources[0].model_copy(update={"files": None, "generator": None})
    bare_spec = spec.model_copy(update={"sources": (bare,)})
    with pytest.raises(InvalidTopology, match=r"spec\.sources\[0\]: has no files"):
        run_reference(bare_spec, name, output=None, input=tmp_path)


@pytest.mark.parametrize(
    ("urls", "places"),
    [
        (["s3://b/x/f.csv", "s3://b/y/g.csv"], ["f.csv", "g.csv"]),
        (["s3://b/x/f.csv", "s3://b/y/f.csv"], ["x/f.csv", "y/f.csv"]),
        (["s3://b/1/x/f.csv", "s3://b/2/x/f.csv", "s3://b/h"], ["1/x/f.csv", "2/x/f.csv", "h"]),
        (["file:///f.csv", "s3://b/f.csv"], ["f.csv", "b/f.csv"]),
        (["s3://b/x/f.csv", "s3://b/x/f.csv"], ["f.csv", "f.csv"]),
        (["s3://b/x/*.csv", "s3://b/y/f.csv"], ["x/*.csv", "y/f.csv"]),
        (["s3://b/x/a*.csv", "s3://b/y/b*.csv"], ["a*.csv", "b*.csv"]),
        (["s3://b/x/a*.csv", "s3://b/y/*b.csv"], ["x/a*.csv", "y/*b.csv"]),
        (["s3://b/x/[ab].csv", "s3://b/y/?.csv"], ["x/[ab].csv", "y/?.csv"]),
        (["s3://b/x/*.csv", "s3://b/x/f.csv"], ["*.csv", "f.csv"]),
        (["s3://b/x/day=*/*.json"], ["day=*/*.json"]),
        (["s3://b/x/events/", "s3://b/y/events"], ["x/events", "y/events"]),
    ],
)
def test_files_with_the_same_name_keep_their_directories(
    urls: list[str], places: list[str]
) -> None:
    assert [relative_paths(urls)[url] for url in urls] == places


def test_files_with_ambiguous_names_are_refused() -> None:
    with pytest.raises(RekindleError, match=r"cannot distinguish gs://b/f\.csv and s3://b/f\.csv"):
        relative_paths(["s3://b/f.csv", "gs://b/f.csv"])


@pytest.mark.parametrize(
    "master", ["yarn", "spark://host:7077", "local[0]", "local[99999999999]", "", "k8s://https://x"]
)
def test_a_master_that_is_not_local_is_refused_at_once(tmp_path: Path, master: str) -> None:
    with pytest.raises(RekindleError, match=r"is not supported.*give local, local\[n\]"):
        run(tmp_path, spark=SparkOptions(master))


def test_the_command_reports_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.yaml"
    assert main(["run", str(path)]) == 1
    assert "No such file" in capsys.readouterr().err
    path.write_text(TOPOLOGY.replace("FROM a", "FROM nowhere"))
    assert main(["run", str(path), "--output", str(tmp_path)]) == 1
    assert "spec.operators[0]" in capsys.readouterr().err
    path.write_text(TOPOLOGY.replace("k: sequence,", "k: sequenze,"))
    assert main(["run", str(path), "--output", str(tmp_path)]) == 1
    assert "unknown function sequenze" in capsys.readouterr().err


def test_a_topology_without_operators_starts_no_jvm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, _, _ = TOPOLOGY.partition("  operators:")
    first, _, _ = head.partition("  - name: b")
    path = tmp_path / "t.yaml"
    path.write_text(first + '  queries:\n  - {name: q, from: a, sink: {files: {url: "file:///x"}}}')
    assert main(["run", str(path), "--output", str(tmp_path)]) == 0
    title, heading, line = capsys.readouterr().out.splitlines()
    assert title.startswith("fake: 11 epochs in ")
    assert heading.split() == ["query", "rows", "epochs", "with", "rows", "output"]
    assert line.split() == ["q", "95", "10", f"file://{tmp_path}/q"]


def test_a_run_says_how_many_rows_each_operator_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropping(Chains):
        def __call__(self, segment: Segment) -> Chain:
            chain = super().__call__(segment)
            assert isinstance(chain, FakeChain)
            if segment.name == "keyed":
                chain.dropped["keyed"] = DroppedRows(
                    late=1000, null_event_time=len(self.made["keyed"])
                )
            else:
                chain.dropped[segment.name] = DroppedRows()
            return chain

    @contextlib.contextmanager
    def chains(*_: object) -> Iterator[Dropping]:
        yield Dropping()

    monkeypatch.setattr("rekindle.reference.run._spark_chains", chains)
    path = tmp_path / "t.yaml"
    path.write_text(TOPOLOGY)
    assert main(["run", str(path), "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out.splitlines()
    dropped = [line for line in output if "dropped" in line]
    assert dropped == ["operator keyed dropped 3,000 late rows, and 6 without event time"]


def test_an_invalid_topology_is_refused(tmp_path: Path) -> None:
    name, spec = loaded(TOPOLOGY.replace("from: all", "from: al"))
    with pytest.raises(InvalidTopology, match="no source or operator al"):
        run_reference(spec, name, output=tmp_path, make_chain=Chains())


PARTITIONED = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: parts}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: rows
    partitions: %d
    schema: "k BIGINT, t TIMESTAMP"
    eventTime: {column: t}
    files: {url: "file://%s/*.json", format: json, orderBy: t, speedup: 1}
  operators:
  - {name: keyed, inputs: [rows], keyBy: [k], partitions: 2, sql: "SELECT k, t FROM rows"}
  - {name: all, inputs: [rows], partitions: 1, sql: "SELECT k, t FROM rows"}
  queries:
  - {name: raw, from: rows, sink: {files: {url: "file:///out/raw"}}}
  - {name: by-key, from: keyed, sink: {files: {url: "file:///out/by-key"}}}
  - {name: everything, from: all, sink: {files: {url: "file:///out/everything"}}}
"""


def test_partitions_of_a_source_change_no_row_and_no_watermark(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for n in range(4):
        lines = (f'{{"k": {n + at}, "t": "2020-01-01T00:00:{at % 8:02d}Z"}}' for at in range(10))
        (tmp_path / f"in/{n}.json").write_text("\n".join(lines))

    def seen(partitions: int) -> dict[str, Any]:
        name, spec = load_topology(PARTITIONED % (partitions, tmp_path / "in"))
        chains, output, reported = Chains(), tmp_path / f"{partitions}", list[RunEvent]()
        result = run_reference(
            spec, name, output=output, make_chain=chains, on_event=reported.append
        )
        opened = reported[0]
        assert isinstance(opened, SourcesOpened)
        assert len(chains.made["rows"]) == partitions
        marks = {
            segment: {tuple((e.epoch, e.watermark) for e in chain.seen) for chain in of_segment}
            for segment, of_segment in chains.made.items()
        }
        rows = {
            query: sorted(
                (row["_epoch"], row["k"], row["t"])
                for row in read_sink(f"file://{output}/{query}").to_pylist()
            )
            for query in result.rows
        }
        assert opened.sources[0].idle_partitions == max(0, partitions - 4)
        return {"rows": rows, "marks": marks, "summary": opened.sources[0].summary}

    one = seen(1)
    assert one["summary"].rows == len(one["rows"]["raw"]) == 40
    assert seen(3) == one
    assert seen(6) == one
