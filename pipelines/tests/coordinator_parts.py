"""Parts of the coordinator's test world: topologies without rows, and tasks that have positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rekindle.coordinator.model import Generation, partition_of
from rekindle.protocol import (
    CheckpointDone,
    Contradiction,
    PollRequest,
    PollResponse,
    SinkAssignment,
    SinkProgress,
    TaskPhase,
)
from rekindle.streams.digest import chain_digest, chain_from
from rekindle.topology.model import Exchange, Input, Resources, Segment, Slot, Topology
from rekindle.topology.spec import TopologySpec

SCHEMA = pa.schema([("a", pa.int64())])


@dataclass(frozen=True)
class Part:
    """One segment of a test topology, all operators stateful. `edit` tells definitions of the same
    name apart."""

    name: str
    inputs: tuple[str, ...] = ()
    partitions: int = 1
    replicas: int = 1
    query: bool = False
    sink: str = "file:///x"
    operators: tuple[str, ...] = ()
    edit: str = ""

    @property
    def id(self) -> str:
        return self.name + self.edit

    @property
    def stream(self) -> str:
        return f"op-{self.id}"


def make_topology(parts: Sequence[Part], every: int = 4) -> Topology:
    by_name = {p.name: p for p in parts}
    spec = TopologySpec.model_validate(
        {
            "epochInterval": "1s",
            "checkpoint": {"interval": f"{every}s", "store": "memory://x"},
            "sources": [
                {"name": p.name, "schema": "a BIGINT", "generator": {"rowsPerSecond": 1}}
                for p in parts
                if not p.inputs
            ],
            "operators": [
                {"name": p.name, "inputs": list(p.inputs), "sql": "SELECT * FROM x"}
                for p in parts
                if p.inputs
            ],
            "queries": [
                {"name": f"q-{p.name}", "from": p.name, "sink": {"files": {"url": p.sink}}}
                for p in parts
                if p.query
            ],
        }
    )
    segments = tuple(_segment(p, by_name) for p in parts)
    return Topology("t", spec, {}, segments)


def _segment(part: Part, by_name: dict[str, Part]) -> Segment:
    def read(name: str) -> Input:
        source = by_name[name]
        exchange = Exchange.FORWARD if source.partitions == part.partitions else Exchange.HASH
        return Input(source.stream, name, SCHEMA, source.partitions, exchange, ())

    return Segment(
        id=part.id,
        name=part.name,
        nodes=(part.name,),
        stream=part.stream,
        inputs=tuple(read(n) for n in part.inputs),
        partitions=part.partitions,
        replicas=part.replicas,
        queries=(f"q-{part.name}",) if part.query else (),
        resources=Resources(100, 1),
    )


def make_generation(parts: Sequence[Part], number: int = 1, every: int = 4) -> Generation:
    lineage = {p.id: p.operators or (p.stream,) for p in parts}
    return Generation(number, make_topology(parts, every), lineage)


@dataclass
class FakeTask:
    """What a task does with its input epochs, without rows: a position, a log, checkpoints."""

    slot: Slot
    incarnation: int
    boot: int = 0
    fence: int = 0
    phase: TaskPhase = "Waiting"
    position: int = -1  # of the engine
    log_base: int = 0
    log_last: int = -1  # ahead of the engine while it replays what an earlier boot has logged
    restored_from: int | None = None
    sink_lag: int = 0
    sunk: int = -1
    frozen: bool = False
    saved: dict[int, CheckpointDone] = field(default_factory=dict)
    last_poll: PollRequest | None = None
    polls: list[PollRequest] = field(default_factory=list)
    lie: str = ""  # what is wrong with all that it computes from now on
    lie_from: int = 0  # epochs before are right
    wrong: str = ""  # what is wrong with its state
    chain: str = "-1:"
    computed: dict[int, tuple[str, str]] = field(default_factory=dict)  # digest, chained digest
    logged: dict[int, str] = field(default_factory=dict)
    entries: dict[str, tuple[str, str]] = field(default_factory=dict)  # the store: wrong, chain
    engine: str = "e1"
    took_back: Contradiction | None = None  # what an earlier boot had in its log
    deaf: bool = False  # answers, and does nothing that it is told

    def poll(self, poll: PollRequest) -> PollResponse | None:
        """None where it refuses: a lower fence, or another incarnation is meant."""
        if poll.task.incarnation != self.incarnation or poll.fence < self.fence:
            return None
        self.fence = poll.fence
        self.polls.append(poll)
        boot = self.boot
        if not poll.ask_only and not self.deaf:
            self.obey(poll)
        return self.response() if boot == self.boot else None

    def obey(self, poll: PollRequest) -> None:
        self.last_poll = poll
        if poll.recompute == self.boot_id:
            self.reboot()
            self.log_base, self.log_last, self.logged = 0, -1, {}
            return
        if poll.floor is not None:
            self.log_base = max(self.log_base, min(poll.floor, self.log_last) + 1)
        if poll.committed is not None:
            self.saved = {e: c for e, c in self.saved.items() if e > poll.committed.epoch}
        if self.phase == "Waiting" and poll.restore is not None:
            self.phase = "Restoring"
            self.restored_from = self.position = poll.restore.epoch
            start = ("", chain_from(self.position))
            self.wrong, self.chain = self.entries.get(poll.restore.object or "", start)
            if self.log_last < self.position:
                self.log_base, self.log_last = self.position + 1, self.position

    @property
    def boot_id(self) -> str:
        return f"{self.incarnation}.{self.boot}"

    def take(self, inputs: Sequence[str] = ()) -> None:
        """Process one epoch of inputs with these digests; what is wrong with them stays wrong."""
        self.position += 1
        lie = self.lie if self.position >= self.lie_from else ""
        marks = {mark for text in (*inputs, lie, self.wrong) for mark in text if mark in "!?"}
        self.wrong = "".join(sorted(marks))
        digest = f"d{self.position}{self.wrong}"
        self.chain = chain_digest(self.chain, self.position, 0, digest)
        self.computed[self.position] = (digest, self.chain)
        self.logged[self.position] = digest
        self.log_last = max(self.log_last, self.position)

    def response(self) -> PollResponse:
        assert self.last_poll is not None or self.fence
        asked = self.last_poll.digests_of if self.last_poll else ()
        epochs = (*sorted(asked), *range(self.position - 15, self.position + 1))
        said = {e: self.computed[e] for e in epochs if e in self.computed}
        return PollResponse(
            task={
                "segment": self.slot.segment,
                "partition": self.slot.partition,
                "replica": self.slot.replica,
                "incarnation": self.incarnation,
            },
            boot_id=self.boot_id,
            fence=self.fence,
            engine=self.engine,
            phase=self.phase,
            stable_epoch=self.log_last if self.phase in ("CatchingUp", "Live") else -1,
            head_epoch=self.log_last,
            restored_from=self.restored_from,
            log_base=self.log_base,
            digests={e: digest for e, (digest, _) in said.items()},
            chained={e: chain for e, (_, chain) in said.items()},
            contradiction=self.took_back,
            checkpoints=tuple(self.saved[e] for e in sorted(self.saved)),
            sinks=tuple(self._progress(s) for s in self.last_poll.sinks) if self.last_poll else (),
        )

    def _progress(self, assigned: SinkAssignment) -> SinkProgress:
        durable = max(assigned.from_epoch - 1, self.position - self.sink_lag)
        if self.last_poll is not None and self.last_poll.sinks_through is not None:
            durable = min(durable, max(self.sunk, self.last_poll.sinks_through))
        self.sunk = max(self.sunk, durable)
        return SinkProgress(assigned=assigned, durable=durable)

    def reboot(self) -> None:
        """The container restarts: same incarnation, nothing in memory, the log is still there."""
        self.boot += 1
        self.phase, self.restored_from, self.position = "Waiting", None, -1
        self.saved, self.last_poll, self.fence = {}, None, 0
        self.computed, self.sunk = {}, -1
        self.frozen = False

    def save(self) -> None:
        epoch = self.position
        key = f"{partition_of(self.slot).key}@{epoch}{self.wrong}"
        self.entries[key] = (self.wrong, self.chain)
        self.saved[epoch] = CheckpointDone(
            epoch=epoch, object=key, digest=f"s{epoch}{self.wrong}", bytes=10
        )
