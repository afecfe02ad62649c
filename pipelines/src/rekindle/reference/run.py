"""`rekindle run`: a topology in one process with one Spark session, as fast as its input allows.

Design: docs/design/architecture.md#reference-execution.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.files_read import find_files
from rekindle.connectors.files_sink import is_of_sink, owner_of
from rekindle.connectors.registry import open_sink, open_source
from rekindle.connectors.sink import Sink
from rekindle.connectors.source import ReplayableSource, SourceSummary
from rekindle.engine.model import Chain, DroppedRows
from rekindle.engine.state.spill import RunFiles
from rekindle.errors import RekindleError
from rekindle.reference.execute import (
    Execution,
    OnRows,
    QuerySinkOpener,
    SourcePartition,
    call_inputs,
    last_epoch_to_run,
)
from rekindle.reference.live import open_recorded
from rekindle.reference.overlap import prefetch, set_on_error, write_behind
from rekindle.reference.rewrite import redirect
from rekindle.streams.epochs import NO_EPOCH
from rekindle.termination import keeping_signal_handlers
from rekindle.topology.compile import compile_topology
from rekindle.topology.model import Segment, Topology
from rekindle.topology.spec import SourceSpec, TopologySpec

EPOCHS_PER_CALL = 64
_STATE_BYTES = 256 << 20
"""Memory for the state of each chain; the rest is in files."""
_LOCAL_MASTER = re.compile(r"local(\[([1-9]\d{0,2}|\*)\])?")

MakeChain = Callable[[Segment], Chain]


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How Spark is started. `log_file`: for the output of its JVM; `archives`: a directory of
    AppCDS archives, one for each version of Spark and Java; the matching one is used."""

    master: str = "local[2]"
    log_file: Path | None = None
    archives: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """`last_epoch`: None if the source is unbounded; `speed_field`: the field that sets the speed,
    and its value; `generated`: event times follow from the spec, not from files; `idle_partitions`:
    number of partitions without rows, 0 if none has rows."""

    name: str
    summary: SourceSummary
    last_epoch: int | None
    speed_field: tuple[str, float] | None
    generated: bool
    idle_partitions: int = 0


@dataclass(frozen=True, slots=True)
class SourcesOpened:
    """The sources are open; `last_epoch` is the last one of the run."""

    sources: tuple[OpenedSource, ...]
    last_epoch: int
    epoch_interval_us: int


@dataclass(frozen=True, slots=True)
class SparkStarting:
    """Spark starts, which takes seconds. `archive`: a matching AppCDS archive halves the time."""

    archive: bool


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Reported after each call: `rows` read from the sources so far, in `seconds`."""

    epoch: int
    last_epoch: int
    rows: int
    seconds: float


RunEvent = SourcesOpened | SparkStarting | RunProgress
OnRunEvent = Callable[[RunEvent], None]


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """`rows`, `epochs_with_rows`, `urls` of the output: by query; `dropped`: by window operator;
    `seconds`: without the start of Spark; `ends_early`: before the end of an input."""

    rows: dict[str, int]
    epochs_with_rows: dict[str, int]
    urls: dict[str, str]
    dropped: dict[str, DroppedRows]
    epochs: int
    seconds: float
    ends_early: bool


def run_reference(
    spec: TopologySpec,
    name: str,
    *,
    output: Path | None,
    overwrite: bool = False,
    input: Path | None = None,
    cuts: str | None = None,
    until_epoch: int | None = None,
    epochs_per_call: int = EPOCHS_PER_CALL,
    spark: SparkOptions = SparkOptions(),
    on_event: OnRunEvent = lambda event: None,
    on_rows: OnRows = lambda query, epoch, rows: None,
    make_chain: MakeChain | None = None,
) -> ReferenceResult:
    """Run to the end of all inputs, or to `until_epoch`.

    `output`, `input`: see `redirect`; without `output` the queries' own sinks are written. Sinks
    with output of an earlier run are refused: files are never replaced, so the result would mix two
    runs; with `overwrite` it is deleted. `on_rows`: see `Execution`. `make_chain`: replaces Spark's
    chains (tests). `cuts`: URL of a topology's objects in a checkpoint store, `<store>/<uid>`; live
    sources have the epochs that are recorded there. Raises InvalidTopology, RekindleError.
    """
    if not _LOCAL_MASTER.fullmatch(spark.master):
        raise RekindleError(
            f"--master {spark.master} is not supported: a run is one process; give local, "
            "local[n] with n up to 999, or local[*], or apply the topology to a cluster"
        )
    topology = compile_topology(
        redirect(spec, input=input, output=output), name, skip_cluster_checks=True
    )
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rekindle-run-")))
        sources = _open_sources(topology, work, cuts, stack)
        last = last_epoch_to_run(sources, until_epoch)
        if overwrite:
            _remove_output(topology, output)
        _require_no_output(topology)  # before Spark starts, which takes seconds
        opened = tuple(
            _describe_source(topology, name, sources)
            for name in dict.fromkeys(n for n, _ in sources)
        )
        on_event(SourcesOpened(opened, last, topology.spec.epoch_interval))
        make = make_chain or stack.enter_context(_spark_chains(topology, spark, work, on_event))
        execution = Execution(topology, make, _query_sink_opener(topology), on_rows)
        started = time.monotonic()
        reported, rows = NO_EPOCH, 0
        failed = threading.Event()
        calls = prefetch(call_inputs(sources, last, epochs_per_call, failed.is_set))
        write_output = partial(execution.write, is_stopping=failed.is_set)
        with contextlib.closing(calls), write_behind(write_output) as write, set_on_error(failed):
            for call in calls:
                write(execution.run_call(call))
                reported, rows = call.epochs[-1], rows + call.rows
                on_event(RunProgress(reported, last, rows, time.monotonic() - started))
        if reported < last:
            on_event(RunProgress(last, last, rows, time.monotonic() - started))
        seconds = time.monotonic() - started
    urls = _output_urls(topology)
    return ReferenceResult(
        rows=execution.rows,
        epochs_with_rows=execution.epochs_with_rows,
        urls=urls,
        dropped=execution.dropped,
        epochs=last + 1,
        seconds=seconds,
        ends_early=any(s.last_epoch is None or last < s.last_epoch for s in sources.values()),
    )


def _open_sources(
    topology: Topology, work: Path, cuts: str | None, stack: contextlib.ExitStack
) -> dict[SourcePartition, ReplayableSource]:
    sources: dict[SourcePartition, ReplayableSource] = {}
    for segment in topology.segments:
        if segment.is_source:
            node = topology.nodes[segment.nodes[0]]
            if not isinstance(node.spec, SourceSpec):
                raise TypeError(f"segment {segment.name} starts with {node.name}, not a source")
            interval = topology.spec.epoch_interval
            if node.spec.kind[1].is_live:
                sources |= open_recorded(node, node.spec, interval, work, cuts, stack)
                continue
            for partition in range(node.partitions):
                # Each row is cut once, and the last cut checks that no file has changed.
                source = open_source(
                    node.spec, node, interval, work, partition=partition, verifies_checksums=False
                )
                stack.callback(source.close)
                sources[node.name, partition] = source
    return sources


def _describe_source(
    topology: Topology, name: str, sources: Mapping[SourcePartition, ReplayableSource]
) -> OpenedSource:
    spec = topology.nodes[name].spec
    if not isinstance(spec, SourceSpec):
        raise TypeError(f"{name} is not a source")
    _, options = spec.kind
    generated = not options.has_raw_columns
    parts = [source for (of, _), source in sources.items() if of == name]
    last_epoch, summaries = parts[0].last_epoch, [part.summary for part in parts]
    rows = [summary.rows for summary in summaries if summary.rows is not None]
    summary = replace(summaries[0], rows=sum(rows) if rows else None)
    idle = rows.count(0) if any(rows) else 0
    return OpenedSource(name, summary, last_epoch, options.speed_field, generated, idle)


def _query_sink_opener(topology: Topology) -> QuerySinkOpener:
    queries = {query.name: query for query in topology.spec.queries}

    def open_query_sink(name: str, partition: int, schema: pa.Schema) -> Sink:
        return open_sink(name, queries[name].sink, partition, _uid(topology.name), schema)

    return open_query_sink


def _output_urls(topology: Topology) -> dict[str, str]:
    """By query: the URL of its sink, if the sink has one."""
    urls = {query.name: query.sink.output_url for query in topology.spec.queries}
    return {name: url for name, url in urls.items() if url is not None}


def _require_no_output(topology: Topology) -> None:
    urls = _output_urls(topology)
    open_query_sink = _query_sink_opener(topology)
    for segment in topology.segments:
        schema = arrow_schema(topology.nodes[segment.name].schema)
        for query, partition in itertools.product(segment.queries, range(segment.partitions)):
            if open_query_sink(query, partition, schema).last_epoch() != NO_EPOCH:
                raise RekindleError(
                    f"query {query}: {urls.get(query, 'its sink')} holds output of an earlier "
                    "run, which is never replaced; choose another --output, or remove it "
                    "(--overwrite)"
                )


def _remove_output(topology: Topology, output: Path | None) -> None:
    """Delete what earlier runs of the topology have written to its queries' directories in
    `output`. Raises RekindleError, and deletes nothing, if anything else is in one of them, or if
    there is no `output`: a query's own sink may be that of a cluster."""
    if output is None:
        raise RekindleError("--overwrite deletes files below --output: give both")
    inputs = {path.resolve() for path in _input_files(topology)}
    directories = [output / query.name for query in topology.spec.queries]
    for directory, query in zip(directories, topology.spec.queries, strict=True):
        if directory.is_symlink():
            raise RekindleError(f"--overwrite: {directory} is a link; give the directory itself")
        files = [path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()]
        foreign = (f for f in files if not is_of_sink(f.relative_to(directory), query.name))
        what = next((f"{path} is not of an earlier run" for path in foreign), None)
        what = what or next(
            (f"{p} is read by a source" for p in files if p.resolve() in inputs), None
        )
        if files and what is None and owner_of(directory) != _uid(topology.name):
            what = f"{directory} is not of an earlier run of {topology.name}"
        if what is not None:
            raise RekindleError(f"--overwrite: {what}; remove it, or choose another --output")
    for directory in directories:
        if directory.exists():
            shutil.rmtree(directory)


def _uid(topology: str) -> str:
    """What the sinks of a run name as their owner."""
    return f"reference-{topology}"


def _input_files(topology: Topology) -> Iterator[Path]:
    """The local files of all sources."""
    for source in topology.spec.sources:
        for given in source.kinds.values():
            url = given.input_url if given is not None else None
            if url is not None and url.startswith(("file://", "local://")):
                yield from (Path(file.path) for file in find_files(url, source.name)[1])


@contextlib.contextmanager
def _spark_chains(
    topology: Topology, spark: SparkOptions, work: Path, on_event: OnRunEvent
) -> Iterator[MakeChain]:
    """Yields a function that makes chains on one Spark session. The session is not started if no
    segment has an operator."""
    from rekindle.engine.passthrough import PassThroughChain

    def pass_through(segment: Segment) -> Chain:
        return PassThroughChain(arrow_schema(topology.nodes[segment.name].schema))

    if all(_has_no_operators(segment) for segment in topology.segments):
        yield pass_through
        return
    from rekindle.engine.spark.archive_cache import cached_archive
    from rekindle.engine.spark.session import jvm_spec, kill_session, start_session, stop_session

    conf = {"spark.log.level": "ERROR", **topology.spec.spark_conf}
    archive = cached_archive(spark.archives, jvm_spec(conf)) if spark.archives else None
    on_event(SparkStarting(archive is not None))
    try:
        with keeping_signal_handlers():  # PySpark's SIGINT handler would wait for a busy JVM
            session = start_session(
                topology.name,
                master=spark.master,
                conf=conf,
                cds_archive=archive,
                data_dir=work,
                log_file=spark.log_file,
            )
        from rekindle.engine.spark.chain import (
            SparkChain,
        )  # needs PySpark; start_session checks that

        files = RunFiles(work / "state", _STATE_BYTES)

        def chain(segment: Segment) -> Chain:
            if _has_no_operators(segment):
                return pass_through(segment)
            return SparkChain(segment, topology, session, run_files=files)

        yield chain
    except BaseException:
        kill_session()
        raise
    stop_session(session)


def _has_no_operators(segment: Segment) -> bool:
    return segment.is_source and len(segment.nodes) == 1
