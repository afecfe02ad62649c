"""`rekindle run`: a topology in one process with one Spark session, as fast as its input allows.

Design: docs/design/architecture.md#reference-execution.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rekindle.connectors.kinds import open_sink, open_source
from rekindle.connectors.sink import Sink
from rekindle.connectors.source import ReplayableSource
from rekindle.engine.model import Chain, DroppedRows
from rekindle.errors import InvalidTopology, RekindleError
from rekindle.reference.execute import Execution, OpenSink, blocks, end_of
from rekindle.reference.rewrite import redirect
from rekindle.streams.epochs import NO_EPOCH
from rekindle.termination import keeping_signal_handlers
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Segment, Topology
from rekindle.topology.spec import SourceSpec, TopologySpec

EPOCHS_PER_JOB = 64
_LOCAL_MASTER = re.compile(r"local(\[([1-9]\d*|\*)\])?")

MakeChain = Callable[[Segment], Chain]


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after each block; `last_epoch` is the last one of the run."""

    epoch: int
    last_epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """`rows`: by query; `urls`: where they are; `dropped`: by window operator; `seconds`: without
    the start of Spark."""

    rows: dict[str, int]
    urls: dict[str, str]
    dropped: dict[str, DroppedRows]
    epochs: int
    seconds: float


def run_reference(
    spec: TopologySpec,
    name: str,
    *,
    output: Path | None,
    input: Path | None = None,
    until_epoch: int | None = None,
    epochs_per_job: int = EPOCHS_PER_JOB,
    master: str = "local[2]",
    report: Callable[[Progress], None] = lambda progress: None,
    make_chain: MakeChain | None = None,
) -> ReferenceResult:
    """Run through the end of all inputs, or through `until_epoch`.

    `output`, `input`: see `redirect`; without `output` the queries' own sinks are written. Sinks
    that hold output are refused: files are never replaced, so an older run would show through.
    `make_chain`: instead of Spark's chains (tests). Raises InvalidTopology, RekindleError.
    """
    if not _LOCAL_MASTER.fullmatch(master):
        raise RekindleError(
            f"--master {master} is not supported: a run is one process; give local, local[n] or "
            "local[*], or apply the topology to a cluster"
        )
    topology = compile_topology(redirect(spec, input=input, output=output), name, local=True)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rekindle-run-")))
        sources = _open_sources(topology, work, stack)
        last = end_of(sources, until_epoch)
        _require_no_output(topology)  # before Spark starts, which takes seconds
        make = make_chain or stack.enter_context(_spark_chains(topology, master, work))
        execution = Execution(topology, make, _sinks(topology))
        started = time.monotonic()
        reported = NO_EPOCH
        for block in blocks(sources, last, epochs_per_job):
            execution.run_block(block)
            reported = block.epochs[-1]
            report(Progress(reported, last, time.monotonic() - started))
        if reported < last:
            report(Progress(last, last, time.monotonic() - started))
        seconds = time.monotonic() - started
    urls = {q.name: q.sink.files.url for q in topology.spec.queries if q.sink.files is not None}
    return ReferenceResult(execution.rows, urls, execution.dropped, last + 1, seconds)


def _open_sources(
    topology: Topology, work: Path, stack: contextlib.ExitStack
) -> dict[str, ReplayableSource]:
    sources = {}
    for segment in topology.segments:
        if segment.is_source:
            node = topology.nodes[segment.nodes[0]]
            if not isinstance(node.spec, SourceSpec):
                raise TypeError(f"segment {segment.name} starts with {node.name}, not a source")
            source = open_source(node.spec, node, topology.spec.epoch_interval, work)
            stack.callback(source.close)
            sources[node.name] = source
    return sources


def _sinks(topology: Topology) -> OpenSink:
    queries = {query.name: query for query in topology.spec.queries}

    def opened(name: str, partition: int, schema: pa.Schema) -> Sink:
        return open_sink(name, queries[name].sink, partition, f"reference-{topology.name}", schema)

    return opened


def _require_no_output(topology: Topology) -> None:
    urls = {q.name: q.sink.files.url for q in topology.spec.queries if q.sink.files is not None}
    opened = _sinks(topology)
    for segment in topology.segments:
        schema = topology.nodes[segment.name].schema
        for query, partition in itertools.product(segment.queries, range(segment.partitions)):
            if opened(query, partition, schema).last_epoch() != NO_EPOCH:
                raise RekindleError(
                    f"query {query}: {urls.get(query, 'its sink')} holds output of an earlier "
                    "run, which is never replaced; choose another --output, or remove it"
                )


@contextlib.contextmanager
def _spark_chains(topology: Topology, master: str, work: Path) -> Iterator[MakeChain]:
    """Chains on one Spark session; none is started if no segment has an operator."""
    from rekindle.engine.passthrough import PassThroughChain

    def pass_through(segment: Segment) -> Chain:
        return PassThroughChain(topology.nodes[segment.name].schema)

    if all(_is_bare_source(segment) for segment in topology.segments):
        yield pass_through
        return
    from rekindle.engine.spark.session import kill_session, start_session, stop_session

    conf = {"spark.log.level": "ERROR", **topology.spec.spark_conf}
    try:
        with keeping_signal_handlers():  # PySpark's would ask a busy JVM first
            session = start_session(topology.name, master=master, conf=conf, data_dir=work)
        from rekindle.engine.spark.chain import SparkChain  # needs PySpark: the session says so

        yield lambda s: pass_through(s) if _is_bare_source(s) else SparkChain(s, topology, session)
    except BaseException:
        kill_session()
        raise
    stop_session(session)


def _is_bare_source(segment: Segment) -> bool:
    return segment.is_source and len(segment.nodes) == 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `rekindle run`."""
    parser.add_argument("topology", type=Path, help="the manifest of a StreamTopology")
    parser.add_argument(
        "--input",
        type=Path,
        help="read files sources from this directory, by their names and, where these are the "
        "same, those of the folders above",
    )
    parser.add_argument(
        "--output", type=Path, help="write each query's files to DIR/<query>, not to its sink"
    )
    parser.add_argument(
        "--until-epoch", type=_number_from(0), metavar="N", help="stop after this epoch, from 0 on"
    )
    parser.add_argument(
        "--epochs-per-job",
        type=_number_from(1),
        default=EPOCHS_PER_JOB,
        metavar="N",
        help="at most so many in one job",
    )
    parser.add_argument("--master", default="local[2]", help="Spark's master: local[n] or local[*]")


def _number_from(least: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number from {least} on")
        return number

    return parsed


def run_command(args: argparse.Namespace) -> int:
    """`rekindle run`: 0, or 1 with the reason on stderr."""
    try:
        name, spec = load_topology(args.topology.read_bytes())
        result = run_reference(
            spec,
            name,
            output=args.output,
            input=getattr(args, "input", None),
            until_epoch=args.until_epoch,
            epochs_per_job=args.epochs_per_job,
            master=args.master,
            report=_print_progress(),
        )
    except InvalidTopology as e:
        print(f"{args.topology}: {len(e.problems)} problems", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in e.problems), file=sys.stderr)
        return 1
    except (RekindleError, OSError) as e:
        print(f"rekindle run: {e}", file=sys.stderr)
        return 1
    _print_summary(name, result)
    return 0


def _print_progress() -> Callable[[Progress], None]:
    """A line at most every second, and the last."""
    printed = -1.0

    def report(progress: Progress) -> None:
        nonlocal printed
        if progress.seconds - printed < 1 and progress.epoch != progress.last_epoch:
            return
        printed = progress.seconds
        print(
            f"epoch {progress.epoch} of {progress.last_epoch} after {progress.seconds:.1f} s",
            flush=True,
        )

    return report


def _print_summary(name: str, result: ReferenceResult) -> None:
    print(f"{name}: {result.epochs} epochs in {result.seconds:.1f} s")
    width = max(map(len, result.rows), default=0)
    for query, rows in result.rows.items():
        print(f"  {query:<{width}}  {rows:>9,} rows  {result.urls.get(query, '')}")
    for operator, dropped in result.dropped.items():
        if dropped.late or dropped.untimed:
            print(
                f"  operator {operator} dropped {dropped.late:,} rows too late, "
                f"{dropped.untimed:,} without event time"
            )
