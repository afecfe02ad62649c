"""Wide rows and full heaps on Spark itself."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from engine_fixtures import operator_without_spark, topology
from spark_parts import StartSession

from rekindle.engine.failure import DiskFull, EngineUnavailable, OutOfMemory
from rekindle.engine.model import State
from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.steps import is_divisible, plan_steps
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_WATERMARK, EpochInput

pytest.importorskip("pyspark")

WIDE = "n INT, s STRING, t TIMESTAMP"
FILTERED = "SELECT n, s, upper(substr(s, 1, 3)) AS u, t FROM rows WHERE n % 3 <> 0"


def wide_epochs(count: int, rows: int, width: int) -> list[EpochInput]:
    table = pa.table(
        {
            "n": pa.array(range(rows), pa.int32()),
            "s": [f"{n:06d}" + "x" * width for n in range(rows)],
            "t": pa.array([0] * rows, pa.timestamp("us", "UTC")),
        }
    )
    return [EpochInput(e, NO_WATERMARK, NO_WATERMARK, (table,)) for e in range(count)]


def chain_of(sql: str, session: Any, **options: Any) -> SparkChain:
    compiled = topology(f'- {{name: a, inputs: [rows], sql: "{sql}"}}', "a", schema=WIDE)
    return SparkChain(compiled.segments[-1], compiled, session, **options)


@pytest.mark.parametrize(
    ("sql", "divisible"),
    [
        (FILTERED, True),
        ("SELECT n, s, t FROM rows UNION ALL SELECT n, s, t FROM rows", False),
    ],
)
def test_only_a_plain_select_is_run_in_parts(sql: str, divisible: bool) -> None:
    compiled = topology(f'- {{name: a, inputs: [rows], sql: "{sql}"}}', "a", schema=WIDE)
    (step,) = plan_steps(compiled.segments[-1], compiled, operator_without_spark(compiled))
    assert is_divisible(step, ["rows"]) is divisible


def test_an_aggregation_is_never_run_in_parts() -> None:
    window = "- {name: w, inputs: [rows], window: {size: 1m, aggregate: 'count(*) AS n'}}"
    compiled = topology(window, "w", schema=WIDE)
    first, last = plan_steps(compiled.segments[-1], compiled, operator_without_spark(compiled))
    assert [is_divisible(step, ["rows"]) for step in (first, last)] == [False, True]


@pytest.fixture(scope="module")
def session(start_shared: StartSession) -> Iterator[Any]:
    made = start_shared("test")
    yield made
    sessions.stop_session(made, keep_jvm=True)


@pytest.mark.spark
def test_jobs_of_some_rows_each_give_the_same_result(session: Any) -> None:
    epochs = wide_epochs(3, 1000, 100)
    whole = chain_of(FILTERED, session).process(State(), epochs)
    parts_chain = chain_of(FILTERED, session, spark_job_input_bytes=20_000)
    parts = parts_chain.process(State(), epochs)
    assert parts_chain.jobs > 10
    assert [digest_table(o.rows) for o in parts.outputs] == [
        digest_table(o.rows) for o in whole.outputs
    ]


@pytest.mark.spark
def test_a_too_large_result_is_an_error(session: Any) -> None:
    chain = chain_of(FILTERED, session, spark_job_input_bytes=20_000, result_bytes=30_000)
    with pytest.raises(OutOfMemory, match="operator a, epochs 0 to 2: the result has more than"):
        chain.process(State(), wide_epochs(3, 1000, 100))
    assert 0 < chain.jobs < 5


@pytest.mark.spark
def test_wide_epochs_fit_into_the_default_heap(session: Any) -> None:
    chain = chain_of(FILTERED, session)
    result = chain.process(State(), wide_epochs(20, 3000, 2048))
    assert [o.rows.num_rows for o in result.outputs] == [2000] * 20


@pytest.mark.spark
def test_a_full_disk_is_no_failure_of_the_operator(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(FILTERED, session)
    epochs = wide_epochs(1, 10, 10)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", full)
        with pytest.raises(DiskFull, match="operator a, epochs 0 to 0: no space left"):
            chain.process(State(), epochs)
    assert chain.process(State(), epochs).outputs[0].rows.num_rows == 6


@pytest.mark.spark
def test_a_result_too_large_for_one_job_fits_into_several(session: Any) -> None:
    large = "SELECT n, repeat(s, 10000) AS s, t FROM rows"
    result = chain_of(large, session, spark_job_input_bytes=1_000).process(
        State(), wide_epochs(1, 1000, 10)
    )
    assert result.outputs[0].rows.nbytes > 150_000_000


@pytest.mark.spark
def test_a_jvm_without_memory_is_reported(session: Any) -> None:
    """The last test: it ends the JVM."""
    sql = "SELECT n, size(sequence(1, n + 200000000)) AS s, t FROM rows"
    epochs = wide_epochs(1, 1000, 10)
    chain = chain_of(sql, session)
    with pytest.raises(EngineUnavailable, match=r"memory.*512m.*operator a, epochs 0 to 0") as lost:
        chain.process(State(), epochs)
    assert lost.value.out_of_memory
