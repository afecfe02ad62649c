"""The measured scenario: a topology on the cluster, readers of its tasks, one input that is cut.

What is measured, and how: `StreamListener`s in this process read the output of tasks as a
downstream task would, stable and tentative epochs; `stream_delays` says what delays are. Epochs are
released by the clock of this machine, counted from the creation of the topology, so delays need no
calibration. They include the time until the whole response that has the epoch is read, but not the
time that a row waits until its epoch is released, at most one epoch interval. One process, one
machine, one clock.

An input is cut by dropping the packets of its streams (`stream_cut`): its task runs on, and keeps
what it produces, as in section 5 of the paper.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from dpc.topologies import CUT_SOURCE, QUERY, Setting, nodes, resource
from rekindle import names
from rekindle.identity import Identity
from rekindle.protocol import STREAM_PORT
from rekindle.streams.epochs import BatchKind
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle_testing.harness.cluster import NAMESPACE, EmbeddedCluster
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.nodes import NodeResources
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.harness.stream_cut import cut_streams
from rekindle_testing.harness.stream_delays import (
    Arrival,
    EpochClock,
    ReaderOutage,
    delays_s,
    outage,
)
from rekindle_testing.harness.stream_listener import StreamListener
from rekindle_testing.waiting import wait_for

NODES = 3
NODE = NodeResources(cpu="3", memory="8Gi")
QUIET_S = 5.0
"""Time without a failure before each cut, in which the usual delays are measured."""
START_INPUT_S = 180.0
"""Sources have rows for the time until a topology is Live and has a checkpoint."""
STABILIZE_S = 90.0
STEADY_S = 120.0
_STEADY_EPOCHS = 10
_SLOW_S = 0.5
"""A measurement begins once delays are at most two epoch intervals and this."""
_START_TIMEOUT_S = 240.0  # until it is Live, and then until it has a checkpoint


@contextmanager
def bench_cluster() -> Iterator[EmbeddedCluster]:
    """One cluster for all topologies, one after another."""
    with (
        temporary_run_directory("bench-dpc") as directory,
        EmbeddedCluster(directory, nodes=NODES, resources=NODE, on_progress=print) as cluster,
    ):
        cluster.create_claim("rekindle")
        cluster.install()
        yield cluster


@dataclass(frozen=True, slots=True)
class Measured:
    """A cut, as the reader of one task saw it. `delay_before_s`: the largest delay just before
    it."""

    node: str
    delay_before_s: float
    outage: ReaderOutage


class Deployed:
    """A topology that is Live, with a listener for each task after the sources."""

    def __init__(self, cluster: EmbeddedCluster, setting: Setting) -> None:
        self.setting = setting
        self.run = TopologyRun(cluster, resource(setting))
        self._cluster = cluster
        self._context = ExitStack()
        self._listeners: dict[str, StreamListener] = {}
        self.clock = EpochClock(0.0, setting.epoch_s)

    def __enter__(self) -> Self:
        with ExitStack() as context:
            context.enter_context(self.run)
            self.run.wait_live(_START_TIMEOUT_S)
            self.run.wait_checkpoint(timeout_s=_START_TIMEOUT_S)
            self._listen(context)
            self._wait_steady()
            self._context = context.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)  # type: ignore[arg-type]

    def _listen(self, context: ExitStack) -> None:
        setting, name = self.setting, self.setting.name
        metadata = self._cluster.topology(name)["metadata"]
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        self.clock = EpochClock(created.timestamp(), setting.epoch_s)
        token = self._token(metadata["uid"])
        compiled = compile_topology(load_topology(self.run.resource)[1], name)
        streams = {segment.name: segment.stream for segment in compiled.segments}
        from_epoch = self.run.observer.stable_epochs()[QUERY]
        for node in nodes(setting):
            (pod,) = self.run.task_pods(node)
            listener = StreamListener(
                f"{pod.status.pod_ip}:{STREAM_PORT}",
                streams[node],
                Identity(metadata["uid"], token),
                from_epoch,
            )
            self._listeners[node] = context.enter_context(listener)

    def _token(self, uid: str) -> str:
        secret = names.token_secret_name(self.setting.name, uid)
        data = self._cluster.core_api.read_namespaced_secret(secret, NAMESPACE).data
        assert data is not None, "the operator gives each topology a token"
        return base64.b64decode(data["token"]).decode()

    def _wait_steady(self) -> None:
        what = f"{self.setting.name}: epochs without delay (is the machine busy?)"
        wait_for(what, self._is_steady, STEADY_S, every_s=0.25)

    def _is_steady(self) -> bool:
        """Every task's newest epochs are stable, and came in time."""
        return all(
            len(newest := listener.arrivals[-_STEADY_EPOCHS:]) == _STEADY_EPOCHS
            and all(self._is_in_time(a) for a in newest)
            for listener in self._listeners.values()
        )

    def _is_in_time(self, arrival: Arrival) -> bool:
        delay_s = self.clock.delay_s(arrival)
        return arrival.kind is BatchKind.STABLE and delay_s <= 2 * self.setting.epoch_s + _SLOW_S

    # -- measuring -------------------------------------------------------------------------------

    def delays_s(self, seconds: float) -> dict[str, list[float]]:
        """By task: the delays of the epochs of the next `seconds`."""
        since_s = time.time()
        time.sleep(seconds)
        return {
            node: delays_s(listener.arrivals, self.clock, since_s, time.time())
            for node, listener in self._listeners.items()
        }

    def cut(self, seconds: float) -> list[Measured]:
        """Cut one input for some seconds, and wait until the output of all tasks is stable and
        current again."""
        self._wait_steady()
        usual = {node: max(found) for node, found in self.delays_s(QUIET_S).items()}
        (pod,) = self.run.task_pods(CUT_SOURCE)
        cut_at_s = time.time()
        with cut_streams(pod.status.pod_ip):
            time.sleep(seconds)
        healed_at_s = time.time()

        def outages() -> list[Measured] | None:
            found = []
            for node, listener in self._listeners.items():
                current_s = usual[node] + self.setting.epoch_s
                seen = outage(listener.arrivals, self.clock, cut_at_s, healed_at_s, current_s)
                if seen is None:
                    return None
                found.append(Measured(node, usual[node], seen))
            return found

        what = f"{self.setting.name}: stable and current after {seconds:g} s"
        return wait_for(what, outages, seconds + STABILIZE_S, every_s=0.1)

    def verify(self, reference: Reference) -> int:
        """Compare the sink with the reference, row by row; the number of rows. Raises
        AssertionError."""
        last = reference.last_epoch
        newest = self.run.observer.stable_epochs()[QUERY]
        assert newest < last, f"the input ended at epoch {last}: allow more input_s"
        return self.run.verify(reference)


def input_s(cuts_s: Sequence[float]) -> float:
    """How long sources need rows for these cuts: several times what they take on a free machine."""
    return START_INPUT_S + sum(2 * cut + QUIET_S + 15 for cut in cuts_s)


def make_reference(cluster: EmbeddedCluster, setting: Setting) -> Reference:
    """An executed reference, for all topologies with the same input and operators, whatever their
    names."""
    directory = cluster.directory / f"reference-{setting.name}"
    directory.mkdir()
    reference = Reference(resource(setting), cluster.shared, directory)
    reference.execute()
    return reference
