"""Check: a finite maxDelay costs no throughput without failures.

One task of real parts in this process: readers over HTTP from three output logs on disk, union and
window in Spark, output log. With a finite maxDelay it has a live
output, as in a task that is Live. All input is in the logs when the clock starts, so the task takes
epochs as fast as it can, up to the loop's limit for a call.

Rounds come in pairs, a finite and an infinite one, in alternating order, after rounds that warm the
JVM up. The result is the median of the ratios of pairs, since both rounds of a pair meet the same
load of the machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from engine_parts import task_config

from dpc.topologies import GROUPS, SOURCES, Setting, resource
from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.memory import plan_memory
from rekindle.engine.model import Chain, State
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session
from rekindle.protocol import Endpoint, TaskRef, Upstream
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_EPOCH, NO_WATERMARK, EpochBatch
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.task.core.messages import TaskSettings
from rekindle.task.engine_calls import EngineParts
from rekindle.task.state import TaskState
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Segment, Topology
from rekindle_testing.fixtures.local_task import LocalParts, LocalTask

PAIRS = 15
WARM_UP_PAIRS = 2
EPOCHS = 400
ROWS = 750
"""Of each source in an epoch."""
RATIO_TARGET = 0.97
"""The least throughput with a finite maxDelay, as a fraction of that with an infinite one."""
EPOCH_US = 500_000
_LOCALHOST = "127.0.0.1"
_ROUND_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """Rows of all sources a second, medians of all rounds; `ratio`: the median over the pairs of
    finite divided by infinite, `low` and `high`: its quartiles."""

    finite: int
    infinite: int
    ratio: float
    low: float
    high: float
    pairs: int
    met: bool


def measure_throughput(pairs: int = PAIRS, epochs: int = EPOCHS) -> ThroughputRow:
    # Its sources do not run, whatever `input_s` says.
    name, spec = load_topology(resource(Setting("throughput", input_s=1.0)))
    topology = compile_topology(spec, name)
    segment = next(s for s in topology.segments if s.inputs)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        directory = Path(place)
        session = start_session("bench", data_dir=directory)
        stack.callback(stop_session, session)
        session.sparkContext.setLogLevel("ERROR")
        chain = SparkChain(segment, topology, session)
        bench = _Bench(topology, segment, chain, directory, epochs)
        upstreams = stack.enter_context(bench.serve())
        times: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(WARM_UP_PAIRS + pairs):
            for finite in (True, False) if pair % 2 else (False, True):
                seconds = bench.round(finite, upstreams, f"{pair}-{finite}")
                if pair >= WARM_UP_PAIRS:
                    times[finite].append(seconds)
    return _result(times[True], times[False], epochs * ROWS * len(SOURCES))


def _result(finite_s: list[float], infinite_s: list[float], rows: int) -> ThroughputRow:
    ratios = [b / a for a, b in zip(finite_s, infinite_s, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return ThroughputRow(
        round(rows / statistics.median(finite_s)),
        round(rows / statistics.median(infinite_s)),
        round(ratio, 3),
        round(low, 3),
        round(high, 3),
        len(ratios),
        ratio >= RATIO_TARGET,
    )


class _Bench:
    """`round` runs the task from its first epoch to its last."""

    def __init__(
        self, topology: Topology, segment: Segment, chain: Chain, directory: Path, epochs: int
    ) -> None:
        self._segment = segment
        self._chain = chain
        self._directory = directory
        self._epochs = epochs
        self._memory = plan_memory()
        ref = TaskRef(segment=segment.id, partition=0, replica=0, incarnation=1)
        of_source = task_config(topology, directory, self._memory)
        self._config = replace(of_source, segment=segment, ref=ref)

    @contextmanager
    def serve(self) -> Iterator[list[Upstream]]:
        """The upstream logs, complete, on a server of their own."""
        server = StreamServer(_LOCALHOST, 0)
        try:
            for number, input in enumerate(self._segment.inputs):
                server.serve_log(self._write(input.stream, number), lambda: self._epochs - 1)
            endpoint = Endpoint(address=f"{_LOCALHOST}:{server.port}", replica=0, incarnation=1)
            yield [
                Upstream(stream=input.stream, partition=0, endpoints=(endpoint,))
                for input in self._segment.inputs
            ]
        finally:
            server.stop()

    def _write(self, stream: str, seed: int) -> OutputLog:
        rng = np.random.default_rng(seed)
        log = OutputLog(self._directory / stream, stream, 0, _rows(0, rng).schema)
        log.start_at(0)
        for epoch in range(self._epochs):
            rows = _rows(epoch, rng)
            digest = digest_table(rows)
            log.append(EpochBatch(stream, 0, epoch, epoch * EPOCH_US, rows, digest))
        return log

    def round(self, finite: bool, upstreams: list[Upstream], name: str) -> float:
        """Seconds for all epochs. Raises RuntimeError, TimeoutError: the machine is too busy."""
        directory = self._directory / name
        log = OutputLog(directory / "log", self._segment.stream, 0, self._chain.output_schema)
        log.start_at(0)
        output = LiveOutput(log, directory / "tentative", name)
        settings = TaskSettings(
            self._config.ref,
            name,
            checkpoint_interval_epochs=10,
            epoch_interval_us=EPOCH_US,
            memory=self._memory,
            consistency=self._consistency(finite),
            input_names=[input.name for input in self._segment.inputs],
        )
        engine = EngineParts(self._chain, log, output=output if finite else None)
        task = LocalTask(
            settings,
            TaskState(NO_EPOCH, NO_WATERMARK, State()),
            LocalParts(engine, self._segment),
        )
        task.allow_tentative()
        began = time.perf_counter()
        task.poll(upstreams=tuple(upstreams))
        while log.last < self._epochs - 1:
            if time.perf_counter() - began > _ROUND_TIMEOUT_S:
                raise TimeoutError(f"round {name} is at epoch {log.last} of {self._epochs}")
            task.run_next(timeout_s=0.05)
        seconds = time.perf_counter() - began
        task.stop()
        if max(output.report.newest_tentative, output.report.corrected_through) != NO_EPOCH:
            raise RuntimeError(f"round {name} was tentative: the machine is too busy to compare")
        log.close()
        return seconds

    def _consistency(self, finite: bool) -> ConsistencySettings:
        settings = self._config.consistency(first_attempt=1)
        if finite:
            return settings
        read_ahead_bytes = self._memory.read_ahead_bytes
        return replace(settings, max_delay_s=None, read_ahead_bytes=read_ahead_bytes)


def _rows(epoch: int, rng: np.random.Generator) -> pa.Table:
    times = epoch * EPOCH_US + np.arange(ROWS) * (EPOCH_US // ROWS)
    return pa.table(
        {
            "k": rng.integers(1, GROUPS + 1, ROWS),
            "v": rng.uniform(0, 100, ROWS),
            "t": pa.array(times).cast(pa.timestamp("us", "UTC")),
        }
    )
