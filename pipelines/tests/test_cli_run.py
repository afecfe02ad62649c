"""`rekindle run`: its first line, its progress, its table, and where Spark's log goes."""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from rekindle.cli import main
from rekindle.cli import run as run_module
from rekindle.cli.formatting import readable_bytes, readable_duration
from rekindle.cli.run_display import Bars, FirstRows, Lines, print_result, time_left_s
from rekindle.connectors.source import SourceSummary
from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.model import DroppedRows
from rekindle.engine.spark import archive_cache
from rekindle.engine.spark import session as sessions
from rekindle.errors import RekindleError
from rekindle.reference import (
    EPOCHS_PER_CALL,
    OpenedSource,
    ReferenceResult,
    RunProgress,
    SourcesOpened,
    SparkStarting,
)

LOG = Path("/state/run.log")
MANIFEST = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: counted}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: a
    schema: "k BIGINT"
    generator: {rowsPerSecond: 10, rows: 40, columns: {k: sequence}}
  operators:
  - {name: o, inputs: [a], sql: "SELECT k FROM a WHERE k >= 20"}
  queries:
  - {name: q, from: o, sink: {files: {url: "file:///unused"}}}
"""


def micros(time: str) -> int:
    return int(datetime.fromisoformat(f"{time}+00:00").timestamp()) * 1_000_000


def files_source(
    first: str | None = "2013-01-01", last: str | None = "2013-12-31", last_epoch: int = 7
) -> OpenedSource:
    """A source of files with 10,000 rows, of these event times."""
    summary = SourceSummary(10_000, *(None if t is None else micros(t) for t in (first, last)))
    return OpenedSource("a", summary, last_epoch, ("speedup", 60.0), generated=False)


def lines(*events: SourcesOpened | SparkStarting | RunProgress) -> list[str]:
    stream = io.StringIO()
    display = Lines(stream, "t", LOG)
    for event in events:
        display.report(event)
    return stream.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_every_five_seconds() -> None:
    events = [RunProgress(n, last_epoch=99, rows=10 * n, seconds=n / 2) for n in range(100)]
    printed = lines(*events)
    assert len(printed) == 11
    assert printed[1] == "t: epoch 10 of 99, 100 rows read in 5.0 s, about 40 s left"
    assert printed[-1] == "t: epoch 99 of 99, 990 rows read in 50 s"


def test_the_start_names_the_log() -> None:
    assert lines(SparkStarting(archive=True)) == ["t: starting Spark, log in /state/run.log"]


def test_the_start_has_rows_and_event_times_of_each_source() -> None:
    timeless = replace(files_source(None, None), name="b")
    start = micros("1970-01-01")
    endless = OpenedSource(
        "c",
        SourceSummary(None, start, None),
        last_epoch=None,
        speed_field=("rowsPerSecond", 5.0),
        generated=True,
    )
    sources = (files_source(), timeless, endless)
    assert lines(SourcesOpened(sources, last_epoch=7, epoch_interval_us=500_000)) == [
        "t: source a: 10,000 rows, event time from 2013-01-01T00:00:00 to 2013-12-31T00:00:00",
        "t: source b: 10,000 rows, no event time",
        "t: source c: unbounded, event time from 1970-01-01T00:00:00 on",
        "t: epochs 0 to 7, which take 4.0 s in a cluster",
    ]


UNIT = (
    "check the unit in eventTime.expression: timestamp_seconds, timestamp_millis, timestamp_micros"
)


@pytest.mark.parametrize(
    ("first", "last", "warning"),
    [
        ("1970-01-16", "1970-01-17", f"all event times are before 1980; {UNIT}"),
        ("1970-01-16", "1980-01-01", None),
        ("2013-01-01", "2099-12-31", None),
        ("2013-01-01", "2100-01-01", f"it has event times after 2099; {UNIT}"),
        (None, None, None),
    ],
)
def test_implausible_event_times_get_a_warning(
    first: str | None, last: str | None, warning: str | None
) -> None:
    _, _, *warnings = lines(SourcesOpened((files_source(first, last),), 8, 1_000_000))
    assert warnings == ([] if warning is None else [f"t: warning: source a: {warning}"])


def test_generated_event_times_get_no_warning() -> None:
    generated = replace(files_source("1970-01-01", "1970-01-02"), generated=True)
    assert len(lines(SourcesOpened((generated,), 8, 1_000_000))) == 2


def test_partitions_without_rows_get_a_warning() -> None:
    source = replace(files_source(), idle_partitions=2)
    *_, warning = lines(SourcesOpened((source,), 8, 1_000_000))
    assert warning == (
        "t: warning: source a: 2 partitions have no rows: the input has too few files or row "
        "groups; lower partitions"
    )


def test_a_run_of_very_many_epochs_names_the_field_to_raise() -> None:
    slow = replace(files_source(last_epoch=31_514_400), speed_field=("speedup", 1.0))
    _, epochs, warning = lines(SourcesOpened((files_source(), slow), 31_514_401, 1_000_000))[1:]
    assert epochs == "t: epochs 0 to 31,514,401, which take 364 d 18 h in a cluster"
    assert warning == (
        "t: warning: source a: speedup 1 makes 31,514,401 epochs, which take 364 d 18 h in a "
        "cluster; raise speedup"
    )
    assert len(lines(SourcesOpened((slow,), 100, 1_000_000))) == 2


def test_without_an_archive_the_warm_up_is_named() -> None:
    (printed,) = lines(SparkStarting(archive=False))
    assert printed.endswith("; run `rekindle warm-up` once to make this faster")


def test_on_a_terminal_there_is_a_bar_with_the_time_left() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, highlight=False)
    with Bars(console, "t", LOG) as bars:
        bars.report(SourcesOpened((files_source(),), 99, 1_000_000))
        for n in range(50):
            bars.report(RunProgress(n, last_epoch=99, rows=1000 * n, seconds=n / 10))
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "t: source a: 10,000 rows, event time from 2013-01-01T00:00:00 to " in printed
    assert "t: epochs 0 to 99, which take 1 min 40 s in a cluster" in printed
    assert re.search(r"epoch +50/100 49,000 rows 0:00:\d\d about 4.9 s left", printed)


def test_the_time_left_is_estimated_from_the_epochs() -> None:
    assert time_left_s(RunProgress(24, last_epoch=99, rows=0, seconds=10.0)) == 30.0
    assert time_left_s(RunProgress(99, last_epoch=99, rows=0, seconds=10.0)) == 0.0
    assert time_left_s(RunProgress(-1, last_epoch=99, rows=0, seconds=0.0)) is None


def test_the_table_is_as_wide_as_its_urls_where_there_is_no_terminal() -> None:
    url = "file:///[/a]/[b]/:100:/" + "long/" * 60
    result = ReferenceResult(
        rows={"alarms": 12_345, "q": 0},
        epochs_with_rows={"alarms": 7, "q": 0},
        urls={"alarms": url},
        dropped={"w": DroppedRows(late=3, null_event_time=0), "x": DroppedRows()},
        epochs=10,
        seconds=1.5,
        ends_early=True,
    )
    stream = io.StringIO()
    print_result(stream, "t", result)
    title, heading, first, second, cut, dropped = stream.getvalue().splitlines()
    assert title.rstrip() == "t: 10 epochs in 1.5 s"
    assert heading.split() == ["query", "rows", "epochs", "with", "rows", "output"]
    assert first.split() == ["alarms", "12,345", "7", url]
    assert second.split() == ["q", "0", "0", *["not", "stored:", "give", "--output"]]
    assert cut.startswith("the run ended with epoch 9, before the end of the input: windows")
    assert dropped == "operator w dropped 3 late rows, and 0 without event time"


def test_the_first_rows_of_a_query_are_printed_with_their_epochs() -> None:
    shown = FirstRows("q", 3)
    for epoch, numbers in ((0, [1, 2]), (2, [3, 4])):
        shown.take("q", epoch, pa.table({"n": numbers}))
        shown.take("other", epoch, pa.table({"x": numbers}))
    stream = io.StringIO()
    shown.print(stream, 4)
    assert stream.getvalue().splitlines() == [
        "",
        "q: the first 3 of 4 rows, by epoch",
        '       0  {"n":1}',
        '       0  {"n":2}',
        '       2  {"n":3}',
    ]
    with pytest.raises(RekindleError, match="no query q; the topology has a, b"):
        shown.check({"b", "a"})


@pytest.mark.parametrize("values", [["q", "x"], ["q", "1", "2"], ["q", "1.5"]])
def test_show_takes_a_query_and_a_number(
    values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as usage:
        main(["run", "t.yaml", "--show", *values])
    assert usage.value.code == 2
    assert "--show" in capsys.readouterr().err


@pytest.mark.process
def test_the_first_line_comes_before_what_takes_time(tmp_path: Path) -> None:
    code = (
        "import sys, rekindle.cli\n"
        "class Out:\n"
        "    def write(self, text):\n"
        "        heavy = [m for m in ('pyarrow', 'pydantic', 'rich') if m in sys.modules]\n"
        "        sys.stdout.write(f'{heavy} {text!r}\\n'); sys.stdout.flush(); raise SystemExit\n"
        "    def flush(self): pass\n"
        "sys.stderr = Out()\n"
        "rekindle.cli.main(['run', 'topology.yaml'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "[] 'rekindle run: topology.yaml'"


def test_a_call_has_as_many_epochs_as_the_reference_has() -> None:
    parser = argparse.ArgumentParser()
    run_module.add_arguments(parser)
    assert parser.parse_args(["t.yaml"]).epochs_per_job == EPOCHS_PER_CALL


def test_only_the_newest_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "rekindle"
    directory.mkdir()
    for n in range(25):
        old = directory / f"run-t-{n:02}.log"
        old.touch()
        os.utime(old, (n, n))
    new = run_module._new_log("t")
    assert new.parent == directory
    assert sorted(p.name for p in directory.iterdir()) == [
        f"run-t-{n:02}.log" for n in range(5, 25)
    ]


def test_spark_starts_from_the_archive_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: dict[str, object] = {}

    def start(name: str, **options: object) -> None:
        started.update(options)
        raise EngineUnavailable("the JVM died")

    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(sessions, "jvm_spec", lambda conf: conf)
    monkeypatch.setattr(sessions, "start_session", start)
    monkeypatch.setattr(archive_cache, "cached_archive", lambda found, spec: found / "s.jsa")
    file, log = tmp_path / "t.yaml", tmp_path / "spark.log"
    file.write_text(MANIFEST)
    log.touch()
    options = ["--output", str(tmp_path / "out"), "--spark-log", str(log)]
    assert main(["run", str(file), *options]) == 1
    assert started["cds_archive"] == tmp_path / "appcds/s.jsa"
    assert started["log_file"] == log
    printed = capsys.readouterr().err.splitlines()
    assert printed[-2:] == [f"Spark's log: {log}", "rekindle run: the JVM died"]


def test_the_warm_up_says_where_the_archive_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(archive_cache, "ensure_archive", lambda directory: directory / "s.jsa")
    assert main(["warm-up"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/appcds/s.jsa\n"


def test_sizes_and_durations_are_short() -> None:
    assert [readable_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
    ]
    assert [readable_duration(s) for s in (0.04, 9.96, 59.6, 200, 7500, 100_000)] == [
        "0.0 s",
        "10 s",
        "1 min 0 s",
        "3 min 20 s",
        "2 h 5 min",
        "1 d 3 h",
    ]


@pytest.mark.spark
@pytest.mark.usefixtures("cds_archive")
def test_the_table_is_on_stdout_and_sparks_output_in_the_log(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(MANIFEST)
    log = tmp_path / "spark.log"
    command = [sys.executable, "-m", "rekindle.cli", "run", str(file)]
    options = ["--output", str(tmp_path / "out"), "--spark-log", str(log)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, _, line = done.stdout.splitlines()
    assert line.split() == ["q", "20", "2", f"file://{tmp_path}/out/q"]
    printed = done.stderr.splitlines()
    assert printed[0] == f"rekindle run: {file}"
    assert all(line.startswith("counted: ") for line in printed[1:]), done.stderr
    assert f"log in {log}" in done.stderr
    assert "log4j" in log.read_text()
