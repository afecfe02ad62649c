"""`distinct` on Spark, with `sql` and other operators in its segment, and as a program runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distinct_rows import SCHEMA, distinct, history, inputs_of, oracle
from engine_fixtures import MINUTE, edge_case_epochs, run, state_digests, topology
from spark_parts import StartSession

from rekindle.cli import main
from rekindle.connectors import read_sink
from rekindle.engine.model import State
from rekindle.engine.state import spill
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.epochs import END_OF_INPUT, EpochInput

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain

pytestmark = pytest.mark.spark

KEEPS = [pytest.param("First", marks=pytest.mark.long), "Last"]
TWICE = """
- name: both
  inputs: [rows]
  sql: "SELECT k, n, g, v, t FROM rows WHERE n > -4 UNION ALL SELECT k, n, g, v, t FROM rows"
- name: once
  inputs: [both]
  distinct: {keys: [k, n], within: 20s, keep: KEEP}
- {name: named, inputs: [once], sql: "SELECT upper(k) AS name, v, t AS at FROM once"}
- {name: counted, inputs: [named], window: {size: 1m, aggregate: "count(*) AS c, sum(v) AS total"}}
"""


@pytest.fixture(scope="module")
def start(start_shared: StartSession) -> Iterator[StartSession]:
    session = start_shared("test")
    yield start_shared
    sessions.stop_session(SparkSession.getActiveSession() or session, keep_jvm=True)


def ended(epochs: list[EpochInput]) -> list[EpochInput]:
    last = epochs[-1]
    nothing = (last.inputs[0].slice(0, 0),)
    return [*epochs, EpochInput(last.epoch + 1, last.watermark, END_OF_INPUT, nothing)]


@pytest.mark.parametrize("keep", KEEPS)
def test_sql_reads_and_writes_what_distinct_does(start: StartSession, keep: str) -> None:
    before = (
        '- {name: twice, inputs: [rows], sql: "SELECT * FROM rows UNION ALL SELECT * FROM rows"}'
    )
    once = distinct(keep).replace("[rows]", "[twice]")
    after = '- {name: after, inputs: [once], sql: "SELECT n + 1 AS m, k, d, t FROM once"}'
    compiled = topology("\n".join([before, once, after]), "after", schema=SCHEMA)
    (segment,) = [s for s in compiled.segments if not s.is_source] or compiled.segments
    assert segment.nodes[-3:] == ("twice", "once", "after")
    rows: list[tuple[Any, int]] = [
        ([("a", 0.0, n, 8 * e + n), ("b", None, n, None), (None, 1.5, n, 11 * e)], 8)
        for e, n in zip(range(12), [1, 5, 2, 7, 0, 3, 9, 1, 4, 6, 2, 8], strict=True)
    ]
    found = history(rows)
    chain = SparkChain(segment, compiled, start("test"))
    outputs = chain.process(State(), inputs_of(found)).outputs
    doubled = [([*of_epoch, *of_epoch], marks) for of_epoch, marks in found]
    expected, late, untimed = oracle(doubled, keep)
    got = [
        (o.epoch, row["k"], row["d"], row["m"] - 1) for o in outputs for row in o.rows.to_pylist()
    ]
    assert got == [(epoch, k, d, n) for epoch, (k, d, n, _) in expected]
    assert len(got) > 5
    dropped = chain.dropped["once"]
    assert (dropped.late, dropped.null_event_time) == (late, untimed)


@pytest.mark.parametrize("keep", KEEPS)
def test_keys_and_columns_may_have_any_type_that_sql_gives(start: StartSession, keep: str) -> None:
    columns = (
        "CAST(n AS DECIMAL(20, 2)) AS price, CAST(t AS DATE) AS day, CAST(k AS BINARY) AS raw, "
        "n > 4 AS flag, array(n, 1) AS pair, named_struct('a', n, 'b', array('x')) AS s, t"
    )
    typed = f'- {{name: typed, inputs: [rows], sql: "SELECT {columns} FROM rows"}}'
    once = distinct(keep, "[price, day, raw, flag]").replace("[rows]", "[typed]")
    compiled = topology(f"{typed}\n{once}", "once", schema=SCHEMA)
    rows: list[tuple[Any, int]] = [
        ([("a", 0.0, e % 3, e), ("b", 0.0, e % 2, e)], 2) for e in range(40)
    ]
    found = history(rows)
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    outputs = chain.process(State(), inputs_of(found)).outputs
    got = [
        (o.epoch, row["raw"], row["price"], row["pair"], row["s"])
        for o in outputs
        for row in o.rows.to_pylist()
    ]
    by_key = [
        ([(f"{k}{n}", d, n, t) for k, d, n, t in of_epoch], marks) for of_epoch, marks in found
    ]
    expected = oracle(by_key, keep)[0]
    assert got == [
        (epoch, k[0].encode(), n, [n, 1], {"a": n, "b": ["x"]})
        for epoch, (k, _, n, _) in expected
        if k
    ]
    assert len(got) >= 5


@pytest.mark.parametrize("keep", KEEPS)
def test_bits_do_not_depend_on_epochs_in_a_call_nor_on_cores(
    start: StartSession, keep: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    epochs = ended(edge_case_epochs(2, 8, 200, idle=[4]))
    compiled = topology(TWICE.replace("KEEP", keep), "counted")
    segment = compiled.segments[-1]
    assert segment.nodes[-4:] == ("both", "once", "named", "counted")
    found = []
    for master, sizes in (("local[1]", [3, 1, 5]), ("local[4]", [9])):
        sessions.stop_session(start("test"), keep_jvm=True)
        session = start("test", master=master)
        chain = SparkChain(segment, compiled, session)
        outputs, state = run(chain, epochs[:-1], sizes)
        found.append((outputs, state_digests(chain, state)))
    files = RunFiles(tmp_path / "runs", memory_bytes=0)
    monkeypatch.setattr(spill, "MIN_BUFFER_BYTES", 2_000)
    chain = SparkChain(segment, compiled, session, run_files=files)
    outputs, state = run(chain, epochs[:-1], [1])
    found.append((outputs, state_digests(chain, state)))
    assert all(f == found[0] for f in found)
    assert len(set(found[0][0])) > 3


@pytest.mark.parametrize("keep", KEEPS)
def test_a_window_behind_has_all_of_its_rows(start: StartSession, keep: str) -> None:
    epochs = ended(edge_case_epochs(4, 10, 200))
    operators = TWICE.replace("KEEP", keep)
    compiled = topology(operators, "counted")
    chain = SparkChain(compiled.segments[-1], compiled, start("test"))
    result = chain.process(State(), epochs)
    counts = {
        row["window_start"].timestamp() * 1e6: row["c"]
        for output in result.outputs
        for row in output.rows.to_pylist()
    }
    first = topology(operators.rpartition("- {name: counted")[0], "named")
    rows = SparkChain(first.segments[-1], first, start("test")).process(State(), epochs).outputs
    expected: dict[float, int] = {}
    for row in (row for output in rows for row in output.rows.to_pylist()):
        at = row["at"].timestamp() * 1e6 // MINUTE * MINUTE
        expected[at] = expected.get(at, 0) + 1
    assert chain.dropped["counted"].late == 0
    assert counts == expected
    assert all(state.is_empty for state in result.state.operators.values())


DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "topology.md").read_text()
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("start")
def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    sessions = DOCUMENTATION.partition("#### Sessions\n")[2].partition("\n#### ")[0]
    _, _, of_distinct = DOCUMENTATION.partition("### distinct\n")
    manifest, clicks = _BLOCK.findall(sessions)
    operator = _BLOCK.findall(of_distinct)[0]
    assert "keep: First" in operator
    last = operator.replace("visits", "last").replace("First", "Last")
    text = re.sub(r"(?s)  - name: visits\n.*?(?=  queries)", operator + last, manifest)
    text += '  - {name: last, from: last, sink: {files: {url: "file:///output/last"}}}\n'
    (tmp_path / "clicks.csv").write_text(clicks)
    (tmp_path / "visits.yaml").write_text(text)
    arguments = ["run", str(tmp_path / "visits.yaml"), "--input", str(tmp_path)]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0

    def found(query: str) -> list[str]:
        rows = read_sink(f"file://{tmp_path}/out/{query}").to_pylist()
        return sorted(f"{row['at']:%H:%M} {row['user']} {row['page']}" for row in rows)

    assert found("visits") == ["10:00 ann a", "10:25 bob a", "11:00 ann c", "11:40 bob d"]
    assert found("last") == ["10:20 ann b", "10:25 bob a", "11:00 ann c", "11:40 bob d"]
