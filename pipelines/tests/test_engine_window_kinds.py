"""Kinds of windows on Spark, beside those of `test_engine_chain.py`: what they hold, and that bits
do not depend on how a chain is run."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engine_fixtures import MINUTE, SECOND, edge_case_epochs, key_of, run, state_digests, topology
from spark_parts import StartSession

from rekindle.cli import main
from rekindle.connectors import read_sink
from rekindle.engine.model import State
from rekindle.engine.operators.base import Aggregation
from rekindle.engine.state import spill
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.epochs import END_OF_INPUT, EpochInput

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain

pytestmark = pytest.mark.spark

AGGREGATES = "count(*) AS rows, sum(v) AS total, sum(n) AS whole, max(k) AS word"
KINDS = ["session: 20s", "size: 5m, step: 1m", "rows: 6, slideRows: 2"]
Window = tuple[int, int, Any, Any]
"""Start, end, and the keys k and g."""


@pytest.fixture(scope="module")
def start(start_shared: StartSession) -> Iterator[StartSession]:
    session = start_shared("test")
    yield start_shared
    sessions.stop_session(SparkSession.getActiveSession() or session, keep_jvm=True)


def window(fields: str, keys: str = "k, g") -> str:
    spec = f"{{{fields}, groupBy: [{keys}], aggregate: '{AGGREGATES}'}}"
    return f"- {{name: w, inputs: [rows], window: {spec}}}"


def ended(epochs: list[EpochInput]) -> list[EpochInput]:
    last = epochs[-1]
    nothing = (last.inputs[0].slice(0, 0),)
    return [*epochs, EpochInput(last.epoch + 1, last.watermark, END_OF_INPUT, nothing)]


def micros(time: datetime) -> int:
    return round(time.timestamp() * SECOND)


def found_windows(outputs: Sequence[Any]) -> dict[int, dict[Window, tuple[int, int | None]]]:
    """By epoch and window its number of rows and `whole`."""
    return {
        output.epoch: {
            (
                micros(row["window_start"]),
                micros(row["window_end"]),
                row["k"],
                key_of(row["g"]),
            ): (row["rows"], row["whole"])
            for row in output.rows.to_pylist()
        }
        for output in outputs
    }


def rows_by_group(epoch: EpochInput) -> Iterator[tuple[tuple[Any, Any], int, int | None]]:
    """The rows of an epoch with event time: key, time and `n`."""
    table = epoch.inputs[0]
    columns = [table.column(name).to_pylist() for name in ("k", "g", "n")]
    times = table.column("t").cast(pa.int64()).to_pylist()
    for k, g, n, time in zip(*columns, times, strict=True):
        if time is not None:
            yield (k, key_of(g)), time, n


def whole(numbers: Sequence[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None


def session_oracle(
    epochs: Sequence[EpochInput], gap: int
) -> dict[int, dict[Window, tuple[int, int | None]]]:
    written: dict[int, dict[Window, tuple[int, int | None]]] = {}
    open_rows: dict[Any, list[tuple[int, int | None]]] = {}
    for epoch in epochs:
        written[epoch.epoch] = {}
        for group, time, n in rows_by_group(epoch):
            open_rows.setdefault(group, []).append((time, n))
        for group, rows in open_rows.items():
            chains: list[list[tuple[int, int | None]]] = []
            for row in sorted(rows, key=lambda r: r[0]):
                if chains and row[0] - chains[-1][-1][0] < gap:
                    chains[-1].append(row)
                else:
                    chains.append([row])
            remaining: list[tuple[int, int | None]] = []
            for chain in chains:
                end = chain[-1][0] + gap
                if end > epoch.watermark:
                    remaining += chain
                elif end > epoch.watermark_before:
                    of = (chain[0][0], end, *group)
                    written[epoch.epoch][of] = (len(chain), whole([n for _, n in chain]))
            open_rows[group] = remaining
    return written


def test_sessions_equal_those_of_an_oracle(start: StartSession) -> None:
    epochs = ended(edge_case_epochs(1, 10, 200, idle=[5]))
    compiled = topology(window("session: 20s"), "w")
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    result = chain.process(State(), epochs)
    expected = session_oracle(epochs, 20 * SECOND)
    assert found_windows(result.outputs) == expected
    rows = sum(1 for epoch in epochs for _ in rows_by_group(epoch))
    in_sessions = sum(n for found in expected.values() for n, _ in found.values())
    assert 0 < chain.dropped["w"].late == rows - in_sessions
    assert all(state.is_empty for state in result.state.operators.values())


def test_windows_with_a_step_equal_those_of_an_oracle(start: StartSession) -> None:
    epochs = ended(edge_case_epochs(1, 10, 200, idle=[5]))
    compiled = topology(window("size: 5m, step: 1m"), "w")
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    expected: dict[int, dict[Window, tuple[int, int | None]]] = {}
    seen: list[tuple[Any, int, int | None]] = []
    late = 0
    for epoch in epochs:
        rows = list(rows_by_group(epoch))
        ends = [time - time % (5 * MINUTE) + 5 * MINUTE for _, time, _ in rows]
        late += sum(end <= epoch.watermark_before for end in ends)
        seen += rows
        found: dict[Window, list[int | None]] = {}
        for group, time, n in seen:
            first = time - time % (5 * MINUTE)
            for end in range(time - time % MINUTE + MINUTE, first + 5 * MINUTE + 1, MINUTE):
                if epoch.watermark_before < end <= epoch.watermark:
                    found.setdefault((first, end, *group), []).append(n)
        expected[epoch.epoch] = {of: (len(ns), whole(ns)) for of, ns in found.items()}
    assert found_windows(chain.process(State(), epochs).outputs) == expected
    assert 0 < chain.dropped["w"].late == late


def test_windows_of_rows_equal_those_of_an_oracle(start: StartSession) -> None:
    epochs = edge_case_epochs(1, 10, 200, idle=[5])
    compiled = topology(window("rows: 6, slideRows: 2"), "w")
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    seen: dict[Any, list[tuple[int, int | None]]] = {}
    late = 0
    for epoch, output in zip(epochs, chain.process(State(), epochs).outputs, strict=True):
        expected: list[tuple[Any, ...]] = []
        for group, time, n in rows_by_group(epoch):
            if time < epoch.watermark_before:
                late += 1
                continue
            of_group = seen.setdefault(group, [])
            of_group.append((time, n))
            if len(of_group) >= 6 and len(of_group) % 2 == 0:
                times = [time for time, _ in of_group[-6:]]
                of = (min(times), max(times), *group)
                expected.append((*of, 6, whole([n for _, n in of_group[-6:]])))
        got = [
            (
                *(micros(row["window_start"]), micros(row["window_end"])),
                *(row["k"], key_of(row["g"]), row["rows"], row["whole"]),
            )
            for row in output.rows.to_pylist()
        ]
        assert sorted(got, key=repr) == sorted(expected, key=repr)
        assert [row[1] for row in got] == sorted(row[1] for row in got)
    assert 0 < chain.dropped["w"].late == late


BEHIND = """
- name: per-minute
  inputs: [w]
  window: {size: 1m, aggregate: 'sum(rows) AS rows, sum(total) AS total, count(*) AS windows'}
"""


@pytest.mark.parametrize("fields", KINDS)
def test_a_window_behind_has_all_of_its_rows(start: StartSession, fields: str) -> None:
    epochs = ended(edge_case_epochs(4, 10, 200))
    compiled = topology(window(fields) + BEHIND, "per-minute")
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    behind = [row for o in chain.process(State(), epochs).outputs for row in o.rows.to_pylist()]
    first = topology(window(fields), "w")
    chain_of_first = SparkChain(first.segments[-1], first, start("test"))
    outputs = chain_of_first.process(State(), epochs).outputs
    expected: dict[int, tuple[int, int]] = {}
    for row in (row for output in outputs for row in output.rows.to_pylist()):
        last = micros(row["window_end"]) - (not fields.startswith("rows"))
        before = expected.get(last - last % MINUTE, (0, 0))
        expected[last - last % MINUTE] = (before[0] + row["rows"], before[1] + 1)
    assert chain.dropped["per-minute"].late == 0
    got = {micros(row["window_start"]): (row["rows"], row["windows"]) for row in behind}
    assert got == expected


@pytest.mark.parametrize("fields", KINDS)
def test_bits_do_not_depend_on_epochs_in_a_call_nor_on_cores(
    start: StartSession, fields: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    epochs = ended(edge_case_epochs(2, 8, 200, idle=[4]))
    compiled = topology(window(fields) + BEHIND, "per-minute")
    found = []
    for master, sizes in (("local[1]", [3, 1, 5]), ("local[4]", [9])):
        sessions.stop_session(start("test"), keep_jvm=True)
        session = start("test", master=master)
        for method in Aggregation:
            chain = SparkChain(compiled.segments[-1], compiled, session, method=method)
            outputs, state = run(chain, epochs[:-1], sizes)
            found.append((outputs, state_digests(chain, state)))
    files = RunFiles(tmp_path / "runs", memory_bytes=0)
    monkeypatch.setattr(spill, "MIN_BUFFER_BYTES", 2_000)
    chain = SparkChain(compiled.segments[-1], compiled, session, run_files=files)
    outputs, state = run(chain, epochs[:-1], [1])
    found.append((outputs, state_digests(chain, state)))
    assert all(f == found[0] for f in found)
    assert len(set(found[0][0])) > 3


@pytest.mark.parametrize("fields", ["session: 2m", "rows: 2", "size: 4m, step: 2m"])
def test_results_of_windows_are_never_late(start: StartSession, fields: str) -> None:
    """Their event time is the end of a window, which is when a session begins, too."""
    operators = f"""
- {{name: m, inputs: [rows], window: {{size: 1m, groupBy: [k], aggregate: count(*) AS rows}}}}
- {{name: w, inputs: [m], window: {{{fields}, groupBy: [k], aggregate: sum(rows) AS rows}}}}
"""
    epochs = ended(edge_case_epochs(4, 10, 50))
    compiled = topology(operators, "w")
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    found = [row for o in chain.process(State(), epochs).outputs for row in o.rows.to_pylist()]
    assert found
    assert chain.dropped["w"].late == 0
    assert all(row["window_start"].second == row["window_end"].second == 0 for row in found)
    if fields.startswith("session"):
        rows = sum(1 for epoch in epochs for _ in rows_by_group(epoch))
        assert sum(row["rows"] for row in found) == rows - chain.dropped["m"].late


ALL_KINDS = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: kinds}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: rows
    schema: "t TIMESTAMP, k STRING, n BIGINT"
    eventTime: {column: t, lateness: 1h}
    files: {url: "file:///data/rows.csv", format: csv, orderBy: n, rowsPerSecond: 20}
  operators:
  - {name: sessions, inputs: [rows], window: {session: 20s, groupBy: [k], aggregate: OF}}
  - {name: steps, inputs: [rows], window: {size: 4m, step: 1m, groupBy: [k], aggregate: OF}}
  - {name: counts, inputs: [rows], window: {rows: 6, slideRows: 2, groupBy: [k], aggregate: OF}}
  queries:
  - {name: sessions, from: sessions, sink: {files: {url: "file:///unused/1"}}}
  - {name: steps, from: steps, sink: {files: {url: "file:///unused/2"}}}
  - {name: counts, from: counts, sink: {files: {url: "file:///unused/3"}}}
""".replace("OF", '"count(*) AS c, sum(n) AS s"')


@pytest.mark.usefixtures("start")
def test_a_run_equals_an_oracle(tmp_path: Path) -> None:
    """Rows that are not in the order of event time, none of them late."""
    drawn = random.Random(3)
    rows = [(drawn.randrange(1200) * SECOND, drawn.choice("ab"), n) for n in range(400)]
    times = [f"{datetime.fromtimestamp(t // SECOND, UTC):%Y-%m-%d %H:%M:%S}" for t, _, _ in rows]
    lines = [f"{time},{k},{n}" for time, (_, k, n) in zip(times, rows, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["t,k,n", *lines, ""]))
    (tmp_path / "kinds.yaml").write_text(ALL_KINDS)
    arguments = ["run", str(tmp_path / "kinds.yaml"), "--input", str(tmp_path)]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0

    def found(query: str) -> list[tuple[Any, ...]]:
        of_query = read_sink(f"file://{tmp_path}/out/{query}").to_pylist()
        bounds = ("window_start", "window_end")
        return sorted((*(micros(r[b]) for b in bounds), r["k"], r["c"], r["s"]) for r in of_query)

    sessions_found, steps, counts = [], [], []
    for k in "ab":
        of_group = [(t, n) for t, key, n in rows if key == k]
        chains: list[list[tuple[int, int]]] = []
        for row in sorted(of_group):
            if chains and row[0] - chains[-1][-1][0] < 20 * SECOND:
                chains[-1].append(row)
            else:
                chains.append([row])
        ranges = [(c[0][0], c[-1][0] + 20 * SECOND, c) for c in chains]
        sessions_found += [(a, b, k, len(c), sum(n for _, n in c)) for a, b, c in ranges]
        for first in range(0, 20 * MINUTE, 4 * MINUTE):
            for end in range(first + MINUTE, first + 5 * MINUTE, MINUTE):
                window = [n for t, n in of_group if first <= t < end]
                steps += [(first, end, k, len(window), sum(window))] if window else []
        for end in range(6, len(of_group) + 1, 2):
            last = of_group[end - 6 : end]
            of = [t for t, _ in last]
            counts.append((min(of), max(of), k, 6, sum(n for _, n in last)))
    assert found("sessions") == sorted(sessions_found)
    assert found("steps") == sorted(steps)
    assert found("counts") == sorted(counts)


DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "topology.md").read_text()
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("start")
def test_the_examples_of_the_documentation(tmp_path: Path) -> None:
    of_windows = DOCUMENTATION.partition("#### Sessions\n")[2]
    sessions, rows = re.split("^###+ .*$", of_windows, flags=re.MULTILINE)[:2]
    manifest, clicks = _BLOCK.findall(sessions)
    (operator,) = _BLOCK.findall(rows)[:1]
    found = []
    of_rows = re.sub(r"(?s)  - name: visits\n.*?(?=  queries)", operator, manifest)
    for text in (manifest, of_rows):
        (tmp_path / "visits.yaml").write_text(text)
        (tmp_path / "clicks.csv").write_text(clicks)
        arguments = ["run", str(tmp_path / "visits.yaml"), "--input", str(tmp_path)]
        assert main([*arguments, "--output", str(tmp_path / "out"), "--overwrite"]) == 0
        written = read_sink(f"file://{tmp_path}/out/visits").to_pylist()
        found.append([(r.popitem()[1], r["user"], f"{r['window_end']:%H:%M}") for r in written])
    assert found[0] == [
        (2, "ann", "10:50"),
        (1, "bob", "10:55"),
        (1, "ann", "11:30"),
        (1, "bob", "12:10"),
    ]
    assert found[1] == [("b", "ann", "10:20"), ("c", "ann", "11:00"), ("d", "bob", "11:40")]
