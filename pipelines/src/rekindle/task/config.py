"""A task's settings: its environment and the topology file, parsed once.

Design: docs/design/task.md#environment.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rekindle.arrow_types import arrow_schema
from rekindle.consistency.messages import ConsistencySettings, Policy
from rekindle.engine.memory import DEFAULT_LIMIT_BYTES, MemoryPlan, plan_memory
from rekindle.engine.state.spill import RunFiles
from rekindle.errors import RekindleError
from rekindle.exchange.routing import partitions_read
from rekindle.identity import Identity
from rekindle.protocol import MAX_INTERVALS, TaskRef
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Segment, Topology


class BadEnvironment(RekindleError):
    """A variable or the topology file is missing or wrong; names it."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Identity, addresses, directories and topology of a task, from its environment. `data`: the
    directory of all its files. (`core.messages.TaskSettings` has the part that its core needs.)"""

    ref: TaskRef
    bind: str
    data: Path
    identity: Identity
    generation: int
    origin_us: int  # start of epoch 0, Unix time
    topology: Topology
    segment: Segment
    cds_archive: Path | None  # AppCDS archive of Spark's classes: the JVM starts faster
    memory: MemoryPlan = field(default_factory=plan_memory)

    @property
    def run_files(self) -> RunFiles:
        return RunFiles(self.data / "state", self.memory.state_bytes)

    @property
    def operator_ids(self) -> tuple[str, ...]:
        return tuple(self.topology.nodes[n].id for n in self.segment.nodes)

    @property
    def uid(self) -> str:
        """The UID of the StreamTopology object."""
        return self.identity.topology

    @property
    def log_directory(self) -> Path:
        """Directory of the task's output log."""
        return self.data / "log" / self.uid / self.segment.stream / str(self.ref.partition)

    @property
    def attempts_file(self) -> Path:
        """The file with the numbers of tentative branches that this pod has used."""
        return self.data / "attempts" / self.uid / f"{self.segment.stream}-{self.ref.partition}"

    @property
    def tentative_directory(self) -> Path:
        """Directory of the tentative branches of the output log. It is inside of the log's, so that
        a log that is discarded is deleted with them."""
        return self.log_directory / "tentative"

    @property
    def epoch_interval_us(self) -> int:
        return self.topology.spec.epoch_interval

    def consistency(self, first_attempt: int) -> ConsistencySettings:
        """The consistency settings of a task that reads streams. The plan has `read_ahead_bytes`
        twice: for incomplete and for complete epochs. If output may be tentative, three buffers
        share that memory, since there are epochs of live subscriptions too."""
        settings = consistency_settings(self.topology, self.segment, self.ref)
        buffers = 2 if settings.max_delay_s is None else 3
        read_ahead_bytes = self.memory.read_ahead_bytes * 2 // buffers
        return replace(settings, first_attempt=first_attempt, read_ahead_bytes=read_ahead_bytes)

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> TaskConfig:
        """Of a standby's environment: of the first task of its segment, until it is given a slot.
        Raises BadEnvironment, InvalidTopology."""
        path = Path(_required(env, "REKINDLE_TOPOLOGY_FILE"))
        try:
            document = json.loads(path.read_text())
            name, uid = document["name"], document["uid"]
            generation = int(document["generation"])
            origin_us = parse_origin(document["origin"])
            spec = load_spec(document["spec"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadEnvironment(f"topology file {path}: {error!r}") from error
        # Whether file:// stores are shared was checked when the topology was accepted.
        topology = compile_topology(spec, name, skip_cluster_checks=True, accepted=True)
        ref = TaskRef(
            segment=_required(env, "REKINDLE_SEGMENT"),
            partition=_number(env, "REKINDLE_PARTITION"),
            replica=_number(env, "REKINDLE_REPLICA"),
            incarnation=_number(env, "REKINDLE_INCARNATION"),
        )
        segment = next((s for s in topology.segments if s.id == ref.segment), None)
        if segment is None or not 0 <= ref.partition < segment.partitions:
            raise BadEnvironment(
                f"topology {name} (generation {generation}) has no segment {ref.segment} with "
                f"partition {ref.partition}; REKINDLE_SEGMENT is of another generation"
            )
        archive = env.get("REKINDLE_CDS_ARCHIVE")
        limit = _number(env, "REKINDLE_MEMORY") if "REKINDLE_MEMORY" in env else DEFAULT_LIMIT_BYTES
        return TaskConfig(
            ref=ref,
            bind=_required(env, "REKINDLE_BIND"),
            data=Path(_required(env, "REKINDLE_DATA")),
            identity=Identity.from_environment(uid, env),
            generation=generation,
            origin_us=origin_us,
            topology=topology,
            segment=segment,
            cds_archive=Path(archive) if archive else None,
            memory=plan_memory(
                limit,
                with_jvm=len(segment.nodes) > 1 or not segment.is_source,
                branches=spec.max_delay is not None,
            ),
        )


def left_out_intervals(topology: Topology) -> int:
    """So many checkpoint epochs in a row may have no checkpoint in normal operation."""
    spec = topology.spec
    targets = [spec.checkpoint.replay_target, *(o.checkpoint.replay_target for o in spec.operators)]
    return 0 if all(target is None for target in targets) else MAX_INTERVALS


def parse_origin(text: str) -> int:
    """RFC 3339 -> microseconds since the Unix epoch."""
    moment = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name)
    if not value:
        raise BadEnvironment(f"{name} is not set; see docs/design/task.md#environment")
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = _required(env, name)
    try:
        return int(value)
    except ValueError as error:
        raise BadEnvironment(f"{name} is {value!r}, not a number") from error


def consistency_settings(topology: Topology, segment: Segment, ref: TaskRef) -> ConsistencySettings:
    """The consistency settings of a task that reads streams, from the spec."""
    max_delay_us, availability = topology.spec.max_delay, topology.spec.availability
    return ConsistencySettings(
        inputs=[partitions_read(i, ref.partition) for i in segment.inputs],
        schemas=[arrow_schema(i.schema) for i in segment.inputs],
        blocking_inputs=frozenset(range(len(segment.inputs))) if segment.blocks else frozenset(),
        max_delay_s=None if max_delay_us is None else max_delay_us / 1e6,
        delay_fraction=availability.delay_fraction,
        during_failure=Policy(availability.during_failure),
        during_stabilization=Policy(availability.during_stabilization),
        replica=ref.replica,
    )
